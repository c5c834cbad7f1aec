"""State records in LMDB without the texts that they have in common."""

import random
import time

import lmdb
import pytest

from envelope import Histories, History
from persistence.errors import Conflict, Corrupt
from persistence.lmdb import shard
from persistence.lmdb.layout import HEAD, SHORT, SHORTENED, encode
from persistence.lmdb.texts import LIMIT, Texts, decode_texts
from persistence.murmur2 import parts_of
from persistence.protocol import FlowRef, Stored, Write
from persistence.record import StateRecord, encode_record
from persistence.registry import open_store

FLOW = FlowRef("fleet")
STAGE = FLOW.stage("aircraft")
MANY = 8 * shard.MANY


@pytest.fixture
def path(tmp_path):
    return tmp_path / "states"


@pytest.fixture
def store(path):
    store = open_store(f"lmdb://{path}")
    yield store
    store.close()


def record(number, *, topic="flights.legs", definition="9f2c01bc"):
    """A state record as the engine writes it."""
    rng = random.Random(number)
    lane = f"flights.raw:{number % 4}#Qx1k3bcd>wrap>{topic}"
    held = tuple((one, 0) for one in sorted(rng.sample(range(10**6), 1 + number % 5)))
    state = {"legs": rng.randrange(9), "name": "Zürich", "minutes": rng.randrange(500)}
    return encode_record(StateRecord(definition, state, Histories({lane: History(held, None, number % 7)}, {})))


def writes(count=MANY, expected=0, **options):
    return [Write(b"N%06d" % number, expected, record(number + expected, **options)) for number in range(count)]


def entries(store, path, number=0):
    """What another program finds in a shard."""
    store.close()  # its next use opens it again
    with lmdb.open(str(path / str(number)), create=False) as opened, opened.begin() as transaction:
        return dict(transaction.cursor())


def records(store, path):
    """The entries of states in all shards."""
    return [
        value for number in range(4) for key, value in entries(store, path, number).items() if key.startswith(b"\0\0\0")
    ]


def change(store, path, number, key, value):
    """What another program does in a shard."""
    store.close()
    with lmdb.open(str(path / str(number)), create=False) as opened, opened.begin(write=True) as transaction:
        transaction.put(key, value)


def texts_in(store, path):
    """The texts of the stage in the first shard."""
    return decode_texts(entries(store, path)[b"texts/fleet/1/aircraft"], STAGE)


def check(store, wanted, *, epoch=1, batch=1):
    """Every state is what was written, by each way to read it."""
    expected = {one.key: Stored(one.expected + 1, epoch, batch, one.value) for one in wanted}
    assert dict(store.scan(STAGE)) == expected
    assert store.load(STAGE, [*expected]) == expected
    few = [*expected][::97][:5]
    assert store.load(STAGE, few) == {key: expected[key] for key in few}


def test_records_of_a_large_save_are_a_third_of_their_size_and_read_as_written(store, path):
    sent = writes()
    epoch = store.acquire_epoch(FLOW)
    store.save(STAGE, sent, epoch=epoch, batch=1)
    check(store, sent)
    stored, whole = sum(len(one) - HEAD.size for one in records(store, path)), sum(len(one.value) for one in sent)
    assert stored * 3 < whole
    again = writes(expected=1)
    store.save(STAGE, again, epoch=epoch, batch=2)
    check(store, again, batch=2)


def test_a_repeated_save_changes_nothing_and_a_conflict_names_its_keys(store):
    sent = writes()
    epoch = store.acquire_epoch(FLOW)
    marks = store.save(STAGE, sent, epoch=epoch, batch=1)
    assert store.save(STAGE, sent, epoch=epoch, batch=1) == marks
    with pytest.raises(Conflict) as caught:
        store.save(STAGE, [Write(sent[3].key, 0, b"{}")], epoch=epoch, batch=2)
    assert caught.value.keys == (sent[3].key,)
    check(store, sent)


def test_a_small_save_is_stored_as_it_is_until_a_large_one_has_found_texts(store, path):
    epoch = store.acquire_epoch(FLOW)
    sent = writes(MANY)
    store.save(STAGE, sent[:200], epoch=epoch, batch=1)
    assert sorted(one[HEAD.size :] for one in records(store, path)) == sorted(one.value for one in sent[:200])
    assert not any(key.startswith(b"texts/") for key in entries(store, path))
    store.save(STAGE, sent[200:-1], epoch=epoch, batch=1)
    store.save(STAGE, sent[-1:], epoch=epoch, batch=1)
    check(store, sent)
    (last,) = [one for one in records(store, path) if HEAD.unpack_from(one)[2] == 1 | SHORTENED and len(one) < 90][:1]
    assert b'"crc32c"' not in last


def test_other_records_of_a_stage_find_texts_of_their_own_up_to_the_limit(store, path):
    epoch = store.acquire_epoch(FLOW)
    sent = []
    for batch in range(12):
        sent = writes(expected=batch, topic="x" * 9 + chr(97 + batch) * 20, definition=f"{batch:08x}")
        store.save(STAGE, sent, epoch=epoch, batch=batch)
    check(store, sent, batch=11)
    found = texts_in(store, path)
    assert 10 < len(found.texts) <= LIMIT


def test_values_that_are_no_json_are_stored_as_they_are(store, path):
    rng = random.Random(3)
    sent = [Write(b"%05d" % number, 0, rng.randbytes(60)) for number in range(MANY)]
    epoch = store.acquire_epoch(FLOW)
    store.save(STAGE, sent, epoch=epoch, batch=1)
    check(store, sent)
    assert sorted(one[HEAD.size :] for one in records(store, path)) == sorted(one.value for one in sent)
    mixed = [Write(one.key, 1, record(i) if i % 2 else one.value) for i, one in enumerate(sent)]
    store.save(STAGE, mixed, epoch=epoch, batch=2)
    check(store, mixed, batch=2)


def test_keys_that_are_cut_have_shortened_records(store, path):
    sent = [Write(b"k" * (SHORT + number % 3) + b"%05d" % number, 0, record(number)) for number in range(MANY)]
    epoch = store.acquire_epoch(FLOW)
    store.save(STAGE, sent, epoch=epoch, batch=1)
    check(store, sent)
    assert all(HEAD.unpack_from(one)[2] & SHORTENED for one in records(store, path))


def test_an_environment_of_schema_1_is_read_and_becomes_schema_2_with_the_first_shortened_record(
    store, path, monkeypatch
):
    epoch = store.acquire_epoch(FLOW)
    with monkeypatch.context() as patch:
        patch.setattr(shard, "MANY", 10**9)
        store.save(STAGE, writes(), epoch=epoch, batch=1)
    for number in range(4):
        change(store, path, number, b"headwater", b'{"schema":1,"stages":1}')
    check(store, writes())
    store.save(STAGE, [Write(b"one", 0, b"{}")], epoch=epoch, batch=1)
    assert {entries(store, path, number)[b"headwater"] for number in range(4)} == {b'{"schema":1,"stages":1}'}
    more = [Write(b"M%06d" % number, 0, record(number)) for number in range(MANY)]
    store.save(STAGE, more, epoch=epoch, batch=1)
    assert {entries(store, path, number)[b"headwater"] for number in range(4)} == {b'{"schema":2,"stages":1}'}
    check(store, [*writes(), *more, Write(b"one", 0, b"{}")])


def test_a_dropped_generation_leaves_no_texts(store, path):
    epoch = store.acquire_epoch(FLOW)
    store.save(STAGE, writes(), epoch=epoch, batch=1)
    assert texts_in(store, path).texts
    store.drop(FLOW)
    assert [key for number in range(4) for key in entries(store, path, number)] == [b"headwater"] * 4


@pytest.mark.parametrize("count", [1, MANY])
def test_a_record_whose_text_is_missing_is_corrupt(store, path, count):
    epoch = store.acquire_epoch(FLOW)
    store.save(STAGE, writes(), epoch=epoch, batch=1)
    key = b"N000007"
    shard = parts_of([key], 4)[0]
    change(store, path, shard, b"texts/fleet/1/aircraft", b'["x"]')
    with pytest.raises(Corrupt, match="a text that is not stored"):
        store.load(STAGE, [b"N%06d" % number for number in range(7, 7 + count)])
    change(store, path, shard, b"texts/fleet/1/aircraft", b"[1]")
    with pytest.raises(Corrupt, match="texts of the stage cannot be read"):
        store.load(STAGE, [key])


@pytest.mark.parametrize("entry", [b'["\xff"]', b'[""]', b'["a\\u0001"]', encode([str(n) for n in range(LIMIT + 1)])])
def test_an_entry_that_was_never_written_as_texts_is_corrupt(entry):
    with pytest.raises(Corrupt, match="texts of the stage cannot be read"):
        decode_texts(entry, STAGE)


def test_texts_of_a_stage_are_not_those_of_another(store, path):
    epoch = store.acquire_epoch(FLOW)
    other = FLOW.stage("carrier")
    store.save(STAGE, writes(), epoch=epoch, batch=1)
    store.save(other, writes(topic="carriers"), epoch=epoch, batch=1)
    check(store, writes())
    assert store.load(other, [b"N000001"])[b"N000001"].value == record(1, topic="carriers")
    assert {b"texts/fleet/1/aircraft", b"texts/fleet/1/carrier"} <= entries(store, path).keys()


def test_the_texts_of_records_that_differ_in_numbers_are_all_that_is_between_them():
    found = Texts().with_those_of([record(number) for number in range(400)])
    assert b'#Qx1k3bcd>wrap>flights.legs":[{"held":[' in found.texts
    assert b'},"lanes":{"flights.raw:' in found.texts
    assert b'],"index":[0],"used":' in found.texts


def test_lists_of_small_numbers_are_compared_in_little_time():
    rng = random.Random(5)
    values = [b"[" + b",".join(b"%d" % rng.randrange(10) for _ in range(300)) + b"]" for _ in range(400)]
    begin = time.process_time()
    Texts().with_those_of(values)
    assert time.process_time() - begin < 1


def test_times_that_a_batch_has_in_common_do_not_use_up_the_texts():
    texts, sizes = Texts(), []
    for begin in range(1764115200, 1764115200 + 60 * 2 * LIMIT, 60):
        values = [b'{"state":{"legs":%d},"window":[%d,%d]}' % (i, begin, begin + 60) for i in range(400)]
        texts = texts.with_those_of(values)
        sizes.append(sum(map(len, texts.shortened(values))))
    assert len(texts.texts) < LIMIT
    assert len({*sizes}) == 1


def test_texts_are_looked_for_ever_more_rarely_once_there_are_some(monkeypatch):
    looked = []
    monkeypatch.setattr("persistence.lmdb.texts._most_saving", looked.append)
    values = [record(number) for number in range(20)]
    for texts, calls in ((Texts([b"none of them"]), 7 + 2), (Texts(), 200)):
        looked.clear()
        for _ in range(200):
            assert texts.with_those_of(values) is texts
        assert len(looked) == calls, "1, 2, 4, ... 64, 128 and 192, but each time without any"
