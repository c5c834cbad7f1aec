"""The settings in a Redis URL."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from persistence.credentials import Secret, referred
from persistence.errors import InvalidUrl
from persistence.urls import UnfitValueError, options, redact, seconds, whole

_OPTIONS = ("timeout", "connect_timeout", "retry_for", "buckets", "prefix", "wait", "waitaof", "wait_timeout", "accept")
RISKS = frozenset({"eviction", "no-aof", "replica", "fsync", "unwaited-replicas"})
"""Risks that a server can have."""


@dataclass(frozen=True, slots=True)
class RedisSettings:
    """The options of a URL.

    Attributes:
        timeout: Seconds to wait for an answer.
        connect_timeout: Seconds to wait for a connection.
        retry_for: Seconds to retry while a server is unreachable, loading or failing over.
        buckets: Buckets of a flow that is new to the store; an existing flow keeps its number.
        prefix: First part of every key.
        wait: Replicas that must have a write before it counts as done (WAIT).
        waitaof: (1 if the server itself must have it on disk, number of replicas that must) (WAITAOF); None for neither.
        wait_timeout: Seconds to wait for them.
        accept: Risks that a run accepts.
        password: Where the password is kept, if the URL does not contain it.
        sentinel_password: The same for the sentinels.
        client: Options for redis-py: TLS, names, passwords.
        url: The URL without secrets, for errors.
    """

    timeout: float = 5.0
    connect_timeout: float = 5.0
    retry_for: float = 15.0
    buckets: int | None = None
    prefix: str = "hw"
    wait: int = 0
    waitaof: tuple[int, int] | None = None
    wait_timeout: float = 1.0
    accept: frozenset[str] = frozenset()
    password: Secret | None = None
    sentinel_password: Secret | None = None
    client: tuple[tuple[str, Any], ...] = field(default=(), repr=False)
    url: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.wait_timeout >= self.timeout and (self.wait or self.waitaof):
            raise InvalidUrl("wait_timeout is not shorter than timeout", "Raise timeout or lower wait_timeout")


def read_settings(url: str) -> RedisSettings:
    """Read the options of a URL.

    Raises:
        InvalidUrl: An option is unknown or its value is invalid.
    """
    known: dict[str, Callable[[str], Any]] = {
        "timeout": seconds,
        "connect_timeout": seconds,
        "retry_for": seconds,
        "buckets": whole(1, 16_384),  # a cluster has as many slots
        "prefix": _prefix,
        "wait": _count,
        "waitaof": _pair,
        "wait_timeout": seconds,
        "accept": _risks,
        "ssl_ca_certs": str,
        "ssl_certfile": str,
        "ssl_keyfile": str,
        "ssl_cert_reqs": str,
        "client_name": str,
        "sentinel_username": str,
        "sentinel_password": str,
        "sentinel_password_file": Path,
        "sentinel_password_env": str,
        "password_file": Path,
        "password_env": str,
    }
    read = options(url, known)
    password, sentinel = referred(url, read, "password"), referred(url, read, "sentinel_password")
    if (password and urlsplit(url).password) or (sentinel and "sentinel_password" in read):
        raise InvalidUrl(f"{redact(url)} contains a password and also names where it is kept", "Keep one of them")
    if (tls := [name for name in read if name.startswith("ssl_")]) and not url.startswith("rediss"):
        raise InvalidUrl(f"{redact(url)} has the option {tls[0]}, and no encryption", "Write rediss:// for redis://")
    own = {name: read.pop(name) for name in _OPTIONS if name in read}
    return RedisSettings(
        **own, password=password, sentinel_password=sentinel, client=tuple(read.items()), url=redact(url)
    )


@dataclass(frozen=True, slots=True, repr=False)
class Endpoint:
    """Address of the servers.

    Attributes:
        kind: single, sentinel or cluster.
        tls: Whether connections are encrypted.
        hosts: Host and port of the server, or of the sentinels or nodes to contact first.
        socket: Path of a unix socket instead.
        service: The sentinels' name of the primary.
        db: Database number.
        username: User.
        password: Password.
    """

    kind: str
    tls: bool
    hosts: tuple[tuple[str, int], ...]
    socket: str
    service: str
    db: int
    username: str | None
    password: str | None


def read_place(url: str) -> Endpoint:
    """Read the address in a URL.

    Raises:
        InvalidUrl: The URL is invalid.
    """
    parts = urlsplit(url)
    base, _, variant = parts.scheme.partition("+")
    user, _, location = parts.netloc.rpartition("@")
    name, _, password = user.partition(":")
    path = [unquote(part) for part in parts.path.split("/") if part]
    kind = variant if variant in ("sentinel", "cluster") else "single"
    default = 26379 if kind == "sentinel" else 6379
    try:
        hosts = tuple(_host(text, default) for text in location.split(",")) if variant != "unix" else ()
        service = path.pop(0) if kind == "sentinel" else ""
        db = int(path[0]) if path and variant != "unix" else 0
    except (ValueError, IndexError):
        raise InvalidUrl(f"{redact(url)} is invalid", _SHAPES) from None
    if kind == "cluster" and db:
        raise InvalidUrl(f"{redact(url)}: a cluster has no databases", "Remove the number")
    return Endpoint(
        kind=kind,
        tls=base == "rediss",
        hosts=hosts,
        socket=unquote(parts.path) if variant == "unix" else "",
        service=service,
        db=db,
        username=unquote(name) or None,
        password=unquote(password) or None,
    )


_SHAPES = (
    "Write redis://[USER:PASSWORD@]HOST:PORT[/DB], redis+unix:///PATH, redis+sentinel://HOST:PORT,HOST:PORT/SERVICE "
    "or redis+cluster://HOST:PORT,HOST:PORT; rediss instead of redis for TLS"
)


def _host(text: str, default: int) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    return parts.hostname or "localhost", parts.port or default


_count, _local = whole(0, 1_000), whole(0, 1)


def _prefix(text: str) -> str:
    # A brace would change the cluster slot, the others are patterns or separators.
    if not text or set(text) & set("{}*?[]\\ \t\r\n"):
        raise UnfitValueError("Write a text without spaces and {}*?[]\\")
    return text


def _pair(text: str) -> tuple[int, int]:
    local, _, replicas = text.partition(",")
    try:
        return _local(local), _count(replicas or "0")
    except UnfitValueError:
        raise UnfitValueError("Write 0 or 1, or for example 1,2 with a number of replicas") from None


def _risks(text: str) -> frozenset[str]:
    if not set(found := text.split(",")) <= RISKS:
        raise UnfitValueError(f"Write one or several of: {', '.join(sorted(RISKS))}")
    return frozenset(found)
