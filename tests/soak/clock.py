"""A wrong clock for one process, which may jump while it runs: `clock.c`, preloaded."""

import functools
import shutil
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("clock.c")


class Clock:
    """The offset of one process's time of day, in a file that the process maps.

    Args:
        file: File of the offset; the library is next to it.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self.set(0)

    @staticmethod
    def is_possible() -> bool:
        """Whether there is a C compiler to build the library."""
        return shutil.which("cc") is not None

    def set(self, hours: int) -> None:
        """Set the offset of the process's clock in hours."""
        with self._file.open("r+b" if self._file.exists() else "wb") as file:  # the same file: it may be mapped
            file.write((hours * 3600).to_bytes(8, "little", signed=True))

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables with which a process uses this clock."""
        return {"LD_PRELOAD": str(_library(self._file.parent)), "CLOCK_FILE": str(self._file)}


@functools.cache
def _library(directory: Path) -> Path:
    library = directory / "clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(_SOURCE), "-ldl"], check=True)
    return library
