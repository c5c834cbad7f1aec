"""Directory, stores and generation of a run of the demo."""

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

from jobs.environment import UsageError
from jobs.screen import say
from jobs.stack import StackState
from persistence.registry import open_store
from persistence.urls import embedded


@contextmanager
def directory(*, keep: bool) -> Iterator[Path]:
    """A new directory. It is deleted at the end, unless `keep` is set or it contains the logs of an error."""
    home = Path(tempfile.mkdtemp(prefix="headwater-demo-"))
    try:
        yield home
    finally:
        # An `Exception` is an error that the logs explain; other exceptions come from the user who stopped the demo.
        if keep or (isinstance(sys.exception(), Exception) and any(home.iterdir())):
            say(f"logs and states: {home}")
        else:
            shutil.rmtree(home, ignore_errors=True)


KINDS: Final = {"redis": ("redis", "redis"), "cassandra": ("cassandra", "cassandra"), "mixed": ("redis", "cassandra")}
"""Servers that the demo starts for the states of aircraft and of carriers."""


def prepared(store: str | None, home: Path) -> tuple[str, int]:
    """Return the store of the states, a URL or a key of `KINDS`, and a generation that is new to it.

    Raises:
        UsageError: The store is in the memory of one process.
        StoreError: It cannot be opened.
    """
    if store is None:
        return embedded("lmdb", home / "states"), 1
    if store in KINDS:
        return store, 1
    with closing(open_store(store)) as opened:
        if not opened.capabilities.shared:
            raise UsageError("--store: the demo runs several processes and needs a store that they can share")
    return store, int(time.time())


def bound(store: str, servers: StackState) -> dict[str, str]:
    """URL of the store by stage.

    Args:
        store: A URL, or a key of `KINDS`.
        servers: The running servers.
    """
    urls = [_started(kind, servers) for kind in KINDS[store]] if store in KINDS else [store, store]
    return dict(zip(("aircraft", "carrier"), urls, strict=True))


def _started(kind: str, servers: StackState) -> str:
    if kind == "redis":
        return servers.redis
    from persistence.cassandra import apply_schema

    url = f"{servers.cassandra}/headwater_demo?replication=1"
    apply_schema(url)
    return url
