"""A clock that one process believes in, and that may jump while it runs: `clock.c`, preloaded."""

import functools
import shutil
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("clock.c")


class Clock:
    """How far the time of day of one process is off; the file is mapped by that process.

    Args:
        file: Where the offset is kept, and beside it the library.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self.set(0)

    @staticmethod
    def is_possible() -> bool:
        """Whether there is a C compiler to make the library with."""
        return shutil.which("cc") is not None

    def set(self, hours: int) -> None:
        """Let the process be off by so many hours from now on."""
        with self._file.open("r+b" if self._file.exists() else "wb") as file:  # the same file: it may be mapped
            file.write((hours * 3600).to_bytes(8, "little", signed=True))

    @property
    def environment(self) -> dict[str, str]:
        """What makes a process that is started with it believe in this clock."""
        return {"LD_PRELOAD": str(_library(self._file.parent)), "CLOCK_FILE": str(self._file)}


@functools.cache
def _library(directory: Path) -> Path:
    library = directory / "clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(_SOURCE), "-ldl"], check=True)
    return library
