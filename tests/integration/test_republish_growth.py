"""Partitions that are added to the source of a republisher that lags: the order of each key at its target."""

import threading
import uuid
from collections import defaultdict
from typing import Any

import pytest
from confluent_kafka import Producer

from envelope import decode
from jobs.republish import InputRecord, InputTopics, OutputRecord, Republisher, Statistics, identity
from jobs.republish.absence import Unsafe
from jobs.republish.counts import TopicGrowth
from persistence.kafka import KafkaSettings, Topics
from tests.support.republish import Make, produce, read_all, run

pytestmark = pytest.mark.integration

COUNT = 300


def numbered(first: int) -> list[tuple[bytes, bytes]]:
    """Records of 20 keys, numbered in the order in which they are written."""
    return [(b"k%d" % (number % 20), b"%d" % number) for number in range(first, first + COUNT)]


def in_order(settings: KafkaSettings, target: str) -> bool:
    """Whether the numbers of every key rise; what was sent twice counts where it came first."""
    seen: dict[bytes, list[int]] = defaultdict(list)
    for message in read_all(settings, target):
        number, numbers = int(decode(message.value()).payload), seen[message.key()]
        if number not in numbers:
            numbers.append(number)
    assert sum(len(numbers) for numbers in seen.values()) >= 3 * COUNT
    return all(numbers == sorted(numbers) for numbers in seen.values())


def test_the_order_of_each_key_is_kept_when_partitions_are_doubled_behind_a_backlog(
    settings: KafkaSettings, topic: Make, topics: Topics
) -> None:
    source, target, group = topic(2, "in"), topic(1, "out"), uuid.uuid4().hex
    reached, go, shown = threading.Event(), threading.Event(), list[TopicGrowth]()

    def gated(record: InputRecord) -> OutputRecord:
        if int(record.payload) > 50:
            reached.set()
            assert go.wait(60)
        return identity(record)

    def member() -> tuple[Republisher, threading.Thread]:
        made = Republisher(
            gated,
            source=InputTopics.of(source, "raw"),
            target=target,
            name="r",
            group=group,
            settings=settings,
            max_wait=0.1,
            batch_size=50,
            metadata_max_age=1.0,
        )
        thread = threading.Thread(target=made.run, kwargs={"progress": progress}, daemon=True)
        thread.start()
        return made, thread

    def progress(done: Statistics) -> None:
        shown.extend(done.growing.values())

    produce(settings, source, numbered(0))
    first = member()
    assert reached.wait(60)
    produce(settings, source, numbered(COUNT))
    topics.add_partitions(source, 4)
    # The last offset of each partition is no record.
    transactional = Producer(settings.client(transactional_id=uuid.uuid4().hex, partitioner="murmur2_random"))
    transactional.init_transactions(20)
    transactional.begin_transaction()
    for key, value in numbered(2 * COUNT):
        transactional.produce(source, value, key)
    transactional.commit_transaction(20)
    second = member()
    go.set()
    while topics.group_offsets(group, [source]) != (ends := topics.ends([source])):
        assert first[1].is_alive() and second[1].is_alive()
    for made, thread in (first, second):
        made.stop()
        thread.join(60)
        assert not made.statistics.growing
    assert len(ends) == 4 and all(ends.values())
    assert in_order(settings, target)
    assert TopicGrowth(2, 4) in shown
    assert any(growth.unread is not None for growth in shown)


def test_a_growth_that_nobody_saw_is_refused_unless_everything_was_read(
    settings: KafkaSettings, topic: Make, topics: Topics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.republish.growth_watch._UNSURE_SECONDS", 2.0)
    source, target, group = topic(2, "in"), topic(1, "out"), uuid.uuid4().hex
    arguments: dict[str, Any] = {"source": InputTopics.of(source, "raw"), "target": target, "group": group}
    produce(settings, source, numbered(0))
    assert run(settings, **arguments).consumed == COUNT
    topics.add_partitions(source, 3)
    assert run(settings, **arguments).consumed == 0
    produce(settings, source, numbered(COUNT))
    assert run(settings, **arguments).consumed == COUNT
    produce(settings, source, numbered(2 * COUNT))
    topics.add_partitions(source, 6)
    with pytest.raises(Unsafe, match=rf"{source} grew from 3 to 6 partitions before .*--accept grown-undrained"):
        run(settings, **arguments)
    assert sum(topics.group_offsets(group, [source]).values()) == 2 * COUNT
    assert run(settings, accept=["grown-undrained"], **arguments).consumed == COUNT
    assert run(settings, **arguments).consumed == 0
