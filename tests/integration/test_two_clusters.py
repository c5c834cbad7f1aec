"""Two real clusters: a republisher and a copy that read the one and write the other, and the chains that they write."""

import json
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator

import pytest

from envelope import Envelope, Histories, Lineage, Node, Verdict, decode, encode
from jobs import stack
from jobs.environment import UsageError
from jobs.republish import Republisher, RetryTopics, identity
from persistence.kafka import KafkaSettings, Topics
from tests.support.republish import Make, produce, read_all, run
from tests.support.sessions import killed, ran, written

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.fixture(scope="module")
def west() -> Iterator[KafkaSettings]:
    """Another cluster than the one of `settings`."""
    with stack.ephemeral() as servers:
        yield KafkaSettings(servers.kafka)


@pytest.fixture
def both(west: KafkaSettings, topic: Make) -> Callable[[], str]:
    """Creates a topic of one name in both clusters."""

    def fresh() -> str:
        name = topic(2, "orders")
        Topics(west, timeout=20).create(name, 2)
        return name

    return fresh


ENVELOPES = [
    (b"k%d" % (number % 9), encode(Envelope(b"%d" % number, key=b"k%d" % (number % 9)))) for number in range(100)
]


def test_a_republisher_reads_one_cluster_and_writes_a_topic_of_the_same_name_in_the_other(
    west: KafkaSettings, settings: KafkaSettings, both: Callable[[], str]
) -> None:
    name, group = both(), uuid.uuid4().hex
    produce(west, name, ENVELOPES)
    counts = run(settings, source=name, target=name, name="mirror", group=group, cluster="west", source_settings=west)
    assert (counts.consumed, counts.produced) == (100, 100)
    assert sum(Topics(west).group_offsets(group, [name]).values()) == 100, "committed where it was read"
    records = read_all(settings, name)
    topic_id = Topics(west).topic_ids([name])[name]
    hops = [decode(record.value()).chain[0] for record in records]
    assert {(hop.topic, hop.cluster, hop.topic_id, hop.via) for hop in hops} == {(name, "west", topic_id, "mirror")}
    assert sorted(int(decode(record.value()).payload) for record in records) == [*range(100)]


def test_a_reader_of_the_other_cluster_recognises_what_is_sent_twice_and_tells_the_clusters_apart(
    west: KafkaSettings, settings: KafkaSettings, both: Callable[[], str]
) -> None:
    name = both()
    produce(west, name, ENVELOPES)
    for _ in range(2):  # with a new group: everything is sent again
        run(settings, source=name, target=name, name="mirror", cluster="west", source_settings=west)
    produce(settings, name, ENVELOPES)  # other events, although they have the same name, partitions and keys
    histories: dict[bytes, Histories] = {}
    verdicts: dict[Verdict, int] = {}
    for record in sorted(read_all(settings, name), key=lambda one: (one.partition(), one.offset())):
        lineage = Lineage.of(decode(record.value()).chain, Node(name, record.partition(), record.offset())).check()
        standing = lineage.standing()
        known = histories.get(record.key(), Histories())
        [decision] = known.judge([standing])
        if decision.fold:
            histories[record.key()], _ = known.folding([standing])
        verdicts[decision.verdict] = verdicts.get(decision.verdict, 0) + 1
    assert verdicts[Verdict.DUPLICATE] == 100
    assert sum(verdicts.values()) - verdicts[Verdict.DUPLICATE] == 200


def test_an_event_does_not_return_to_the_cluster_and_topic_that_it_came_from(
    west: KafkaSettings, settings: KafkaSettings, both: Callable[[], str], topic: Make
) -> None:
    name, back = both(), topic(1, "dead")
    Topics(west, timeout=20).create(back, 1)
    produce(west, name, ENVELOPES[:3])
    run(settings, source=name, target=name, name="there", cluster="west", source_settings=west, target_cluster="east")
    counts = run(
        west,
        source=name,
        target=name,
        name="back",
        cluster="east",
        source_settings=settings,
        target_cluster="west",
        dead_letter=back,
    )
    assert (counts.produced, counts.dead_lettered) == (0, {"chain_loop": 3})


@pytest.mark.parametrize(
    "fault",
    [
        "copy:position.after@2",
        *(
            pytest.param(f"copy:{one}@2", marks=pytest.mark.kills)
            for one in ("produce.after", "commit.before", "commit.after")
        ),
    ],
)
def test_a_copy_between_clusters_that_is_killed_neither_loses_nor_repeats(
    fault: str, west: KafkaSettings, settings: KafkaSettings, both: Callable[[], str], topic: Make
) -> None:
    name, positions = both(), topic(1, "positions", cleanup_policy="compact")
    produce(west, name, ENVELOPES)
    arguments = {
        "bootstrap": settings.bootstrap,
        "elsewhere": west.bootstrap,
        "kind": "topic",
        "source": {"topic": name, "kind": "envelope"},
        "name": f"copy-{uuid.uuid4().hex}",
        "target": name,
        "positions": positions,
        "batch_size": 20,
        "until_caught_up": True,
    }
    killed("copy_process", fault, **arguments)
    assert ran("copy_process", **arguments)[0] == 0
    got = written(settings, name)
    assert sorted(int(one.payload) for one in got) == [*range(100)]
    assert {one.chain[0].cluster for one in got} == {"west"}


def headwater(*arguments: str) -> tuple[int, list[str], str]:
    command = [sys.executable, "-m", "jobs.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    return done.returncode, done.stdout.splitlines(), done.stderr


def test_the_commands_take_the_other_cluster_by_name_and_address_or_file(
    west: KafkaSettings, settings: KafkaSettings, both: Callable[[], str], topic: Make, tmp_path
) -> None:
    name, positions, copied = both(), topic(1, "positions", cleanup_policy="compact"), topic(1, "copied")
    produce(west, name, ENVELOPES)
    file = tmp_path / "west.toml"
    file.write_text(f'[kafka]\nbootstrap = "{west.bootstrap}"\n')
    common = ["--from", name, "--bootstrap", settings.bootstrap, "--until-caught-up", "--json"]
    via = f"mirror-{uuid.uuid4().hex}"
    place = ["--from-cluster", f"west={west.bootstrap}"]
    code, lines, errors = headwater(
        "republish", "jobs.republish.record:identity", "--to", name, "--via", via, *place, *common
    )
    assert (code, json.loads(lines[-1])["produced"]) == (0, 100), errors
    place = ["--from-cluster", f"west={file}", "--positions", positions]
    code, lines, errors = headwater("copy", "--name", f"c-{uuid.uuid4().hex}", "--to", copied, *place, *common)
    assert (code, json.loads(lines[-1])["written"]) == (0, 100), errors
    code, _, errors = headwater("copy", "--name", "c", "--to", copied, "--from", name, "--from-cluster", "west")
    assert (code, "write NAME=HOST:PORT" in errors) == (2, True)


def test_two_clusters_need_a_name_and_allow_no_retry_topics(west: KafkaSettings, settings: KafkaSettings) -> None:
    for arguments in ({}, {"cluster": "west", "retry": RetryTopics({"retry": 1})}):
        with pytest.raises(UsageError, match="needs the name of the one that it reads"):
            Republisher(
                identity, source="a", target="b", name="r", settings=settings, source_settings=west, **arguments
            )
