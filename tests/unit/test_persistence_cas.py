import pytest

from persistence.cas import settle
from persistence.errors import Conflict, Fenced
from persistence.names import FlowRef
from persistence.protocol import Stored, Write

STAGE = FlowRef("fleet").stage("aircraft")


def test_a_state_of_a_higher_term_fences_before_anything_else():
    stored = {b"theirs": Stored(1, 9, 0, b"x")}
    writes = [Write(b"conflicting", 4, b""), Write(b"theirs", 1, b"y")]
    with pytest.raises(Fenced, match=r"key b'theirs'.*term 9.*term 2"):
        settle(STAGE, writes, stored, term=2, batch=0)


def test_what_is_applied_already_is_left_out():
    stored = {b"done": Stored(2, 2, 5, b"new"), b"todo": Stored(1, 1, 9, b"old")}
    done, todo, fresh = Write(b"done", 1, b"new"), Write(b"todo", 1, b"new"), Write(b"fresh", 0, b"new")
    assert settle(STAGE, [done, todo, fresh], stored, term=2, batch=5) == [todo, fresh]


def test_a_conflict_names_the_changed_keys_in_the_order_of_the_call():
    stored = {b"b": Stored(3, 1, 0, b""), b"a": Stored(1, 1, 0, b"")}
    with pytest.raises(Conflict) as caught:
        settle(STAGE, [Write(b"b", 1, b""), Write(b"c", 2, b""), Write(b"a", 1, b"")], stored, term=1, batch=1)
    assert caught.value.keys == (b"b", b"c")
