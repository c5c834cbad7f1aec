"""The soak's full disk where no file system may be mounted: a limit of the sizes of files, for one process."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak.servers import Disk

WRITES = """
import sys
with open(sys.argv[1], "ab", buffering=0) as file:
    for _ in sys.stdin:
        try:
            file.write(bytes(1 << 20))
            print("written", flush=True)
        except OSError as error:
            print(error.strerror, flush=True)
"""


def test_a_process_whose_disk_is_full_cannot_write_and_can_when_there_is_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Disk, "_mount", lambda *_: False)
    disk = Disk(tmp_path / "data", 100)
    assert disk.kind == "RLIMIT_FSIZE"
    command = [sys.executable, "-c", WRITES, str(tmp_path / "data" / "file")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None

        def write() -> str:
            print(file=process.stdin, flush=True)
            return process.stdout.readline().strip()

        said = [write()]
        disk.fill(process.pid)
        said += [write(), write()]
        disk.free(process.pid)
        said.append(write())
        process.stdin.close()
    assert said == ["written", "File too large", "File too large", "written"]
