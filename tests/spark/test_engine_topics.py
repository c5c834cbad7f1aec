"""What can happen to a topic between two runs, and logs whose offsets have gaps."""

from collections.abc import Sequence

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from aggregations.engine.engine import Engine
from aggregations.errors import RunRefusedError
from aggregations.report import Report
from envelope import Verdict
from tests.support.flows import PATHS, Path, fleet, totals
from tests.support.world import Sent, World, alone, legs, republished, verdicts

pytestmark = [pytest.mark.spark, pytest.mark.integration]


@pytest.mark.parametrize("path", PATHS)
def test_a_topic_that_was_created_again_is_folded_from_its_beginning_once_that_is_accepted(
    world: World, path: Path
) -> None:
    sent, flow = legs(90), fleet(world.topic, path)
    world.send(alone(leg) for leg in sent[:50])
    world.run(flow)
    old = world.records()
    world.topics.delete([world.topic])
    world.topics.create(world.topic, 2)
    world.send(alone(leg) for leg in sent[50:])
    with pytest.raises(RunRefusedError, match=r"created again.*--accept topic-recreated"):
        world.run(flow)
    report = world.run(flow, accept=["topic-recreated"])
    assert set(verdicts(report)["aircraft"]) == {Verdict.NEW_INCARNATION}
    world.check(flow, old, world.records())
    assert world.results(flow, "aircraft") == totals(sent, "tail")
    assert world.results(flow, "carrier") == totals(sent, "carrier")
    assert world.run(flow).records == 0


def test_a_topic_that_is_created_again_while_it_is_read_ends_the_run_before_any_of_it_is_folded(world: World) -> None:
    sent, flow = legs(90), fleet(world.topic)
    world.send(alone(leg) for leg in sent)
    before: list[object] = []

    def create_again(_: Report) -> None:
        if not before:
            before.append((world.views(flow, "aircraft"), world.views(flow, "carrier"), world.ends(flow)))
            world.topics.delete([world.topic])
            world.topics.create(world.topic, 2)
            world.send(alone(leg) for leg in sent * 2)  # longer than the first one: no offset is out of its range

    with pytest.raises(RunRefusedError, match=r"created again.*--accept topic-recreated"):
        world.run(flow, max_records=30, progress=create_again)
    assert before == [(world.views(flow, "aircraft"), world.views(flow, "carrier"), world.ends(flow))]


@pytest.mark.parametrize("path", PATHS)
def test_partitions_that_are_added_are_read_from_their_beginning(world: World, path: Path) -> None:
    sent, flow = legs(120), fleet(world.topic, path)
    world.send(republished(sent, range(60)))
    world.run(flow)
    first = world.records()
    world.topics.add_partitions(world.topic, 5)
    # The keys move; what is sent again lands in another partition than before.
    world.send(republished(sent, range(30, 120)))
    report = world.run(flow, max_records=50)
    assert report.verdicts["aircraft"][Verdict.DUPLICATE] > 0
    world.check(flow, first, [record for record in world.records() if record not in first])
    assert world.results(flow, "aircraft") == totals(sent, "tail")
    assert world.results(flow, "carrier") == totals(sent, "carrier")


@pytest.mark.parametrize("path", PATHS)
def test_aborted_transactions_and_their_markers_leave_gaps_that_do_not_matter(world: World, path: Path) -> None:
    sent, flow = legs(60), fleet(world.topic, path)
    producer = Producer({"bootstrap.servers": world.settings.bootstrap, "transactional.id": world.topic})
    producer.init_transactions(30)

    def transaction(messages: Sequence[Sent], *, commit: bool) -> None:
        producer.begin_transaction()
        for one in messages:
            producer.produce(world.topic, one.value, one.key)
        producer.flush(30)
        producer.commit_transaction(30) if commit else producer.abort_transaction(30)

    poison = Sent(b"poison", b"N1")
    for start in range(0, 60, 20):
        transaction([*(alone(leg) for leg in sent[start : start + 10]), poison], commit=True)
        transaction([alone(leg) for leg in sent], commit=False)
        transaction([alone(leg) for leg in sent[start + 10 : start + 20]], commit=True)
        transaction([alone(leg) for leg in sent[:5]], commit=False)
        world.run(flow, max_records=60)
    world.check(flow)
    assert world.results(flow, "carrier") == totals(sent, "carrier")
    assert len(world.dead_letters()) == 3
    assert world.run(flow).records == 0


def test_records_that_were_deleted_unread_are_refused_until_that_is_accepted(world: World) -> None:
    sent, flow = legs(60), fleet(world.topic)
    world.send(alone(leg, partition=0) for leg in sent[:20])
    world.run(flow)
    world.send(alone(leg, partition=0) for leg in sent[20:])
    expire(world, p0=30)
    with pytest.raises(RunRefusedError, match=f"{world.topic}:0.*20.*30.*10.*--accept lost-records"):
        world.run(flow)
    world.run(flow, accept=["lost-records"])
    assert world.results(flow, "aircraft") == totals([*sent[:20], *sent[30:]], "tail")


def expire(world: World, **offsets: int) -> None:
    """Delete what lies below an offset of a partition: `expire(world, p1=5)`."""
    admin = AdminClient({"bootstrap.servers": world.settings.bootstrap})
    wanted = [TopicPartition(world.topic, int(name[1:]), offset) for name, offset in offsets.items()]
    for deleted in admin.delete_records(wanted).values():
        deleted.result(30)


def test_a_batch_ends_where_spark_took_it_to_though_no_record_is_there_and_a_partition_without_one_counts(
    world: World,
) -> None:
    sent, flow = legs(20), fleet(world.topic)
    producer = Producer({"bootstrap.servers": world.settings.bootstrap, "transactional.id": world.topic})
    producer.init_transactions(30)
    producer.begin_transaction()
    for leg in sent:
        producer.produce(world.topic, alone(leg).value, alone(leg).key, 0)
    producer.commit_transaction(30)  # its marker is the last thing in the log
    world.run(flow)
    end = len(sent) + 1
    assert world.ends(flow) == {0: end, 1: 0}
    assert world.topics.group_offsets(flow.name, [world.topic]) == {(world.topic, 0): end, (world.topic, 1): 0}
    expire(world, p0=end)
    assert world.run(flow).records == 0
    world.send(alone(leg, partition=1) for leg in sent[:5])
    expire(world, p1=5)
    with pytest.raises(RunRefusedError, match=f"{world.topic}:1.*up to 0, but its log begins at 5"):
        world.run(flow)


def test_a_partition_is_known_from_the_start_of_the_first_run_though_that_dies_before_it_reads(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = fleet(world.topic)
    world.send(alone(leg, partition=1) for leg in legs(5))

    def die(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(Engine, "_commit", die)
        world.run(flow)
    expire(world, p1=5)
    with pytest.raises(RunRefusedError, match=f"{world.topic}:1.*--accept lost-records"):
        world.run(flow)
