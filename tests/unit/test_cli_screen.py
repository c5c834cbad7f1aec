import io
import json
import logging
import subprocess
import sys
from itertools import count

import pytest

from jobs import screen


def test_json_is_one_line_with_its_own_characters(capsys: pytest.CaptureFixture[str]) -> None:
    screen.emit({"key": "Zürich", "n": 1})
    out = capsys.readouterr().out
    assert out == '{"key": "Zürich", "n": 1}\n'
    assert json.loads(out) == {"key": "Zürich", "n": 1}


def test_without_a_terminal_progress_is_a_plain_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = count(0, 3)
    monkeypatch.setattr(screen.time, "monotonic", lambda: next(seconds))
    with screen.progress("flights", 5000, "records") as bar:
        bar(1000)
        bar(2000)
        bar(5000)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "flights: 2,000 of 5,000 records"
    assert lines[-1].startswith("flights: 5,000 of 5,000 records, ")


def test_a_total_that_is_learned_later_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with screen.progress("flow", unit="records") as bar:
        bar(7, 70)
    assert capsys.readouterr().err.startswith("flow: 7 of 70 records, ")


def test_steps_are_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with screen.steps("stack") as step:
        step("kafka: starting")
    assert capsys.readouterr().err.splitlines()[0] == "stack: kafka: starting"


def test_on_a_terminal_progress_is_drawn_and_lines_stand_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with screen.progress("flights", 5000, "records") as bar:
        bar(2500)
        screen.say("a line [of] text")
        screen.LogLines().handle(logging.makeLogRecord({"msg": "attempt %d", "args": (2,)}))
    drawn = terminal.getvalue()
    assert "attempt 2" in drawn
    assert "2,500 of 5,000 records" in drawn
    assert "a line [of] text" in drawn


def test_nothing_is_drawn_when_the_terminal_is_gone_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    screen.say("plain")
    assert capsys.readouterr().err == "plain\n"


def test_a_table_has_no_trailing_spaces_and_is_not_cut_without_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    screen.table([("x" * 300, 1234567, None, 2.5)], ["text", "whole", "none", "float"], left=["text"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["x" * 300, "1,234,567", "2.50"]
    assert not any(line.endswith(" ") for line in lines)


def test_a_row_of_a_table_stays_one_line_whatever_its_texts_are(capsys: pytest.CaptureFixture[str]) -> None:
    screen.table([("a\tb\nc\x1b[2J", "Łódź 🎉")], ["key", "text"], left=["key", "text"])
    [row] = capsys.readouterr().out.splitlines()[2:]
    assert row.split() == ["a\\tb\\nc\\x1b[2J", "Łódź", "🎉"]


def test_errors_of_a_client_library_are_shown_when_they_last_and_then_once_a_minute() -> None:
    def record(second: float, level: int = logging.ERROR, name: str = "client") -> logging.LogRecord:
        made = logging.LogRecord(name, level, "", 0, "FAIL", None, None)
        made.created = second
        return made

    lasting = screen.Lasting("client")
    shown = [second for second in range(0, 140, 5) if lasting.filter(record(second))]
    assert shown == [15, 75, 135]
    assert not lasting.filter(record(1000)), "a new error, which may be over soon"
    assert not lasting.filter(record(1015.5, logging.WARNING))
    assert lasting.filter(record(1001, logging.CRITICAL))
    assert lasting.filter(record(1001, logging.INFO, "another"))


@pytest.mark.parametrize(("count", "text"), [(0, "0 batches"), (1, "1 batch"), (2000, "2,000 batches")])
def test_a_noun_follows_its_number(count: int, text: str) -> None:
    assert screen.counted(count, "batch", "batches") == text


def test_lists_and_objects_in_a_table_are_json() -> None:
    assert screen.number({"pieces": ["ä", 1]}) == '{"pieces": ["ä", 1]}'


def test_a_long_list_in_a_table_is_cut_and_says_how_long_it_is() -> None:
    assert screen.number(["x" * 296]) == f'["{"x" * 296}"]'
    assert screen.number(["x" * 996]) == f'["{"x" * 298}... (1,000 characters)'


def test_what_client_libraries_log_of_their_own_retries_is_not_shown() -> None:
    code = (
        "import logging; from jobs.cli import common; common()\n"
        "for name in ('stamina', 'cassandra.pool', 'headwater.kafka', 'headwater.spark'):\n"
        "    logging.getLogger(name).warning('again')\n"
        "for path in ('/lib/py4j/java_gateway.py', '/lib/other.py'):\n"
        "    logging.getLogger().handle(logging.LogRecord('root', logging.ERROR, path, 1, path, (), None))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr
    assert shown == "WARNING headwater.spark: again\nERROR root: /lib/other.py\n"
