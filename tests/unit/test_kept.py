"""Values that are kept in a store with their positions."""

from datetime import timedelta

import pytest

from envelope import Envelope, TopicPartition, encode
from envelope.filters import Arrival, Gaps, ProducerFilter, SequenceFilter, deduplicate
from persistence import Corrupt, Filtered, FlowRef, Reader, StoredFilter, Terminal
from persistence.kept import Kept, KeptValues, decode_kept, encode_kept
from persistence.seal import seal
from tests.support.pure import fresh_store

REF = FlowRef("f").stage("f")


def test_a_value_comes_back_with_its_positions() -> None:
    kept = Kept(
        {"a": [1, "b", None]}, {TopicPartition("t", 0): 5, TopicPartition("t", 12): 7, TopicPartition("u", 1): 1}
    )
    assert decode_kept(encode_kept(kept, "x"), "x", 3, REF, b"k") == Kept(kept.value, kept.positions, 3)


def test_a_value_covers_the_offsets_below_its_position() -> None:
    kept = Kept()
    assert not kept.covers(Arrival("t", 0, 0))
    kept.advance(Arrival("t", 0, 4))
    assert [kept.covers(Arrival("t", 0, offset)) for offset in (0, 4, 5)] == [True, True, False]
    assert not kept.covers(Arrival("t", 1, 0))


def test_a_record_of_a_later_leader_epoch_is_not_covered_wherever_it_stands() -> None:
    kept = Kept()
    kept.advance(Arrival("t", 0, 9, leader_epoch=2))
    assert kept.covers(Arrival("t", 0, 9, leader_epoch=1))
    assert kept.covers(Arrival("t", 0, 9))
    assert not kept.covers(Arrival("t", 0, 4, leader_epoch=3))
    kept.advance(Arrival("t", 0, 9))
    assert not kept.covers(Arrival("t", 0, 4, leader_epoch=3)), "a record without an epoch leaves the one that is known"
    kept.advance(Arrival("t", 0, 4, leader_epoch=3))
    assert [kept.covers(Arrival("t", 0, offset, leader_epoch=3)) for offset in (4, 5)] == [True, False]


def test_records_that_are_written_anew_at_offsets_that_were_read_are_neither_lost_nor_doubled() -> None:
    """b50: a log lost its end, and the next leader uses the offsets again."""
    before = [Arrival("t", 0, n, b"k", n, leader_epoch=1) for n in range(5)]
    anew = [*before[:3], *(Arrival("t", 0, n, b"k", 10 + n, leader_epoch=2) for n in range(3, 6))]
    wanted = [0, 1, 2, 3, 4, 13, 14, 15]

    reader = Reader(fresh_store(), "sums", [])
    for batch in (before, anew, anew):
        reader.process(batch, lambda seen, one: [*seen, one.value])
    assert (reader.value, reader.start) == (wanted, {("t", 0): 6})

    passed: list[int] = []
    rule = SequenceFilter(lambda one: one.value, name="numbers")
    kept = StoredFilter(rule, fresh_store())
    for batch in (before, anew, anew):
        kept.process(batch, lambda made: passed.extend(one.value for one, _ in made.passed))
    assert (passed, kept.start) == (wanted, {("t", 0): 6})


def test_any_changed_byte_is_noticed() -> None:
    value = encode_kept(Kept({"a": 1}, {TopicPartition("t", 0): 5}), "x")
    for place in range(len(value)):
        damaged = value[:place] + bytes([value[place] ^ 1]) + value[place + 1 :]
        with pytest.raises(Corrupt):
            decode_kept(damaged, "x", 1, REF, b"k")


def test_a_newer_schema_and_another_kind_are_refused_with_a_remedy() -> None:
    newer = seal(b'{"schema":2,"kind":"x","positions":{},"value":1}')
    with pytest.raises(Corrupt, match="Upgrade headwater"):
        decode_kept(newer, "x", 1, REF, b"k")
    with pytest.raises(Terminal, match="Use another name"):
        decode_kept(encode_kept(Kept(1), "x"), "y", 1, REF, b"k")


def test_the_manifest_keeps_the_positions_of_partitions_that_a_batch_does_not_name() -> None:
    values = KeptValues(fresh_store(), "f", "x")
    values.save_manifest({TopicPartition("t", 0): 5})
    values.save_manifest({TopicPartition("t", 1): 6})
    assert values.start == {("t", 0): 5, ("t", 1): 6}
    assert (values.manifest.batch, values.batch) == (2, 3)


def test_all_values_can_be_read() -> None:
    values = KeptValues(fresh_store(), "f", "x")
    values.save({b"a": Kept(1), b"b": Kept(2)})
    assert {key: kept.value for key, kept in values.scan()} == {b"a": 1, b"b": 2}


def test_a_batch_may_contain_the_place_where_a_log_was_written_anew() -> None:
    passed: list[int] = []
    kept = StoredFilter(SequenceFilter(lambda one: one.value, name="numbers"), fresh_store())
    batch = [Arrival("t", 0, n, b"k", n, leader_epoch=1) for n in range(4)]
    batch += [Arrival("t", 0, n, b"k", 10 + n, leader_epoch=2) for n in range(2, 5)]
    kept.process(batch, lambda made: passed.extend(one.value for one, _ in made.passed))
    assert passed == [0, 1, 2, 3, 12, 13, 14]
    with pytest.raises(ValueError, match="offset 1 comes after 4"):
        kept.process([batch[-1], batch[1]], lambda _: None)


def test_a_record_that_was_held_back_and_is_lost_ends_nothing() -> None:
    def told(number: int, offset: int, epoch: int) -> Arrival:
        return Arrival(
            "t",
            0,
            offset,
            b"k",
            encode(Envelope(b"", producer="p", sequence=number, sequence_per_partition=True)),
            leader_epoch=epoch,
        )

    store, passed, warned = fresh_store(), list[int](), list[str]()

    def publish(made: Filtered) -> None:
        passed.extend(one.offset for one, _ in made.passed)
        warned.extend(made.warnings)

    rule = ProducerFilter(gaps=Gaps.HOLD)
    StoredFilter(rule, store).process([told(0, 0, 1), told(2, 1, 1)], publish)
    again = StoredFilter(rule, store)
    assert again.start == {("t", 0): 1}
    again.process([told(1, 1, 2)], publish)
    assert passed == [0, 1]
    assert warned == ["t:0: the record at offset 1, which was held back, is lost"]


def test_an_interval_filter_takes_a_record_at_an_offset_that_is_used_again_for_another_one() -> None:
    """deduplicate: the same event at the same offset in another leader epoch was sent again."""
    store, passed = fresh_store(), list[int]()
    rule = deduplicate(id=lambda one: one.value, interval=timedelta(hours=1))
    for epoch in (1, 2):
        batch = [Arrival("t", 0, n, b"k", n, leader_epoch=epoch) for n in range(3)]
        StoredFilter(rule, store).process(batch, lambda made: passed.extend(one.value for one, _ in made.passed))
    assert passed == [0, 1, 2]
