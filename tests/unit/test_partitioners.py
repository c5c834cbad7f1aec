"""Whether topics are partitioned alike, judged by samples of their keys."""

import zlib
from typing import Any

import pytest

from aggregations import Fields, Flow, Json, Topic, count
from aggregations.engine import partitioners
from aggregations.engine.partitioners import SAMPLED, Places, are_apart, differing
from envelope.filters import SequenceFilter, from_value
from persistence.kafka import BrokerUnavailable, KafkaSettings
from persistence.murmur2 import murmur2

KEYS = [b"key %d" % n for n in range(SAMPLED)]
OTHERS = [b"other %d" % n for n in range(SAMPLED)]


def java(keys: list[bytes], partitions: int = 3) -> Places:
    return [(key, (murmur2(key) & 0x7FFFFFFF) % partitions) for key in keys]


def librdkafka(keys: list[bytes], partitions: int = 3) -> Places:
    return [(key, zlib.crc32(key) % partitions) for key in keys]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (java(KEYS), java(OTHERS)),
        (librdkafka(KEYS), librdkafka(OTHERS)),
        (java(KEYS), []),
        # One key may fit both, and a partitioner of the producer's own may fit neither: that proves nothing.
        (java(KEYS), [(OTHERS[0], java(OTHERS)[0][1])]),
        (java(KEYS), [(key, 0) for key in OTHERS]),
        (java(KEYS), java(OTHERS, 2)),
        # A partitioner of the producers' own may fit a few keys of each by chance, however often they occur.
        ([*java(KEYS[:12])] * 5, [*librdkafka(OTHERS[:12])] * 5),
    ],
)
def test_topics_that_may_be_partitioned_alike_are_not_told_apart(one: Places, other: Places) -> None:
    assert differing({"a": one, "b": other}, 3) == ""


def test_different_partitioners_are_named() -> None:
    assert differing({"a": java(KEYS), "b": java(KEYS[:9]), "c": librdkafka(OTHERS)}, 3) == (
        "the partitions of a are chosen by murmur2, as Java's producers do, those of c by CRC32, as librdkafka's "
        "producers do by default"
    )


def test_a_key_in_different_partitions_of_two_topics_is_a_proof_whatever_the_partitioners() -> None:
    placed = java(KEYS)
    moved = [(key, (at + 1) % 3) for key, at in placed]
    assert differing({"a": placed, "b": [*java(OTHERS), moved[3]]}, 3) == (
        f"a key of partition {placed[3][1]} of a is in partition {moved[3][1]} of b"
    )


class Numbers:
    """Topics of these numbers of partitions."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers

    def partitions(self, names: Any) -> dict[str, int]:
        if not self.numbers:
            raise BrokerUnavailable("away", "Wait")
        return dict(zip(names, self.numbers, strict=True))


TWO = Flow("two").source(*(Topic(name, Json({"k": str, "n": int}), envelope=False) for name in ("a", "b")))
COUNTED = TWO.aggregate("k", "k", Fields(n=count()))


@pytest.mark.parametrize(
    ("flow", "numbers", "apart"),
    [
        (COUNTED, (3, 3), True),
        (COUNTED, (3, 2), False),
        (COUNTED, (1, 1), False),
        (COUNTED, (), False),
        (TWO.aggregate("k", "k", Fields(n=count()), co_partitioned=False), (3, 3), False),
        (TWO.flat_map(lambda element: [element.value]).aggregate("k", "k", Fields(n=count())), (3, 3), False),
        (TWO.deduplicate(SequenceFilter(from_value("n"))).aggregate("k", "k", Fields(n=count())), (3, 3), False),
        (TWO.publish("out"), (3, 3), False),
    ],
    ids=["equal", "different", "one", "no broker", "not co-partitioned", "items", "filter first", "no stage"],
)
def test_keys_are_read_only_where_tasks_would_share_the_partitions_of_one_number(
    monkeypatch: pytest.MonkeyPatch, flow: Flow[Any], numbers: tuple[int, ...], apart: bool
) -> None:
    read: list[Any] = []

    def sample(*given: Any) -> dict[str, Places]:
        read.append(given)
        return {"a": java(KEYS), "b": librdkafka(KEYS)}

    monkeypatch.setattr(partitioners, "_sample", sample)
    assert are_apart(flow, KafkaSettings("nowhere:1"), Numbers(*numbers)) is apart  # type: ignore[arg-type]
    assert bool(read) is apart
