"""Opens stores by URL. Each scheme names a function by dotted path, so that a driver is imported only on use."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from importlib import import_module, metadata
from types import ModuleType
from urllib.parse import urlsplit

from persistence.errors import InvalidUrl, Terminal
from persistence.findings import Finding
from persistence.protocol import StateStore
from persistence.urls import redact

ENTRY_POINTS = "headwater.stores"
"""Entry point group of other distributions' stores: scheme = "module:function", the function takes the URL."""

_targets = {
    "memory": "persistence.memory:open_store",
    "lmdb": "persistence.lmdb:open_store",
    "sqlite": "persistence.sqlite:open_store",
    "cassandra": "persistence.cassandra:open_store",
    **dict.fromkeys(
        ["redis", "rediss", "redis+unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster"],
        "persistence.redis:open_store",
    ),
}


def register(scheme: str, target: str) -> None:
    """Make `scheme` open stores through the function at `target` ("module:function") in this process."""
    _targets[scheme] = target


def schemes() -> list[str]:
    """The schemes that `open_store` knows, sorted."""
    return sorted({*_targets, *(point.name for point in metadata.entry_points(group=ENTRY_POINTS))})


def open_store(url: str) -> StateStore:
    """Open the store at `url`.

    Raises:
        Terminal: No store has this scheme, or its driver is not installed.
    """
    module, function = _resolve(url)
    opener: Callable[[str], StateStore] = getattr(module, function)
    return opener(url)


def open_stores(urls: Iterable[str], stack: ExitStack) -> dict[str, StateStore]:
    """Open the store of each URL once, by URL; the stack closes them.

    Raises:
        Terminal: As `open_store`.
    """
    handles: dict[str, StateStore] = {}
    for url in dict.fromkeys(urls):
        handles[url] = open_store(url)
        stack.callback(handles[url].close)
    return handles


def preflight(url: str) -> list[Finding]:
    """Return what should be changed in the store at `url` before a flow runs on it.

    A store's module may define a function `preflight(url)`; without it the result is empty.

    Raises:
        Transient: The store cannot be reached.
        Terminal: The store cannot be used, or no store supports this URL.
    """
    look: Callable[[str], list[Finding]] = getattr(_resolve(url)[0], "preflight", lambda _: [])
    return look(url)


def schema(url: str) -> list[str]:
    """The statements, in order, that create the schema of a store in the database at `url`. Opens no connection.

    A store's module may define the functions `schema(url)` and `apply_schema(url, progress)`; a store without
    them needs no schema.

    Raises:
        Terminal: The URL is invalid, or no store supports it.
    """
    statements: Callable[[str], list[str]] = getattr(_resolve(url)[0], "schema", lambda _: [])
    return statements(url)


def apply_schema(url: str, progress: Callable[[str], object] = lambda _line: None) -> list[str]:
    """Create the missing parts of the schema of the store at `url`; existing parts are not changed.

    Args:
        url: The store's URL.
        progress: Called with a line for each step.

    Returns:
        Names of the created parts, for example `table fleet.state`; empty when nothing was missing.

    Raises:
        Transient: The database cannot be reached.
        Terminal: The database refuses a statement, or contains other objects under these names.
    """
    apply: Callable[[str, Callable[[str], object]], list[str]]
    apply = getattr(_resolve(url)[0], "apply_schema", lambda _url, _progress: [])
    return apply(url, progress)


def risks(url: str) -> frozenset[str]:
    """Names of the risks that the preflight of the store at `url` can find: `RISKS` of its module, if defined.

    Raises:
        Terminal: No store supports this URL.
    """
    named: frozenset[str] = getattr(_resolve(url)[0], "RISKS", frozenset())
    return named


def _resolve(url: str) -> tuple[ModuleType, str]:
    """The module of the store at `url`, and the name of its function there."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise InvalidUrl("the URL of a store is invalid", "Write an IPv6 address as redis://[::1]:6379") from error
    scheme = parts.scheme
    if "#" in url:  # it would be left out, and another store opened
        raise InvalidUrl(f"{redact(url)} has a '#'", "Write %23 for it")
    if not scheme:
        raise InvalidUrl("the URL of a store has no scheme", "Write for example lmdb:///PATH or redis://HOST")
    target = _targets.get(scheme) or _entry_point(scheme)
    if target is None:
        raise InvalidUrl(
            f"no store has the scheme {scheme!r} (in {redact(url)})", f"Known schemes: {', '.join(schemes())}"
        )
    module, _, function = target.partition(":")
    try:
        return import_module(module), function
    except ImportError as error:
        ours = module.startswith("persistence.")
        raise Terminal(
            f"the store {scheme}:// needs a package that is not installed ({error.name or error})",
            "Install headwater again: its dependencies are incomplete"
            if ours
            else f"Install the distribution that contains {module}",
        ) from error


def _entry_point(scheme: str) -> str | None:
    found = metadata.entry_points(group=ENTRY_POINTS, name=scheme)
    return next((point.value for point in found), None)
