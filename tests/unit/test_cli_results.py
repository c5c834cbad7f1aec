"""What a command's callee returns or raises becomes an exit code and a message."""

import json
import logging
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from aggregations.errors import RunRefusedError
from aggregations.report import Report
from envelope import Hop, Reason
from envelope.deadletter import DeadLetterHeaders
from jobs.cli.errors import Exit
from jobs.dead_letters.discard import Discarded
from jobs.dead_letters.letters import Handled, Selection, StoredDeadLetter
from jobs.environment import DEBUG, NotThereError
from jobs.republish.counts import Statistics
from persistence.kafka import BrokerUnavailable
from tests.support.cli import run
from tests.support.commands import COMMANDS, Calls, Exact, plant, recorded_in


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Calls:
    return recorded_in(tmp_path, monkeypatch)


SEVERAL: Sequence[tuple[str, Any, Exit]] = [
    ("headwater run", Report(), Exit.DONE),
    ("headwater republish", Statistics(), Exit.DONE),
    ("headwater redrive", Handled(dead_letters=2), Exit.DONE),
    ("headwater discard", Discarded(dead_letters=2), Exit.DONE),
    ("headwater demo", Exact(), Exit.DONE),
    ("headwater demo", Exact(exact=False), Exit.FAILED),
    ("headwater stack down", ["kafka"], Exit.DONE),
]


@pytest.mark.parametrize("words", [(), ("--json",)], ids=["people", "json"])
@pytest.mark.parametrize(("path", "result", "code"), SEVERAL, ids=[f"{path} {code.name}" for path, _, code in SEVERAL])
def test_a_result_becomes_an_exit_code(
    path: str, result: Any, code: Exit, words: Sequence[str], calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = COMMANDS[path]
    plant(calls, command, monkeypatch, result)
    monkeypatch.setattr("jobs.demo.report.show", lambda _: None)
    monkeypatch.setattr("jobs.demo.report.as_json", lambda _: {})
    assert run(monkeypatch, *command.words.split(), *words) == code


def test_verdicts_are_listed_in_the_order_of_stages_and_verdicts(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verdicts = {"carrier": Counter(accepted=2), "aircraft": Counter(below_floor=1, accepted=2)}
    plant(calls, COMMANDS["headwater run"], monkeypatch, Report(records=3, batches=1, verdicts=verdicts))
    assert run(monkeypatch, *COMMANDS["headwater run"].words.split()) == Exit.DONE
    out, err = capsys.readouterr()
    assert [line.split() for line in out.splitlines()[2:]] == [
        ["aircraft", "accepted", "2"],
        ["aircraft", "below_floor", "1"],
        ["carrier", "accepted", "2"],
    ]
    assert err.splitlines()[-1] == "3 records in 1 batch"


@pytest.mark.parametrize("words", [(), ("--json",), ("--apply",)], ids=["people", "json", "applied"])
@pytest.mark.parametrize("path", ["headwater redrive", "headwater discard"])
def test_letters_that_cannot_be_used_are_differences(
    path: str,
    words: Sequence[str],
    calls: Calls,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = (Handled if path == "headwater redrive" else Discarded)(dead_letters=3)
    result.unusable["truncated"] = 2
    plant(calls, COMMANDS[path], monkeypatch, result)
    assert run(monkeypatch, *COMMANDS[path].words.split(), *words) == Exit.DIFFERENCES
    out, err = capsys.readouterr()
    if "--json" in words:
        assert json.loads(out)["unusable"] == {"truncated": 2}
    else:
        assert "2 " in err
        assert ": 2 truncated" in err
        assert "{" not in err


@pytest.mark.parametrize("path", ["headwater redrive", "headwater discard"])
def test_a_selection_that_no_dead_letter_matches_is_said(
    path: str, calls: Calls, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = (Handled if path == "headwater redrive" else Discarded)(dead_letters=3, left=3)
    plant(calls, COMMANDS[path], monkeypatch, result)
    assert run(monkeypatch, *COMMANDS[path].words.split(), "--reason", "empty") == Exit.DONE
    assert "matches the options: 3 dead letters read" in capsys.readouterr().err


def test_a_stage_of_which_no_dead_letter_is_is_refused_also_if_none_has_a_stage() -> None:
    facts = DeadLetterHeaders("orders", 0, 7, Reason.BAD_PAYLOAD, application="split")
    letters: Any = [StoredDeadLetter(Hop("dead", 0, 0), None, b"", [], facts)]
    with pytest.raises(NotThereError, match="--stage pilot: no dead letter is of it; remove the option"):
        Selection(stages=frozenset({"pilot"})).check(letters)
    with pytest.raises(NotThereError, match="--topic pilot: no dead letter is of it; choose from orders"):
        Selection(topics=frozenset({"pilot"})).check(letters)
    Selection(stages=frozenset({"pilot"})).check(cast("Any", []))


@pytest.mark.parametrize(
    ("error", "code"), [(RunRefusedError("no"), Exit.REFUSED), (BrokerUnavailable("no", "Try"), Exit.FAILED)]
)
@pytest.mark.parametrize("path", ["headwater run", "headwater republish", "headwater redrive", "headwater discard"])
def test_what_a_callee_raises_becomes_an_exit_code(
    path: str, error: Exception, code: Exit, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(COMMANDS[path].callee, raises)
    assert run(monkeypatch, *COMMANDS[path].words.split()) == code


@pytest.mark.parametrize("path", ["headwater run", "headwater republish"])
def test_an_unexpected_value_error_is_not_wrong_usage_and_is_not_quoted(
    path: str, calls: Calls, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raises(*_: Any, **__: Any) -> None:
        raise ValueError("the customer's number is 4711")

    monkeypatch.setattr(COMMANDS[path].callee, raises)
    assert run(monkeypatch, *COMMANDS[path].words.split()) == Exit.FAILED
    assert "4711" not in capsys.readouterr().err


def test_debug_is_for_the_whole_process(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEBUG, "")
    levels: list[Any] = []
    monkeypatch.setattr(logging, "basicConfig", lambda **given: levels.append(given["level"]))
    assert run(monkeypatch, "faults") == Exit.DONE
    assert run(monkeypatch, "--debug", "faults") == Exit.DONE
    assert levels == [logging.WARNING, logging.INFO]
    assert os.environ[DEBUG] == "1"


def test_a_mend_that_is_no_function_is_refused_before_anything_is_read(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = COMMANDS["headwater redrive"]
    plant(calls, command, monkeypatch, Handled())
    assert run(monkeypatch, *command.words.split(), "--mend", "jobs.demo.flow:flow") == Exit.USAGE
    assert "jobs.demo.flow:flow is not a function but a Flow" in capsys.readouterr().err
    assert calls.given == []
