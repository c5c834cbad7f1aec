import pickle

import pytest

from envelope.redrive import Redrive, read_via
from persistence.errors import Conflict, Corrupt, Fenced, Terminal, Transient
from persistence.names import MAX_GENERATION, FlowRef, StageRef, check_generation

STAGE = StageRef("fleet", 2, "aircraft")

ERRORS = [
    Transient("timed out", ref=STAGE),
    Terminal("the disk is full", "Make room", ref=FlowRef("fleet")),
    Corrupt("wrong checksum", ref=STAGE, key=b"N14228"),
    Fenced.by(STAGE, 3, 4),
    Conflict((b"N14228", b"\xff\x00"), STAGE),
    Conflict(keys=(), ref=None),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_crosses_a_process_border_unchanged(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_the_text_names_flow_stage_key_and_remedy():
    text = str(Corrupt("the checksum is wrong.", "Restore it", ref=STAGE, key=b"N1"))
    assert text == "flow fleet, generation 2, stage aircraft, key b'N1': the checksum is wrong. Restore it"


def test_a_long_key_is_shown_up_to_64_bytes():
    text = str(Corrupt("bad", ref=STAGE, key=b"k" * 1000))
    assert "k" * 64 in text
    assert "k" * 65 not in text
    assert "1000 bytes" in text


def test_a_conflict_says_how_many_states_and_which_first():
    text = str(Conflict((b"N1", b"N2"), STAGE))
    assert "2 states have changed" in text
    assert "b'N1'" in text


def test_a_run_that_a_swap_has_ended_is_told_to_start_again():
    assert str(Fenced.by(STAGE, 3, 4)).endswith("stop this one. After a command, start it again")


def test_every_class_has_a_remedy_where_it_needs_none_from_the_caller():
    for cls in (Transient, Corrupt, Fenced):
        assert cls("x").remedy
    assert Conflict((b"k",)).remedy


@pytest.mark.parametrize("name", ["", "a b", "a:b", "a/b", "ä", "x" * 101, "a\n", "{a}"])
def test_a_name_that_could_break_a_stored_key_is_refused(name):
    with pytest.raises(ValueError):
        FlowRef(name)
    with pytest.raises(ValueError):
        StageRef("fleet", 1, name)


def test_generations_count_from_one():
    for number in (0, -1):
        with pytest.raises(ValueError, match="count from 1"):
            check_generation("fleet", number)
    with pytest.raises(ValueError, match="count from 1"):
        FlowRef("fleet", -1)
    with pytest.raises(ValueError, match="from 1 to 999999999"):
        FlowRef("fleet", 1_000_000_000)  # a redriven record could not name it
    assert read_via(Redrive(application="fleet", generation=MAX_GENERATION).via) is not None
    assert FlowRef("fleet").stage("aircraft") == StageRef("fleet", 1, "aircraft")
    assert StageRef("fleet", 2, "aircraft").flow_ref == FlowRef("fleet", 2)
