"""The commands of the README, line by line, on a real broker."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.spark, pytest.mark.slow]

ROOT = Path(__file__).parents[2]


def lines() -> list[str]:
    """The commands of the first block under "Run it"."""
    text = (ROOT / "README.md").read_text().partition("## Run it")[2]
    block = re.search(r"```console\n(.*?)```", text, re.DOTALL)
    assert block
    return [line.removeprefix("$ ") for line in block[1].replace("\\\n", "").splitlines()]


def test_the_lines_under_run_it_lead_to_numbers(tmp_path: Path) -> None:
    activate, change, *commands = lines()
    assert (activate, change) == (". .venv/bin/activate", "cd examples")
    here = tmp_path / "examples"
    shutil.copytree(ROOT / "examples", here, ignore=shutil.ignore_patterns(".headwater", "__pycache__"))
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    for name in [name for name in environment if name.startswith("HEADWATER_KAFKA")]:
        del environment[name]
    said = {}
    try:
        for command in commands:
            done = subprocess.run(
                ["bash", "-c", command], cwd=here, env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{command}\n{done.stderr}"
            said[" ".join(command.split()[:2])] = done.stdout
    finally:
        subprocess.run(["bash", "-c", "headwater stack down"], cwd=here, env=environment, check=False)
    assert said["python fill.py"] == "5,000 flights and one malformed record in flights.raw\n"
    assert "vectorised" in said["headwater describe"]
    assert re.search(r"^UA +\d{3}", said["headwater inspect"], re.MULTILINE)
    assert re.search(r"^flights\.raw .* 1$", said["headwater redrive"], re.MULTILINE)
