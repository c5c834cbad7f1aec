"""Flow files as programs, and the line that submits a flow."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from aggregations.engine.options import RunOptions
from aggregations.errors import FlowError
from aggregations.spark import run_flow
from aggregations.spark.session import _wanted, master_of
from jobs.cli.errors import Exit
from jobs.demo.flow import flow as demo
from jobs.loading import files_of, load
from jobs.submit import entry
from jobs.submit.command import submit_line
from persistence.kafka import KafkaSettings
from tests.support.cli import run

ROOT = Path(__file__).parents[2]
FLEET = """
from dataclasses import replace

from jobs.demo.flow import flow as demo

flow = replace(demo, name="fleet")
"""
GUARD = 'if __name__ == "__main__":\n    '


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A directory with one flow, and nothing in the environment."""
    monkeypatch.chdir(tmp_path)
    for name in ("HEADWATER_STORE", "SPARK_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYSPARK_PYTHON", "environment/bin/python")


def options(line: list[str]) -> dict[str, list[str]]:
    """Options of spark-submit up to its program, each with its values."""
    found: dict[str, list[str]] = {}
    own = line[1 : line.index(str(Path(entry.__file__).absolute()))]
    for name, value in zip(own[::2], own[1::2], strict=True):
        found.setdefault(name, []).append(value)
    return found


def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert run(monkeypatch, "submit-command", "jobs.demo.flow:flow", *arguments) == 0
    return shlex.split(capsys.readouterr().out)


def test_the_line_has_the_master_and_this_python_and_asks_for_no_jar() -> None:
    line = submit_line("headwater fleet", ["run", "fleet:flow"], master="yarn", py_files=["a.py", "b.zip"])
    assert line[0] == str(Path(pyspark.__file__).parent / "bin" / "spark-submit")
    assert options(line) == {
        "--master": ["yarn"],
        "--deploy-mode": ["client"],
        "--name": ["headwater fleet"],
        "--py-files": ["a.py,b.zip"],
        "--conf": ["spark.pyspark.python=environment/bin/python", f"spark.pyspark.driver.python={sys.executable}"],
    }
    assert line[-2:] == ["run", "fleet:flow"]


def test_a_driver_of_the_cluster_has_the_workers_python(monkeypatch: pytest.MonkeyPatch) -> None:
    line = submit_line("f", [], master="yarn", deploy_mode="cluster")
    assert options(line)["--conf"] == ["spark.pyspark.python=environment/bin/python"]


def test_options_of_run_go_on_to_it_and_those_of_spark_become_spark_submit_s(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--master", "yarn", "--conf", "spark.a=b c", "--store", "redis://r", "--trigger", "2s"]
    arguments += ["--store", "carrier=cassandra://c/fleet", "--until-caught-up", "--accept", "lost-records"]
    line = printed(
        monkeypatch, capsys, *arguments, "--deploy-mode", "cluster", "--py-files", "shop.zip", "--", "--json"
    )
    found = options(line)
    assert found["--master"] == ["yarn"]
    assert found["--deploy-mode"] == ["cluster"]
    assert found["--py-files"] == ["shop.zip"]
    assert found["--conf"][-1] == "spark.a=b c"
    assert line[line.index(str(Path(entry.__file__).absolute())) + 1 :] == [
        *("run", "jobs.demo.flow:flow", "--store", "redis://r", "--store", "carrier=cassandra://c/fleet"),
        *("--until-caught-up", "--trigger", "2s", "--accept", "lost-records", "--json"),
    ]


def test_a_flow_in_a_file_by_itself_goes_with_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "fleet_to_submit.py").write_text(FLEET)
    assert run(monkeypatch, "submit-command", "fleet_to_submit:flow", "--json") == 0
    line = json.loads(capsys.readouterr().out)["command"]
    assert options(line)["--py-files"] == [str(tmp_path / "fleet_to_submit.py")]
    assert options(line)["--master"] == ["local[2]"]


def test_what_is_installed_or_in_a_package_is_not_sent() -> None:
    for reference in ("jobs.demo.flow:flow", "polars:col", "json:loads"):
        load(reference)
        assert files_of(reference) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--master", "yarn"], "Spark's workers (yarn) may run on others"),
        (["--store", "memory://m"], "end with the process"),
        (["--deploy-mode", "clustered"], "--deploy-mode clustered: write client or cluster"),
        (["--deploy-mode", "cluster"], "Spark does not run Python drivers on the machines of local[2]"),
        (
            ["--store", "redis://r", "--master", "spark://h:7077", "--deploy-mode", "cluster"],
            "remove the option, or give",
        ),
        (["--trigger", "soon"], "'soon' is not a duration"),
        (["--conf", "spark"], "--conf: write NAME=VALUE"),
        (["--accept", "everything"], "unknown risk everything"),
        (["--no-such-option"], "No such option"),
    ],
)
def test_a_flow_that_could_not_run_there_has_no_line(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "submit-command", "jobs.demo.flow:flow", *arguments) == Exit.USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err


def test_the_submitted_master_wins_and_a_store_is_judged_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (master_of(None, {}), master_of("local[3]", {})) == ("local[2]", "local[3]")
    assert master_of("local[3]", {"spark.master": "local[4]"}) == "local[4]"
    monkeypatch.setattr("aggregations.spark.session.submitted", lambda: {"spark.master": "spark://head:7077"})
    assert master_of("local[3]", {"spark.master": "local[4]"}) == "spark://head:7077"
    stores = {"aircraft": "sqlite:///tmp/a.db", "carrier": "sqlite:///tmp/a.db"}
    with pytest.raises(FlowError, match=r"spark://head:7077.*may run on others"):
        run_flow(demo, RunOptions(kafka=KafkaSettings("nowhere:1"), stores=stores), master="local[2]")


def test_submitted_settings_win_over_the_program_s_and_what_is_lost_is_said_without_its_value(
    caplog: pytest.LogCaptureFixture,
) -> None:
    conf = {"spark.a": "1", "spark.b": "secret"}
    assert _wanted("ours", "local[3]", conf, {}) == {"spark.app.name": "ours", "spark.master": "local[3]", **conf}
    assert not caplog.records
    theirs = {"spark.app.name": "theirs", "spark.master": "yarn", "spark.b": "3", "spark.c": "4"}
    assert _wanted("ours", "local[3]", conf, theirs) == {"spark.a": "1", **theirs}
    [said] = [record.getMessage() for record in caplog.records]
    assert "spark.master, spark.b" in said
    assert "secret" not in said


def program(text: str, name: str = "fleet.py") -> "subprocess.CompletedProcess[str]":
    """Run a file of this directory."""
    Path(name).write_text(text)
    return subprocess.run(
        [sys.executable, name, "--bootstrap", "127.0.0.1:1", "--accept", "none"],
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_flow_file_is_a_program_with_the_options_of_run() -> None:
    ended = program(f"{FLEET}\nfrom jobs.submit import run\n{GUARD}run(flow)\n")
    assert ended.returncode == Exit.USAGE, ended.stderr
    assert "flow fleet: unknown risk none" in ended.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{FLEET}\nfrom jobs.submit import run\nrun(flow)\n", "call run(flow) in the file that is run, under"),
        (
            f"from jobs.submit import run\n{GUARD}from jobs.demo.flow import flow\n    run(flow)\n",
            "flow 'flights' is not a variable of fleet.py",
        ),
    ],
    ids=["without the guard", "with the flow behind the guard"],
)
def test_a_program_that_workers_could_not_import_is_refused(text: str, said: str) -> None:
    ended = program(text)
    assert ended.returncode == Exit.USAGE, ended.stderr
    assert said in ended.stderr


def test_a_program_with_the_name_of_another_module_is_refused() -> None:
    Path("other").mkdir()
    Path("other/envelope.py").write_text(f"{FLEET}\nfrom jobs.submit import run\n{GUARD}run(flow)\n")
    ended = subprocess.run(
        [sys.executable, "-c", "import envelope, runpy; runpy.run_path('other/envelope.py', run_name='__main__')"],
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == Exit.USAGE, ended.stderr
    assert "envelope is the name of" in ended.stderr
