"""How surviving mutants are named and distinguished."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.__main__ import KNOWN, _wordless, difference, known
from tests.mutants.plugin import OUT_OF_TIME

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


def test_the_fastest_tests_run_first_and_one_that_does_not_end_ends_the_process(tmp_path):
    # The limit is longer than a test usually takes by some seconds, less here.
    (tmp_path / "mutmut-stats.json").write_text(
        json.dumps({"duration_by_test": {"test_it.py::test_endless": -0.45, "test_it.py::test_quick": -0.5}})
    )
    (tmp_path / "test_it.py").write_text(
        "def test_endless():\n    print('endless', flush=True)\n    while True:\n        pass\n"
        "def test_quick():\n    print('quick', flush=True)\n"
    )
    options = ("-s", "-q", "--rootdir=.", "-pno:cacheprovider", "-ptests.mutants.plugin")
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *options], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == OUT_OF_TIME
    assert ended.stdout.split()[:1] == ["quick"]
    assert "endless" in ended.stdout
