"""Paths on the command line: an empty one, usually a shell variable that is not set, is refused."""

import os
import re
from pathlib import Path

import pytest

from jobs.cli.errors import Exit
from tests.support.cli import run

FLOW = "jobs.demo.flow:flow"


@pytest.mark.parametrize(
    "words",
    [
        "stack status --root",
        "new",
        f"describe {FLOW} --svg",
        f"plan {FLOW} --kafka-settings",
        f"inspect {FLOW} --output",
        f"snapshot {FLOW} --to",
        f"restore {FLOW} --from",
        f"blame {FLOW} --svg",
        f"audit {FLOW} --snapshot",
        f"audit {FLOW} --work",
        "copy --name n --to t --from-lines",
    ],
)
def test_an_empty_path_is_refused(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, *words.split(), "") == Exit.USAGE
    assert "it is empty" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    "words",
    [
        f"run {FLOW} --dead-letters",
        f"plan {FLOW} --group",
        "republish m:f --to t --via v --from",
        "copy --name n --to",
        "redrive --from",
    ],
)
def test_a_name_of_kafka_that_is_not_utf8_is_refused(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """confluent-kafka ends the process with a segmentation fault if it is asked about such a topic."""
    assert run(monkeypatch, *words.split(), os.fsdecode(b"caf\xe9")) == Exit.USAGE
    assert "it is not UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["sqlite://{}", "lmdb://{}/a-file"])
def test_a_store_whose_path_is_of_the_wrong_kind_is_wrong_usage(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a-file").touch()
    assert run(monkeypatch, "inspect", FLOW, "--stage", "carrier", "--store", url.format(tmp_path)) == Exit.USAGE
    assert re.search(f"{tmp_path}(/a-file is not a directory| is a directory)", capsys.readouterr().err)


def test_a_file_of_states_in_place_of_a_directory_is_wrong_usage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["inspect", FLOW, "--stage", "carrier", "--store", f"sqlite://{tmp_path}/s.db", "--format", "json"]
    assert run(monkeypatch, *words, "--output", str(tmp_path)) == Exit.USAGE
    assert f"{tmp_path} cannot be written: Is a directory; choose another file" in capsys.readouterr().err


def test_a_stack_without_any_server_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "stack", "up", "--no-kafka") == Exit.USAGE
    assert "--no-kafka: give --redis or --cassandra" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == []
