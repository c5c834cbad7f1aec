"""What Spark's Python daemon loads before it forks workers."""

import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

ARCHIVE = Path(pyspark.__file__).parent / "python" / "lib" / "pyspark.zip"

FROM_PACKAGE = """
import sys
from aggregations.spark.daemon import from_package
before = list(sys.path)
from_package()
import pyspark
print(".zip" in pyspark.__file__, sys.path == before)
"""

LOADED = """
import os
from aggregations.spark import daemon
daemon._LOADED_SECONDS = 0.001
daemon.load()
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("no process")
"""


def run(program: str, *path: Path, errors: int = subprocess.PIPE) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*path, *filter(None, sys.path)]))}
    command = [sys.executable, "-c", program]
    return subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, check=True
    ).stdout.strip()


@pytest.mark.parametrize(("foreign", "said"), [(False, "False False"), (True, "True True")])
def test_pyspark_comes_from_the_package_only_if_the_archive_is_part_of_it(
    foreign: bool, said: str, tmp_path: Path
) -> None:
    archive = ARCHIVE
    if foreign:  # of a cluster, whose Spark may be another version
        archive = tmp_path / ARCHIVE.name
        archive.write_bytes(ARCHIVE.read_bytes())
    assert run(FROM_PACKAGE, archive) == said


def test_compiling_is_announced_and_the_process_that_helps_is_gone_when_residents_are_forked() -> None:
    said, gone = run(LOADED, errors=subprocess.STDOUT).splitlines()
    assert said == "headwater: compiling code for this machine, once; this takes half a minute or more"
    assert gone == "no process"
