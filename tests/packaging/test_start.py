"""The page Start, followed to its end with the installed wheel."""

import os
import re
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.integration]

PAGE = Path(__file__).parents[2] / "docs" / "start.md"
BLOCKS = re.findall(r"(.*?)^```(\w+)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
"""The text before a code block, the block's language, and the block."""


def test_its_commands_do_what_it_says(installed, tmp_path: Path) -> None:
    path = f"{installed.home / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PATH": path}
    outputs: dict[str, list[str]] = defaultdict(list)

    def follow(line: str) -> None:
        done = subprocess.run(
            line, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        outputs[line.split()[1]].append(done.stdout)

    try:
        for before, language, block in BLOCKS:
            if language == "python":
                [name] = re.findall(r"Save this as `(\S+)`", before)
                (tmp_path / name).write_text(block)
            elif language == "console" and "pip install" not in block:
                for line in block.replace("\\\n", " ").splitlines():
                    follow(line.removeprefix("$ "))
    finally:
        follow("headwater stack down")

    [table] = [block for _, language, block in BLOCKS if language == "text"]
    assert outputs["inspect"] == [table, table]
    first, again = ([line.split()[1:] for line in shown.splitlines()[2:]] for shown in outputs["run"])
    assert {verdict for verdict, _ in first} == {"accepted", "new_lane"}
    assert {verdict for verdict, _ in again} == {"duplicate", "below_floor"}
    assert sum(int(count.replace(",", "")) for _, count in again) == 1500
