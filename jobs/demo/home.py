"""Where a run of the demo keeps its things."""

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from jobs.screen import say
from jobs.settings import UsageError
from persistence.registry import open_store


@contextmanager
def directory(*, keep: bool) -> Iterator[Path]:
    """A fresh directory; deleted at the end, unless it shall be kept or something went wrong."""
    home = Path(tempfile.mkdtemp(prefix="headwater-demo-"))
    try:
        yield home
    finally:
        # What is on its way out is an error that the logs in it explain, or the person who stopped it.
        if keep or isinstance(sys.exception(), Exception):
            say(f"logs and states: {home}")
        else:
            shutil.rmtree(home, ignore_errors=True)


def prepared(store: str | None, home: Path) -> tuple[str, int]:
    """Return the URL of the store, and a generation in which it has no states yet.

    Raises:
        UsageError: The store lives in the memory of one process.
        StoreError: It cannot be opened.
    """
    if store is None:
        return f"sqlite://{home / 'states.db'}", 1
    with closing(open_store(store)) as opened:
        if not opened.capabilities.shared:
            raise UsageError("--store: the demo's processes are several, the store must be one that they can share")
    return store, int(time.time())
