"""Hops of one partition, written without the codec."""

from typing import Any

import pytest

from envelope import EnvelopeError, Hop, Reason, hops
from envelope.codec import encode_hop
from envelope.hops import HopWriter
from envelope.limits import Limits

T = 1_700_000_000_000 >> 14 << 14  # a timestamp whose low 14 bits are zero


@pytest.fixture
def coded(monkeypatch):
    """The hops that were written by the codec."""
    seen: list[Hop] = []

    def counting(hop: Hop, limits: Limits) -> bytes:
        seen.append(hop)
        return encode_hop(hop, limits)

    monkeypatch.setattr(hops, "encode_hop", counting)
    return seen


def test_only_the_first_of_16384_offsets_and_milliseconds_needs_the_codec(coded):
    writer = HopWriter("t", 3, "r", topic_id="id", cluster="west")
    coded.clear()
    steps = [
        *((127, T, True), (127, T, True)),  # offsets of one byte always need it
        *((128, T, True), (128, T, False), (129, T + 1, False), (16383, T + 16383, False)),
        *((16384, T, True), (32767, T + 16383, False), (16384, T, False), (32768, T, True), (32769, T, False)),
        *((32769, T + 16384, True), (32770, T + 16385, False), (128, T + 16384, True), (129, T + 16384, False)),
        *((200, 16383, True), (200, 16383, True), (200, 16384, True), (201, 16385, False), (202, 32767, False)),
        *((203, None, True), (203, None, True), (204, 16384, False)),
    ]
    for offset, timestamp_ms, by_codec in steps:
        before = len(coded)
        got = writer.write(offset, timestamp_ms)
        assert (len(coded) > before) == by_codec, (offset, timestamp_ms)
        expected = Hop("t", 3, offset, "r", 0, 1, topic_id="id", timestamp_ms=timestamp_ms, cluster="west")
        assert got == encode_hop(expected)


def test_each_kind_of_output_and_each_leader_epoch_has_its_own_first_hop(coded):
    writer = HopWriter("t", 3, "r")
    coded.clear()
    kinds: list[dict[str, Any]] = [
        {},
        {"index": 1},
        {"count": 2},
        {"index": 1, "count": 2},
        {"rekeyed": True},
        {"keyless": True},
        {"keyless": True, "rekeyed": True},
        {"pass_through": True},
        {"rekeyed": True, "pass_through": True},
    ]
    for offset in range(1000, 1010):
        for kind in kinds:
            expected = Hop("t", 3, offset, "r", **{"index": 0, "count": 1, **kind}, timestamp_ms=T, leader_epoch=0)
            assert writer.write(offset, T, 0, **kind) == encode_hop(expected)
    assert len(coded) == len(kinds)
    writer.write(1010, T, 1)
    writer.write(1011, T, 1)
    writer.write(1012, T, 0)
    assert len(coded) == len(kinds) + 2


def test_kinds_of_output_do_not_fill_the_memory(coded):
    writer = HopWriter("t", 3, "r")
    coded.clear()
    for index in range(1, 3000):
        writer.write(1000, T, index=index)
    assert len(coded) == 2999
    assert len(writer._templates) == 2999 - 2 * hops._MOST_TEMPLATES
    writer.write(1001, T, index=2999)
    assert len(coded) == 2999


def test_the_limit_of_a_topic_holds_for_the_first_hop_and_for_all_others():
    long, limits = "t" * 260, Limits(topic_chars=260)
    writer = HopWriter(long, 3, "r", limits=limits)
    assert writer.write(5) == encode_hop(Hop(long, 3, 5, "r", 0, 1), limits)
    for topic, partition, reason in [(long, 3, Reason.BAD_TOPIC), ("t", -1, Reason.BAD_COORDINATES)]:
        with pytest.raises(EnvelopeError) as caught:
            HopWriter(topic, partition, "r")
        assert caught.value.reason is reason


def test_a_name_that_looks_like_the_coordinates_is_not_taken_for_them():
    writer = HopWriter("t", 3, "\n\x01t\x10\x03\x18", topic_id="\n\x01t\x10\x03\x18")
    for offset in range(1000, 1003):
        hop = Hop("t", 3, offset, "\n\x01t\x10\x03\x18", 0, 1, topic_id="\n\x01t\x10\x03\x18", timestamp_ms=T)
        assert writer.write(offset, T) == encode_hop(hop)


def test_nothing_is_known_before_the_first_hop():
    assert HopWriter("t", 3, "r").write(1 << 14, 1 << 14) == encode_hop(
        Hop("t", 3, 1 << 14, "r", 0, 1, timestamp_ms=1 << 14)
    )


@pytest.mark.parametrize(
    "bad", [{"offset": -1}, {"offset": 2**63 - 1}, {"index": -1}, {"index": 2**32}, {"count": -1}, {"count": 2**32}]
)
def test_impossible_numbers_are_refused(bad):
    with pytest.raises(EnvelopeError) as caught:
        HopWriter("t", 3, "r").write(**{"offset": 1000, "timestamp_ms": T, **bad})
    assert caught.value.reason is Reason.BAD_COORDINATES
