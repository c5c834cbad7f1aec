"""How surviving mutants are named and distinguished."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.__main__ import KNOWN, _wordless, difference, known
from tests.mutants.quick import KILLED, OUT_OF_TIME

ROOT = Path(__file__).parents[2]


def test_a_change_is_named_by_what_was_and_what_is_with_a_little_around_it():
    old, new = (
        "first = 1\nif position < floor:\n    return 'dropped'",
        "first = 1\nif position <= floor:\n    return 'dropped'",
    )
    assert difference(old, new) == (
        "first = 1 if position < floor: return 'dropped' => first = 1 if position <= floor: return 'dropped'"
    )
    assert difference("f(a, a)", "f(a)") == "f(a, a) => f(a)"
    assert difference("x" * 99 + "1" + "y" * 99, "x" * 99 + "2" + "y" * 99) == "x" * 24 + "1" + "y" * 24 + " => " + (
        "x" * 24 + "2" + "y" * 24
    )


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ("raise E('A FULL DISK')", True),
        ("raise E('XXa full diskXX')", True),
        ("raise E(None)", False),
        ("raise F('a full disk')", False),
        ("raise E('full')", False),
    ],
)
def test_only_the_words_of_a_sentence_may_differ_without_a_reason(other, same):
    assert (_wordless(ast.parse("raise E('a full disk')")) == _wordless(ast.parse(other))) is same


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("SELECT 1", "select 1", True),
        ("SELECT 1", "XXSELECT 1XX", False),
        ("SELECT 1", "SELECT 2", False),
        ("BEGIN", "begin", True),
        ("BEGIN", "XXBEGINXX", False),
        ("wal", "WAL", False),
    ],
)
def test_sql_may_differ_in_its_capitals_only(one, other, same):
    assert (_wordless(ast.parse(repr(one))) == _wordless(ast.parse(repr(other)))) is same


@pytest.mark.parametrize("other", ["E(what, None)", "E(what)", "E('a remedy')", "E(None, 'a remedy')"])
def test_a_sentence_that_is_left_out_is_no_matter_of_words(other):
    assert _wordless(ast.parse("E(what, 'a remedy')")) != _wordless(ast.parse(other))


def test_every_change_on_the_list_has_a_reason_above_it():
    reason = ""
    for line in KNOWN.read_text().splitlines():
        reason = line if line.startswith("#") else reason if line else ""
        assert reason or not line
    assert all(" => " in change for change in known())


def test_a_mutant_is_tried_with_the_tests_that_reach_it_until_one_fails_in_a_process_that_ends(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "from mutmut.mutation import trampoline\n"
        "def test_quick():\n    assert trampoline.get_mutant_under_test() not in ('m.x_f__mutmut_1', 'fail')\n"
        "def test_endless():\n    while trampoline.get_mutant_under_test() == 'm.x_f__mutmut_2':\n        pass\n"
        "def test_of_another():\n    assert trampoline.get_mutant_under_test() != 'm.x_f__mutmut_3'\n"
    )
    (tmp_path / "test_discard.py").write_text(
        "from mutmut.mutation import trampoline\n"
        "assert trampoline.get_mutant_under_test().startswith('m.')\n"
        "def test_late():\n    assert trampoline.get_mutant_under_test() != 'm.x_g__mutmut_1'\n"
    )
    reaching = {
        "m.x_f": ["test_it.py::test_quick", "test_it.py::test_endless"],
        "m.x_g": ["test_it.py::test_quick", "test_discard.py::test_late"],
    }
    # The limit is some seconds longer than a test usually takes: less here.
    usual = {"test_it.py::test_quick": 0.0, "test_it.py::test_endless": -0.45, "test_it.py::test_of_another": 0.0}
    usual["test_discard.py::test_late"] = 0.0
    stats = {"duration_by_test": usual, "tests_by_mangled_function_name": reaching}
    (tmp_path / "mutmut-stats.json").write_text(json.dumps(stats))
    known = {"m.x_f__mutmut_4": 34}
    meta = tmp_path / "m.py.meta"
    meta.write_text(
        json.dumps(
            {
                "exit_code_by_key": known
                | {f"m.x_f__mutmut_{n}": None for n in (1, 2, 3)}
                | {f"m.x_g__mutmut_{n}": None for n in (1, 2)}
            }
        )
    )
    options = ("-q", "--rootdir=.", "-pno:cacheprovider", "-ptests.mutants.quick")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-m", "pytest", *options], cwd=tmp_path, env=environment, timeout=60, check=True)
    results = json.loads(meta.read_text())["exit_code_by_key"]
    assert results == known | {
        "m.x_f__mutmut_1": KILLED,
        "m.x_f__mutmut_2": OUT_OF_TIME,
        "m.x_f__mutmut_3": 0,
        "m.x_g__mutmut_1": KILLED,
        "m.x_g__mutmut_2": 0,
    }
