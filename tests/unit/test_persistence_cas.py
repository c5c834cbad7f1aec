import pytest

from persistence.cas import check_distinct, check_epoch, check_manifest, resolve
from persistence.errors import Conflict, Fenced, StoreWentBack, Terminal
from persistence.manifest import Manifest
from persistence.names import FlowRef
from persistence.protocol import Stored, Write

STAGE = FlowRef("fleet").stage("aircraft")


def test_a_state_of_a_higher_epoch_fences_before_anything_else():
    stored = {b"theirs": Stored(1, 9, 0, b"x")}
    writes = [Write(b"conflicting", 4, b""), Write(b"theirs", 1, b"y")]
    with pytest.raises(Fenced, match=r"stage aircraft.*key b'theirs'.*epoch 9.*epoch 2"):
        resolve(STAGE, writes, stored, epoch=2, batch=0)


def test_what_is_applied_already_is_left_out():
    stored = {b"done": Stored(2, 2, 5, b"new"), b"todo": Stored(1, 1, 9, b"old")}
    done, todo, fresh = Write(b"done", 1, b"new"), Write(b"todo", 1, b"new"), Write(b"fresh", 0, b"new")
    assert resolve(STAGE, [done, todo, fresh], stored, epoch=2, batch=5) == [todo, fresh]


def test_a_conflict_names_the_changed_keys_in_the_order_of_the_call():
    stored = {b"b": Stored(3, 1, 0, b""), b"a": Stored(1, 1, 0, b"")}
    with pytest.raises(Conflict) as caught:
        resolve(STAGE, [Write(b"b", 1, b""), Write(b"c", 2, b""), Write(b"a", 1, b"")], stored, epoch=1, batch=1)
    assert caught.value.keys == (b"b", b"c")


def test_a_key_that_comes_twice_is_refused_by_name_of_the_stage():
    check_distinct(STAGE, [])
    check_distinct(STAGE, [Write(b"a", 0, b""), Write(b"b", 0, b"")])
    with pytest.raises(ValueError, match="stage aircraft: a key occurs twice in one save"):
        check_distinct(STAGE, [Write(b"a", 0, b""), Write(b"b", 0, b""), Write(b"a", 1, b"")])


def test_only_the_installed_epoch_may_write():
    check_epoch(STAGE, 3, 3)
    check_epoch(STAGE, 1, 1)
    with pytest.raises(Fenced, match=r"stage aircraft: this run has epoch 2; the store has epoch 3"):
        check_epoch(STAGE, 2, 3)
    with pytest.raises(
        Terminal, match=r"stage aircraft: the store has epoch 1; this run has epoch 2\. The store was emptied"
    ):
        check_epoch(STAGE, 2, 1)
    with pytest.raises(ValueError, match=r"stage aircraft: epoch 0 is invalid: epochs count from 1"):
        check_epoch(STAGE, 0, 3)


def test_a_manifest_of_an_older_batch_never_replaces_a_newer_one():
    flow, newest = STAGE.flow_ref, Manifest(epoch=3, batch=7)
    for before in (None, newest, Manifest(epoch=3, batch=6), Manifest(epoch=2, batch=9)):
        check_manifest(flow, Manifest(epoch=3, batch=7), before, 3)
    text = r"flow fleet.*the manifest of epoch 3, batch 6 comes after the one of epoch 3, batch 7"
    with pytest.raises(Fenced, match=text):
        check_manifest(flow, Manifest(epoch=3, batch=6), newest, 3)
    with pytest.raises(Fenced, match=r"flow fleet.*: this run has epoch 2; the store has epoch 3"):
        check_manifest(flow, Manifest(epoch=2, batch=9), newest, 3)


@pytest.mark.parametrize(
    ("state", "applied"),
    [
        (Stored(5, 2, 9, b"mine"), True),
        (Stored(5, 2, 9, b"theirs"), False),
        (Stored(5, 2, 8, b"mine"), False),
        (Stored(5, 1, 9, b"mine"), False),
        (Stored(6, 2, 9, b"mine"), False),
        (Stored(3, 2, 9, b"mine"), False),
        (None, False),
    ],
)
def test_a_write_is_a_retry_only_if_version_epoch_batch_and_value_are_what_it_leaves(state, applied):
    def write():
        return resolve(STAGE, [Write(b"k", 4, b"mine")], {b"k": state} if state else {}, epoch=2, batch=9)

    if applied:
        assert write() == []
    else:
        with pytest.raises(Conflict, match=r"stage aircraft.*b'k'"):
            write()


def test_a_state_of_the_same_or_an_older_epoch_is_replaced():
    write = Write(b"k", 4, b"new")
    for epoch in (1, 2):
        assert resolve(STAGE, [write], {b"k": Stored(4, epoch, 9, b"old")}, epoch=2, batch=1) == [write]


def test_a_store_that_lost_its_first_manifest_went_back():
    flow = FlowRef("fleet")
    with pytest.raises(StoreWentBack, match="fleet"):
        check_manifest(flow, Manifest(1, 1), None, 1, (1, 0))
    check_manifest(flow, Manifest(1, 1), Manifest(1, 0), 1, (1, 0))
