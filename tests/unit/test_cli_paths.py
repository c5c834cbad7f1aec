"""Paths on the command line: an empty one, usually a shell variable that is not set, is refused."""

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


def test_a_stack_without_any_server_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "stack", "up", "--no-kafka") == Exit.USAGE
    assert "--no-kafka: give --redis or --cassandra" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == []
