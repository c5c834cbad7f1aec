"""A republisher that forwards records unchanged, through librdkafka's C API: killed, and in a group that changes."""

import signal
import subprocess
import time
import uuid
from collections import defaultdict
from typing import Any

import pytest
from confluent_kafka import ConsumerGroupState, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from envelope import Envelope, Hop, decode, encode
from jobs.republish import Republisher, Statistics, identity
from jobs.republish.growth_watch import GrowthWatch
from jobs.republish.input import Input
from jobs.republish.pointers import PointedMessage
from persistence.kafka import KafkaSettings, Topics
from tests.support.republish import Make, killed_and_repeated, process, read_all

pytestmark = pytest.mark.integration

COUNT = 6000
DAMAGED, KEYLESS, HEADED = 997, 7, 173
"""Each record whose number is a multiple is a dead letter, has no key, or has headers and takes the normal path."""


def record(number: int) -> dict[str, Any]:
    key = None if number % KEYLESS == 0 else b"k%d" % (number % 50)
    value = encode(Envelope(b"%d" % number, (Hop("raw", 0, number),), key=key))
    headers = [("h", b"1")] if number % HEADED == 0 else []
    return {"key": key, "value": value[:-1] if number % DAMAGED == 0 else value, "headers": headers}


def fill(settings: KafkaSettings, topic: str, first: int = 0, count: int = COUNT) -> None:
    """Write records in transactions, some of which are aborted: offsets have gaps."""
    producer = Producer(settings.client(transactional_id=uuid.uuid4().hex, partitioner="murmur2_random"))
    producer.init_transactions(20)
    for begin in range(first, first + count, 500):
        for aborted in (True, False):
            producer.begin_transaction()
            for number in range(begin, begin + (20 if aborted else 500)):
                producer.produce(topic, **record(number))
            producer.flush(20)
            if aborted:
                producer.abort_transaction(20)
            else:
                producer.commit_transaction(20)


NUMBERS = {record(number)["value"]: number for number in range(4 * COUNT)}


def verify(settings: KafkaSettings, source: str, target: str, dead: str, *, once: bool) -> None:
    """Every record is in the target or a dead letter, copies are alike, and each partition's order is kept."""
    given = {(one.partition(), one.offset()): one for one in read_all(settings, source)}
    made: dict[tuple[int, int], list[Any]] = defaultdict(list)
    orders: dict[tuple[int, int], list[int]] = defaultdict(list)
    for one in read_all(settings, target):
        raw, own = decode(one.value()).chain
        place = own.partition, own.offset
        # A record without a key may arrive over two partitions, if it is sent again after a kill, and is read in any order.
        if place not in made and one.key() is not None:
            orders[own.partition, one.partition()].append(own.offset)
        made[place].append(one)
        assert (own.topic, own.via, raw.topic) == (source, "r", "raw")
    damaged = {place for place, one in given.items() if NUMBERS[one.value()] % DAMAGED == 0}
    assert set(made) == set(given) - damaged
    assert len({one.value() for one in read_all(settings, dead)}) == len(damaged)
    assert all(offsets == sorted(offsets) for offsets in orders.values())
    for place, copies in made.items():
        before = given[place]
        assert {(one.key(), one.value()) for one in copies} == {(before.key(), copies[0].value())}
        assert decode(copies[0].value()).payload == decode(before.value()).payload
        assert copies[0].headers() == before.headers()
        assert not once or len(copies) == 1


def arguments_of(settings: KafkaSettings, source: str, target: str, dead: str, **more: Any) -> dict[str, Any]:
    return {
        "bootstrap": settings.bootstrap,
        "transform": "jobs.republish.record:identity",
        "source": source,
        "kind": "envelope",
        "target": target,
        "dead_letter": dead,
        "name": "r",
        "group": uuid.uuid4().hex,
        "batch_size": 900,
        **more,
    }


@pytest.mark.parametrize(
    "fault",
    [
        "republish:produce.after@4",
        *(
            pytest.param(one, marks=pytest.mark.kills)
            for one in (
                "republish:produce.before@2",
                "republish:produce.after@9",
                "republish:flush.before@2",
                "republish:flush.after@3",
                "republish:dead_letter.after@1",
                "republish:commit.before@2",
                "republish:commit.after@3",
            )
        ),
    ],
)
def test_one_that_is_killed_repeats_and_loses_nothing(fault: str, settings: KafkaSettings, topic: Make) -> None:
    source, target, dead = topic(4, "in"), topic(3, "out"), topic(1, "dead")
    fill(settings, source)
    arguments = arguments_of(settings, source, target, dead, options={"group.instance.id": "one"}, until_caught_up=True)
    killed_and_repeated(fault, arguments)
    verify(settings, source, target, dead, once=False)


@pytest.mark.parametrize("objects", [False, pytest.param(True, marks=pytest.mark.kills)])
@pytest.mark.parametrize("killed", [False, True])
def test_members_that_come_and_go_repeat_nothing_unless_one_is_killed(
    killed: bool, objects: bool, settings: KafkaSettings, topic: Make, topics: Topics
) -> None:
    source, target, dead = topic(6, "in"), topic(3, "out"), topic(1, "dead")
    # On a busy machine a short session ends while its member works.
    options = {"session.timeout.ms": "6000"} if killed else {}
    arguments = arguments_of(settings, source, target, dead, objects=objects, max_wait=0.1, options=options)
    members: list[subprocess.Popen[str]] = []
    try:
        for turn in range(4):
            members.append(process(**arguments))
            fill(settings, source, turn * COUNT, COUNT)
            if turn == 2:
                leaving = members.pop(0)
                assert leaving.stdout and leaving.stdout.readline()  # it has committed, so it handles signals
                leaving.send_signal(signal.SIGKILL if killed else signal.SIGTERM)
                leaving.communicate(timeout=60)
                assert leaving.returncode == (-signal.SIGKILL if killed else 0)
        ends = {place: marks.high for place, marks in topics.marks([source]).items()}
        deadline = time.monotonic() + 180
        while topics.group_offsets(arguments["group"], [source]) != ends:
            assert time.monotonic() < deadline
            assert all(one.poll() is None for one in members)
            time.sleep(0.2)
    finally:
        for one in members:
            one.send_signal(signal.SIGTERM)
        for one in members:
            one.communicate(timeout=60)
    verify(settings, source, target, dead, once=not killed)


def is_stable(admin: AdminClient, group: str) -> bool:
    try:
        return bool(admin.describe_consumer_groups([group])[group].result().state == ConsumerGroupState.STABLE)
    except KafkaException:  # the group has no coordinator yet
        return False


@pytest.mark.parametrize("pointers", [True, False])
def test_a_member_that_is_given_partitions_while_it_leaves_takes_none(
    pointers: bool, settings: KafkaSettings, topic: Make
) -> None:
    source, group, counts = topic(4, "in"), uuid.uuid4().hex, Statistics()
    growth = GrowthWatch(
        [source], group=group, accepted=False, max_age=300, statistics=counts, on_change=lambda: None
    )  # fmt: skip
    member = Input(
        settings,
        group,
        [source],
        "r",
        before_revoke=lambda: None,
        statistics=counts,
        member_ids=set(),
        growth=growth,
        pointers=pointers,
    )
    admin, deadline = AdminClient(settings.client()), time.monotonic() + 30
    while not is_stable(admin, group):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    member.close()
    assert not member.partitions


def test_no_object_is_made_of_usual_records(
    settings: KafkaSettings, topic: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, dead = topic(4, "in"), topic(3, "out"), topic(1, "dead")
    fill(settings, source)
    objects = []
    of_address = PointedMessage.__init__

    def made(self: PointedMessage, address: int) -> None:
        objects.append(address)
        of_address(self, address)

    monkeypatch.setattr(PointedMessage, "__init__", made)
    done = Republisher(
        identity, source=source, target=target, name="r", group=uuid.uuid4().hex, settings=settings, dead_letter=dead
    ).run(until_caught_up=True)
    assert done.consumed == COUNT
    irregular = sum(not all(number % one for one in (DAMAGED, HEADED)) for number in range(COUNT))
    # The first slice is of a hundred: nothing is known of the topics of its chains. Each partition ends once or more.
    assert irregular <= len(objects) <= irregular + 100 + 500
    verify(settings, source, target, dead, once=True)
