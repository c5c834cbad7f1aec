from itertools import pairwise
from zlib import crc32

from hypothesis import given
from hypothesis import strategies as st

from persistence.cassandra.buckets import bounded, bucket_of, keys_by_bucket, writes_by_bucket
from persistence.protocol import Write


def test_the_bucket_of_a_key_never_changes():
    # Stored states depend on it; the check value of CRC-32 is in every table of CRCs.
    assert crc32(b"123456789") == 0xCBF43926
    assert [bucket_of(key, 32) for key in (b"", b"N14228", b"123456789", b"\x00\xff")] == [0, 14, 6, 18]


@given(st.lists(st.binary(max_size=8)), st.integers(1, 100))
def test_every_key_is_in_its_bucket_once(keys, buckets):
    divided = keys_by_bucket(keys, buckets)
    assert sorted(key for some in divided.values() for key in some) == sorted(set(keys))
    assert all(bucket_of(key, buckets) == bucket for bucket, some in divided.items() for key in some)


@given(
    st.lists(st.builds(Write, st.binary(max_size=4), st.just(0), st.binary(max_size=300)), unique_by=lambda w: w.key),
    st.integers(100, 1000),
)
def test_batches_keep_every_write_in_order_and_are_bounded(writes, limit):
    batches = list(bounded(writes, limit))
    assert [write for batch in batches for write in batch] == writes
    for batch in batches:
        assert batch
        assert len(batch) == 1 or sum(len(write.key) + len(write.value) + 64 for write in batch) <= limit
    for batch, following in pairwise(batches):
        needed = sum(len(write.key) + len(write.value) + 64 for write in [*batch, following[0]])
        assert needed > limit


@given(st.lists(st.builds(Write, st.binary(max_size=4), st.just(0), st.just(b""))), st.integers(1, 100))
def test_every_write_is_in_the_bucket_of_its_key_in_the_order_of_the_call(writes, buckets):
    divided = writes_by_bucket(writes, buckets)
    for bucket in range(buckets):
        assert divided.get(bucket, []) == [write for write in writes if bucket_of(write.key, buckets) == bucket]


def test_a_write_above_the_limit_goes_alone():
    exact = Write(b"k", 0, bytes(1000 - 64 - 1))
    assert list(bounded([exact, exact], 1000)) == [[exact], [exact]]
    assert list(bounded([exact, exact], 2000)) == [[exact, exact]]
    assert list(bounded([exact, exact, exact, exact], 2000)) == [[exact, exact], [exact, exact]]
    small, large = Write(b"a", 0, b"x"), Write(b"b", 0, bytes(5000))
    assert list(bounded([small, large, small], 1000)) == [[small], [large], [small]]
