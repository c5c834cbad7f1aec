"""Where processes of one machine listen for each other."""

import os
import tempfile
from pathlib import Path
from typing import Final

_LONGEST_PARENT: Final = 50  # bytes; the path of a socket may have 103 on macOS and 107 on Linux


def socket_parent() -> Path:
    """The directory for temporary directories with sockets, whose paths must be short."""
    parent = Path(tempfile.gettempdir())
    if len(os.fsencode(parent)) > _LONGEST_PARENT:
        return Path("/tmp")  # noqa: S108 - mkdtemp makes a directory that only this user may read
    return parent
