"""`headwater explain` and `headwater blame` on a real broker, with flows that run in this process."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path as File
from types import ModuleType
from typing import Any
from xml.etree.ElementTree import fromstring

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from aggregations.definition.flow import Flow
from aggregations.local import executor, run_local
from jobs import Explanation, Fate, Outcome, Place, blame, explain
from jobs.dead_letters.discard import discard
from jobs.dead_letters.redrive import redrive
from jobs.stack import ports
from persistence.kafka import KafkaSettings
from persistence.kafka import topics as kafka_topics
from tests.messages import Leg
from tests.support.cli import run as headwater
from tests.support.flows import Totals, fleet, relay, shared
from tests.support.world import Sent, World, alone, legs, republished

pytestmark = [pytest.mark.integration]

LEG = [
    Leg(tail="N1", carrier="UA", minutes=5),
    Leg(tail="N2", carrier="DL", minutes=7),
    Leg(tail="N3", carrier="AA", minutes=9),
]


@pytest.fixture
def world(kafka: str, topic: Callable[..., str], tmp_path: File) -> Iterator[World]:
    """A topic of two partitions, a dead-letter topic and a store."""
    made = World(kafka, topic(partitions=2, name="legs"), topic(name="dead"), tmp_path, runner=run_local)
    with closing(made) as world:
        yield world


@pytest.fixture(params=[0, executor.FEW_RECORDS], ids=["compiled", "by message"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of few records are folded in one of two ways."""
    monkeypatch.setattr(executor, "FEW_RECORDS", request.param)


def explained(world: World, flow: Flow[Any], record: Place | str, **options: Any) -> list[Explanation]:
    return explain(
        flow, record, kafka=world.settings, stores=world.stores(flow), **{"dead_letters": world.dead, **options}
    )


def one(world: World, flow: Flow[Any], place: Place, **options: Any) -> Explanation:
    [found] = explained(world, flow, place, **options)
    return found


def places(world: World) -> list[Place]:
    """Every record of the topic, in order of partitions and offsets."""
    return [Place(record.topic, record.partition, record.offset) for record in world.records()]


def outcomes(found: Explanation) -> list[tuple[str, Outcome]]:
    return [(row.stage, row.outcome) for row in found.stages]


@pytest.mark.usefixtures("path")
def test_after_a_republisher_s_replay_every_record_is_folded_or_dropped_as_the_oracle_says(world: World) -> None:
    sent, flow = legs(24), fleet(world.topic)
    world.send(republished(sent, [*range(16), *range(10, 24)]))
    world.run(flow, max_records=12)
    first: dict[str, Place] = {}
    records = places(world)
    assert len(records) == 30
    for place in records:
        found = one(world, flow, place)
        root = found.lineage.split(" -> ")[0]
        if root in first:
            assert found.taken_by is None or found.taken_by.place == first[root]
        leg = sent[int(root.split(":")[2]) * 3 + int(root.split(":")[1])]
        if leg.minutes == 0:
            assert found.outcome is Outcome.REMOVED
        elif root in first:
            assert found.outcome is Outcome.DROPPED
            assert found.taken_by is not None
            assert found.taken_by.resend is not None
            assert (found.taken_by.resend.via, str(found.taken_by.resend.read)) == ("kit", root)
        else:
            assert outcomes(found) == [("aircraft", Outcome.FOLDED), ("carrier", Outcome.FOLDED)]
            assert [row.key for row in found.stages] == [leg.tail.encode(), leg.carrier.encode()]
        first.setdefault(root, place)


def test_blame_counts_what_the_republisher_sent_again_and_the_picture_shows_it(world: World) -> None:
    sent, flow = legs(30), fleet(world.topic)
    world.send(republished(sent, [*range(30), *range(10, 20), *range(10, 12)]))
    found = blame(flow, kafka=world.settings)
    [hop] = found.hops
    assert (hop.passage.via, hop.passage.source, hop.passage.target) == ("kit", "raw", world.topic)
    assert (hop.records, hop.resent, hop.events, found.records, found.resent) == (42, 12, 10, 42, 12)
    half = blame(flow, kafka=world.settings, ranges=[f"{world.topic}:0"])
    assert half.records < 42
    assert half.resent == sum(record.partition == 0 for record in world.records()) - len(
        {record.value for record in world.records() if record.partition == 0}
    )


def test_a_dead_letter_from_its_rejection_to_its_redrive(world: World) -> None:
    broken = Leg(tail="N9", carrier="broken", minutes=3)
    flow = fleet(world.topic, "messages")
    world.send([alone(LEG[0]), alone(broken)])
    world.run(flow)
    [place] = [record for record in places(world) if one(world, flow, record).letters]
    found = one(world, flow, place)
    [letter] = found.letters
    assert (found.outcome, letter.fate, letter.stage) == (Outcome.DEAD_LETTER, Fate.WAITING, "aircraft")
    assert letter.place == Place(world.dead, 0, 0)
    assert one(world, flow, place, dead_letters=None).stages[0].waits
    redrive(world.settings, world.dead, apply=True)
    [back] = [
        record for record in places(world) if record.offset > place.offset and record.partition == place.partition
    ]
    [letter] = one(world, flow, place).letters
    assert (letter.fate, letter.redriven) == (Fate.SENT, back)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Totals, "fold", lambda _self, state, _element: {**state, "legs": state["legs"] + 1})
        world.run(flow)
    found = one(world, flow, place)
    assert (found.letters[0].fate, outcomes(found)) == (
        Fate.REDRIVEN,
        [("aircraft", Outcome.FOLDED), ("carrier", Outcome.FOLDED)],
    )
    assert one(world, flow, back).outcome is Outcome.FOLDED
    [hop] = blame(flow, kafka=world.settings).hops
    assert (hop.passage.kind, hop.passage.source, hop.passage.target) == ("redrive", world.topic, world.topic)
    assert (hop.records, hop.resent) == (1, 1)


def test_a_discarded_dead_letter_counts_as_folded_and_is_not(world: World) -> None:
    flow = fleet(world.topic, "messages")
    world.send([alone(Leg(tail="N9", carrier="broken", minutes=3))])
    world.run(flow)
    [place] = places(world)
    discard(world.settings, world.dead, flow, world.stores(flow), apply=True)
    found = one(world, flow, place)
    assert (found.outcome, found.letters[0].fate) == (Outcome.DEAD_LETTER, Fate.DISCARDED)
    assert outcomes(found) == [("aircraft", Outcome.DEAD_LETTER)]
    assert "discarded" in found.stages[0].why


def test_diverted_unreadable_and_unread_records(world: World) -> None:
    flow = fleet(world.topic)
    world.send([alone(Leg(tail="N1", carrier="UA", minutes=-1), partition=0), Sent(b"nonsense", b"N1", partition=1)])
    world.run(flow)
    for place, reason in ((Place(world.topic, 0, 0), "diverted"), (Place(world.topic, 1, 0), "not_an_envelope")):
        found = one(world, flow, place)
        assert (found.outcome, found.letters[0].fate) == (Outcome.DEAD_LETTER, Fate.WAITING)
        assert found.letters[0].reason is not None
        assert found.letters[0].reason.value == reason
    world.send([alone(LEG[0], partition=0)])
    assert one(world, flow, Place(world.topic, 0, 1)).outcome is Outcome.NOT_READ


def test_retention_before_and_after_the_flow_read_a_record(world: World, kafka: str) -> None:
    flow, admin = fleet(world.topic), AdminClient({"bootstrap.servers": kafka})
    world.send([alone(leg, partition=0) for leg in LEG])
    world.run(flow)
    world.send([alone(leg, partition=0) for leg in LEG])
    [deleted] = admin.delete_records([TopicPartition(world.topic, 0, 4)]).values()
    deleted.result(timeout=60)
    read, lost = one(world, flow, Place(world.topic, 0, 1)), one(world, flow, Place(world.topic, 0, 3))
    assert (read.outcome, "deleted it since" in read.why) == (Outcome.EXPIRED, True)
    assert (lost.outcome, lost.why) == (Outcome.EXPIRED, "retention deleted it before the flow read it")
    assert blame(flow, kafka=world.settings, ranges=[f"{world.topic}:0:2-5"]).expired == 2


def test_items_of_a_flat_map_are_followed_to_every_stage(world: World) -> None:
    flow = shared(world.topic)
    world.send([alone(Leg(tail="N1", carrier="UA+DL", minutes=5))])
    world.run(flow)
    [place] = places(world)
    found = one(world, flow, place)
    assert [(row.stage, row.indices, row.key, row.outcome) for row in found.stages] == [
        ("carrier", (0,), b"UA", Outcome.FOLDED),
        ("carrier", (1,), b"DL", Outcome.FOLDED),
        ("aircraft", (0,), b"N1", Outcome.FOLDED),
        ("aircraft", (1,), b"N1", Outcome.FOLDED),
    ]


def test_a_flow_without_a_stage(world: World, topic: Callable[..., str]) -> None:
    out = topic(name="out")
    flow = relay(world.topic, out)
    world.send([alone(LEG[0])])
    world.run(flow)
    [place] = places(world)
    found = one(world, flow, place)
    assert (found.outcome, found.outputs) == (Outcome.PUBLISHED, (out,))


def test_a_record_of_the_first_topic_and_an_event_id_are_searched(world: World) -> None:
    sent, flow = legs(12), fleet(world.topic)
    world.send(republished(sent, [*range(12), 4]))
    world.run(flow)
    found = explained(world, flow, Place("raw", 1, 1))
    assert len(found) == 2
    assert {one.lineage.split(" -> ")[0] for one in found} == {"raw:1:1"}
    assert explained(world, flow, "no such event") == []


@pytest.mark.usefixtures("path")
def test_the_journal_names_the_batch_and_every_dropped_record(world: World, topic: Callable[..., str]) -> None:
    journal = topic(name="journal")
    sent, flow = [leg for leg in legs(90, tails=1) if leg.minutes], fleet(world.topic)
    world.send(republished(sent))
    world.run(flow, max_records=40, journal=journal)
    world.send(republished(sent[:10]))
    world.run(flow, max_records=40, journal=journal)
    counts = {Outcome.FOLDED: 0, Outcome.DROPPED: 0}
    ends: dict[int, int] = {}
    for place in [*places(world)[:8], *places(world)[-12:]]:
        found = one(world, flow, place, dead_letters=None, journal=journal, search=0)
        counts[found.outcome] += 1
        batch = found.stages[0].batch
        assert batch is not None
        assert batch.exact
        assert batch.time_ms is not None
        assert batch.batch >= ends.get(place.partition, 1), "batches ascend with the offsets"
        ends[place.partition] = batch.batch
    assert counts == {Outcome.FOLDED: 10, Outcome.DROPPED: 10}
    world.check(flow)


@pytest.mark.parametrize("noted", [True, False], ids=["with its entries", "which left no entry"])
def test_a_record_that_a_killed_run_had_folded_is_not_taken_for_a_copy(
    world: World, topic: Callable[..., str], noted: bool
) -> None:
    journal, manifests = topic(name="journal"), list[bytes]()
    sent, flow = [leg for leg in legs(12) if leg.minutes], fleet(world.topic)
    world.send(republished(sent))
    world.run(
        flow,
        max_records=4,
        journal=journal if noted else None,
        progress=lambda _: manifests.append(world.manifest(flow)),
    )
    world.restore(flow, manifests[0])
    world.run(flow, journal=journal)
    for place in places(world):
        for options in ({"journal": journal}, {}):
            found = one(world, flow, place, dead_letters=None, **options)
            assert outcomes(found) == [("aircraft", Outcome.FOLDED), ("carrier", Outcome.FOLDED)]
    world.check(flow)


def test_a_journal_that_does_not_exist_is_refused_and_one_that_breaks_ends_no_run(
    world: World, topic: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    flow = fleet(world.topic)
    world.send([alone(leg) for leg in LEG])
    with pytest.raises(kafka_topics.TopicMissing, match="no-such-journal"):
        world.run(flow, journal="no-such-journal")
    small = topic(name="journal", max_message_bytes=1)
    world.run(flow, journal=small)
    world.check(flow)
    assert "The run continues" in caplog.text


@pytest.fixture
def flow_module(world: World, monkeypatch: pytest.MonkeyPatch) -> str:
    """The flow, for the command line."""
    module = ModuleType("explained_flow")
    module.flow = fleet(world.topic)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return f"{module.__name__}:flow"


@pytest.fixture
def command(
    world: World, flow_module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs `explain` or `blame`, and returns exit code, output and messages."""

    def run(name: str, *arguments: str, flow: str = flow_module) -> tuple[int, str, str]:
        stores = {f"--store={stage}={url}" for stage, url in world.stores(fleet(world.topic)).items()}
        given = sorted(stores) if name == "explain" else []
        code = headwater(monkeypatch, name, flow, *arguments, f"--bootstrap={world.settings.bootstrap}", *given)
        return (code, *capsys.readouterr())

    return run


def test_the_commands_show_tables_lines_and_a_picture(
    world: World, command: Callable[..., tuple[int, str, str]], tmp_path: File
) -> None:
    sent = [Leg(tail="N1", carrier="UA", minutes=5), Leg(tail="N1", carrier="DL", minutes=7)]
    world.send(republished(sent, [0, 1, 0]))
    world.run(fleet(world.topic))
    [first, _, again] = [str(place) for place in places(world)]
    code, out, _ = command("explain", again, "--dead-letters", world.dead)
    assert code == 0
    assert out.startswith(f"{again}: dropped: stage aircraft: {first} is the same event and came first\n")
    assert "duplicate" in out
    assert "raw:0:0" in out
    code, out, _ = command("explain", first, "--json")
    line: Mapping[str, Any] = json.loads(out)
    assert (code, line["outcome"], [row["key"] for row in line["stages"]]) == (0, "folded", ["N1", "UA"])
    picture = tmp_path / "blame.svg"
    code, out, err = command("blame", "--svg", str(picture))
    assert code == 0
    assert out.splitlines()[2].split()[:6] == ["kit", "republisher", "raw", "to", world.topic, "3"]
    assert "3 records, 1 of them sent again" in err
    assert "kit" in picture.read_text()
    fromstring(picture.read_text())
    code, out, _ = command("blame", "--json", f"--range={world.topic}:0:0-0")
    assert (code, [json.loads(line)["resent"] for line in out.splitlines()]) in ((0, [0]), (0, []))


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["explain", "legs:0"], 2, "write TOPIC:PARTITION:OFFSET"),
        (["explain"], 2, "give TOPIC:PARTITION:OFFSET or --event-id ID"),
        (["explain", "{topic}:0:99"], 3, "no record has this offset yet"),
        (["explain", "{topic}:7:0"], 3, "no record has this offset yet"),
        (["explain", "{topic}:0:0", "--range={topic}"], 2, "--range"),
        (["explain", "{topic}:0:0", "--dead-letters=nowhere"], 3, "nowhere"),
        (["explain", "{topic}:0:0", "--journal=nowhere"], 3, "nowhere"),
        (["explain", "{topic}:0:0", "--store=nobody=sqlite://x"], 2, "nobody"),
        (["explain", "--event-id=none"], 3, "no record with event id none"),
        (["blame", "--range={topic}:0:5-1"], 3, "reversed"),
        (["blame", "--range=other"], 3, "the flow reads"),
        (["blame", "--svg=/no/such/directory/x.svg"], 2, "No such file"),
    ],
)
def test_what_cannot_be_answered_is_one_line_with_the_remedy(
    world: World, command: Callable[..., tuple[int, str, str]], words: list[str], code: int, line: str
) -> None:
    flow = fleet(world.topic)
    world.send([alone(leg, partition=0) for leg in LEG])
    world.run(flow)
    ended, out, err = command(*(word.format(topic=world.topic) for word in words))
    assert (ended, out) == (code, "")
    [said] = [one for one in err.splitlines() if line in one]
    assert said


def test_an_unknown_flow_and_an_unreachable_broker(
    world: World,
    command: Callable[..., tuple[int, str, str]],
    flow_module: str,
    tmp_path: File,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, _, err = command("explain", f"{world.topic}:0:0", flow="explained_flow:nothing")
    assert (code, "no 'nothing'" in err) == (2, True)
    nowhere = KafkaSettings(f"{ports.LOOPBACK}:{ports.remembered(tmp_path, ['kafka'])['kafka']}")
    code = headwater(monkeypatch, "blame", flow_module, f"--bootstrap={nowhere.bootstrap}")
    assert code == 1
    assert "Check that the broker runs" in capsys.readouterr().err
