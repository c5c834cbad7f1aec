"""`headwater run --runner local`: the options of a run on Spark, where they apply."""

from pathlib import Path
from typing import Any

import pytest

from aggregations.local import run_local
from jobs.cli.errors import Exit
from tests.support.cli import run
from tests.support.commands import COMMANDS, IGNORED, Calls, plant, recorded_in
from tests.unit.test_cli_forwarding import at, words

ON_SPARK = COMMANDS["headwater run"]
OF_SPARK = {"master", "conf", "checkpoint"}
CALLEE = "aggregations.local.run_local"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Calls:
    found = recorded_in(tmp_path, monkeypatch)
    monkeypatch.setattr(CALLEE, found.of(run_local, ON_SPARK.result))
    plant(found, ON_SPARK, monkeypatch)
    return found


@pytest.mark.parametrize("name", sorted(ON_SPARK.options.keys() - OF_SPARK))
def test_an_option_of_a_run_on_spark_reaches_the_local_runner(
    name: str, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    option = ON_SPARK.options[name]
    given = words(ON_SPARK, option)
    assert run(monkeypatch, *given) == run(monkeypatch, *given, "--runner", "local") == Exit.DONE
    spark, local = calls.given
    assert local.keys() == spark.keys() - {"modules", *OF_SPARK}
    assert {one: local[one] for one in local.keys() - IGNORED} == {one: spark[one] for one in local.keys() - IGNORED}
    for place, wanted in option.reaches.items():
        assert at(local, place) == wanted


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--runner", "local", "--master", "local[4]"], "--master is an option of Spark; remove it, or --runner local"),
        (["--runner", "local", "--conf", "spark.ui.port=4041"], "--conf is an option of Spark"),
        (["--runner", "local", "--checkpoint", "logs"], "--checkpoint is an option of Spark"),
        (["--runner", "flink"], "--runner flink: write spark or local"),
    ],
)
def test_a_runner_that_does_not_exist_and_options_of_spark_without_it_are_refused(
    given: list[str], said: str, calls: Calls, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *ON_SPARK.words.split(), *given) == Exit.USAGE
    assert said in capsys.readouterr().err
    assert calls.given == []


def test_spark_is_not_started_for_the_local_runner(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: Any) -> None:
        raise AssertionError("a JVM was started")

    monkeypatch.setattr("aggregations.spark.jvm.start_ahead", started)
    assert run(monkeypatch, *ON_SPARK.words.split(), "--runner", "local") == Exit.DONE


def test_spark_submit_does_not_run_the_local_runner(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "submit-command", "jobs.demo.flow:flow", "--runner", "local") == Exit.USAGE
    assert "spark-submit runs flows on Spark" in capsys.readouterr().err
