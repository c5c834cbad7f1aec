"""Where output goes when it cannot be written, and what is refused before anything is done."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.cli.errors import Exit, explain
from jobs.stack.jars import JarsUnavailable, resolve
from jobs.stack.java import JavaUnavailable, java
from tests.support.cli import run

ROOT = Path(__file__).parents[2]


@pytest.fixture
def project(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The current directory, from which a command imports flows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def shell(line: str) -> "subprocess.CompletedProcess[str]":
    """Run a line in which `headwater` stands for a command that writes a line of data."""
    command = f'"{sys.executable}" -m jobs.cli faults'
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {line.replace('headwater', command)}"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_output_to_a_full_device_is_one_sentence() -> None:
    done = shell("headwater > /dev/full")
    assert (done.returncode, done.stderr) == (
        Exit.FAILED,
        "headwater: standard output cannot be written: No space left on device\n",
    )


def test_output_to_a_closed_descriptor_is_one_sentence() -> None:
    done = shell("headwater >&-")
    assert (done.returncode, done.stderr) == (Exit.FAILED, "headwater: standard output is closed\n")


def test_messages_that_nobody_can_read_change_nothing() -> None:
    for line in ("headwater 2>&-", "headwater 2> /dev/full"):
        done = shell(line)
        assert (done.returncode, done.stderr) == (0, "")
        assert "epoch" in done.stdout
    assert shell("headwater --no-such-option 2>&-").returncode == Exit.USAGE


def test_a_reader_that_has_enough_ends_the_command_quietly_as_sigpipe_would() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "jobs.cli", "faults"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_what_the_encoding_of_standard_output_lacks_is_escaped() -> None:
    done = shell("PYTHONIOENCODING=ascii headwater")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\n-----" in done.stdout
    line = "from jobs.screen import emit, keep_encodable, write; keep_encodable(); emit({'key': 'Łódź'}); write('Łódź')"
    done = subprocess.run(
        [sys.executable, "-c", line],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[0]) == {"key": "Łódź"}
    assert done.stdout.splitlines()[1] == "\\u0141\\xf3d\\u017a"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("HEADWATER_SPARK_LOG_LEVEL", "loud", "HEADWATER_SPARK_LOG_LEVEL=loud: write one of off, "),
        ("TMPDIR", "/no/such/directory", "TMPDIR=/no/such/directory is not a directory"),
        ("HEADWATER_FAULT", "nowhere.after", "HEADWATER_FAULT: unknown fault point 'nowhere'"),
        ("HEADWATER_FAULT", "persist", "HEADWATER_FAULT: 'persist' is not a fault"),
    ],
)
def test_a_variable_with_an_impossible_value_is_wrong_usage(
    name: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, value)
    assert run(monkeypatch, "faults") == Exit.USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err


@pytest.mark.parametrize(
    ("name", "said"),
    [("sourceless", "flow 'fleet' has no source()"), ("stageless", "flow 'fleet' does nothing with its elements")],
)
def test_a_flow_without_source_or_stage_is_described_to_nobody(
    name: str, said: str, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = f"unfinished_{name}"
    (project / f"{module}.py").write_text(
        "from aggregations import Flow, Topic\n"
        "sourceless = Flow('fleet')\n"
        "stageless = sourceless.source(Topic('legs', envelope=False)).filter(bool)\n"
    )
    assert run(monkeypatch, "describe", f"{module}:{name}") == Exit.USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--conf", "spark.speculation=true"], "--conf spark.speculation: the engine requires false"),
        (["--conf", "spark.python.daemon.module=x"], "the engine requires aggregations.spark.daemon"),
        (["--dead-letters", "flights.legs"], "is the flow's source"),
        (["--dead-letters", "flights.carriers"], "is a topic that the flow publishes to"),
    ],
)
@pytest.mark.parametrize("command", [["submit-command"], ["run", "--bootstrap", "127.0.0.1:1"]], ids=lambda c: c[0])
def test_what_exactness_rests_on_cannot_be_set_and_dead_letters_have_a_topic_of_their_own(
    command: list[str],
    arguments: list[str],
    said: str,
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (project / "with_outputs.py").write_text(
        "from jobs.demo.flow import flow as demo\nflow = demo.publish_states('flights.carriers')\n"
    )
    name, *options = command
    assert run(monkeypatch, name, "with_outputs:flow", *options, *arguments) == Exit.USAGE
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("step", ["publish", "publish_states"])
@pytest.mark.parametrize("runner", ["spark", "local"])
def test_a_flow_that_publishes_to_its_own_source_is_refused(
    step: str, runner: str, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = f"with_a_loop_{step}"
    (project / f"{module}.py").write_text(
        f"from jobs.demo.flow import flow as demo\nflow = demo.{step}('flights.legs')\n"
    )
    assert run(monkeypatch, "run", f"{module}:flow", "--bootstrap", "127.0.0.1:1", "--runner", runner) == Exit.USAGE
    assert "it publishes to flights.legs, which it reads" in capsys.readouterr().err


def test_java_options_with_an_open_quote_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADWATER_STACK_JAVA_OPTIONS", "-Da='b")
    assert run(monkeypatch, "stack", "status") == Exit.USAGE
    assert "HEADWATER_STACK_JAVA_OPTIONS: no closing quotation" in capsys.readouterr().err


def test_a_java_home_without_a_java_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    java.cache_clear()
    with pytest.raises(
        JavaUnavailable, match=rf"JAVA_HOME={tmp_path}: no Java at {tmp_path}/bin/java; install Java 17"
    ):
        java()
    java.cache_clear()


def test_a_java_that_is_too_old_is_named_by_its_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old = tmp_path / "bin" / "java"
    old.parent.mkdir()
    old.write_text("#!/bin/sh\necho 'openjdk version \"1.8.0_392\"' >&2\n")
    old.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    java.cache_clear()
    with pytest.raises(JavaUnavailable, match=rf"{old} is Java 8: install Java 17"):
        java()
    java.cache_clear()


def test_a_run_with_a_wrong_java_home_ends_before_spark_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    java.cache_clear()
    assert run(monkeypatch, "run", "jobs.demo.flow:flow", "--bootstrap", "127.0.0.1:1") == Exit.FAILED
    assert f"headwater: JAVA_HOME={tmp_path}" in capsys.readouterr().err
    java.cache_clear()


def test_a_cache_that_cannot_be_written_is_named_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("no directory")
    monkeypatch.setenv("HEADWATER_CACHE", str(tmp_path / "cache"))
    with pytest.raises(JarsUnavailable, match=r"cache cannot be used: .*set HEADWATER_CACHE to another directory"):
        resolve("none", ["a:b:1"])


def test_an_error_of_the_system_says_what_and_where() -> None:
    code, line = explain(PermissionError(13, "Permission denied", "/srv/states"))
    assert code is Exit.FAILED
    assert line.startswith("Permission denied (/srv/states); ")
