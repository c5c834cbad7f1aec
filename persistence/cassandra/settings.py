"""The settings in the URL of a Cassandra store. They contain no secret, only the places where secrets are kept."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import unquote, urlsplit

from persistence.credentials import Secret, referred
from persistence.errors import InvalidUrl
from persistence.urls import UnfitValueError, choice, options, redact, seconds, whole

DEFAULT_PORT: Final = 9042
_COPIES: Final = whole(1, 100)

CONDITIONAL: Final = "conditional"
"""Every write is a lightweight transaction: condition and effect are one step. The default."""
TIMESTAMP: Final = "timestamp"
"""Plain writes `USING TIMESTAMP`: cheaper, with the gap described in `persistence.cassandra.states`."""

_KEYSPACE = re.compile(r"[a-z][a-z0-9_]{0,47}\Z")
_EXAMPLE = "Write cassandra://host:9042/keyspace, or several hosts separated by commas"


@dataclass(frozen=True, slots=True)
class Replication:
    """Number of copies in a keyspace: per data centre, or `everywhere`, the same number in each."""

    everywhere: int = 0
    datacentres: tuple[tuple[str, int], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `3`, or `paris:3,oslo:2`.

        Raises:
            UnfitValueError: It is neither.
        """
        if ":" not in text:
            return cls(everywhere=_COPIES(text))
        pairs = tuple((name.strip(), _COPIES(count)) for name, _, count in map(_partition, text.split(",")))
        if not all(name for name, _ in pairs):
            raise UnfitValueError("Write the copies of each data centre, for example paris:3,oslo:2")
        return cls(datacentres=pairs)

    def cql(self) -> str:
        """The map literal of `CREATE KEYSPACE ... WITH replication`."""
        counts = self.datacentres or (("replication_factor", self.everywhere),)
        quoted = ", ".join(f"'{name.replace(chr(39), chr(39) * 2)}': {count}" for name, count in counts)
        return f"{{'class': 'NetworkTopologyStrategy', {quoted}}}"


@dataclass(frozen=True, slots=True)
class Tls:
    """How connections are encrypted.

    Attributes:
        authority: PEM file of the certificate authority; None trusts the system's authorities.
        certificate: PEM file of this client's certificate, if nodes require one.
        key: PEM file of its key.
        key_password: Where the key's password is kept.
        check_hostname: Each node's certificate must contain its IP address, by which the driver connects.
    """

    authority: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    key_password: Secret | None = None
    check_hostname: bool = True


@dataclass(frozen=True, slots=True)
class CassandraSettings:
    """Settings of one store.

    Attributes:
        hosts: Contact points, (address, port).
        keyspace: Keyspace with the tables of `persistence.cassandra.ddl`.
        dc: Local data centre; empty for that of the first contact point.
        consistency: Consistency of reads, and of a transaction's commit.
        serial_consistency: Consistency of a transaction's Paxos rounds and of reads after an unknown outcome.
        mode: `CONDITIONAL` or `TIMESTAMP`. A stage keeps the mode of its first write.
        buckets: Number of partitions for the states of a stage. Fewer make fuller batches: 16 were
            twice as fast as 32 in calls of 2,500 states. More keep partitions small: Cassandra recommends
            less than 100 MB, 200,000 states of 500 bytes. A stage keeps its first number.
        batch_bytes: Maximum bytes of one conditional batch. A server refuses some batches above its
            `batch_size_fail_threshold`, 50 KiB by default.
        max_value_bytes: Longest accepted state.
        concurrency: Buckets that one call reads or writes in parallel.
        timeout: Seconds until a request counts as unanswered.
        connect_timeout: Seconds to open a connection.
        retry_for: Seconds for which a call retries temporary errors.
        replication: Used by `headwater schema apply` when it creates the keyspace.
        username: Login name; empty for no login.
        password: Where its password is kept.
        tls: None for an unencrypted connection.
    """

    hosts: tuple[tuple[str, int], ...]
    keyspace: str
    dc: str = ""
    consistency: str = "local_quorum"
    serial_consistency: str = "local_serial"
    mode: str = CONDITIONAL
    buckets: int = 16
    batch_bytes: int = 48 << 10
    max_value_bytes: int = 1 << 20
    concurrency: int = 8
    timeout: float = 10.0
    connect_timeout: float = 5.0
    retry_for: float = 30.0
    replication: Replication = Replication(everywhere=3)
    username: str = ""
    password: Secret | None = None
    tls: Tls | None = None

    @property
    def place(self) -> str:
        """Hosts and keyspace, for messages."""
        return f"cassandra://{','.join(f'{host}:{port}' for host, port in self.hosts)}/{self.keyspace}"

    @classmethod
    def parse(cls, url: str) -> Self:
        """Read `cassandra://[user@]host[:port][,host[:port]...]/keyspace[?options]`.

        Raises:
            InvalidUrl: Host or keyspace is missing, an option is unknown or invalid, or the URL contains
                a password. The text shows no value.
        """
        parts = urlsplit(url)
        user, _, hosts = parts.netloc.rpartition("@")
        if ":" in user:
            raise InvalidUrl(
                f"{redact(url)} contains a password, which logs and process lists would show",
                "Name a file or a variable instead: user@host and ?password_file=/run/secrets/x or ?password_env=NAME",
            )
        keyspace = parts.path.strip("/")
        if not _KEYSPACE.match(keyspace):
            raise InvalidUrl(
                f"{redact(url)} names no keyspace, or an invalid one: 1 to 48 characters of a-z, 0-9 and _, beginning with a letter",
                f"{_EXAMPLE}; `headwater schema apply` creates the keyspace",
            )
        try:
            addresses = tuple(_address(host) for host in hosts.split(","))
        except ValueError as error:
            raise InvalidUrl(f"{redact(url)} has an invalid host", _EXAMPLE) from error
        given = options(url, _OPTIONS)
        return cls(
            addresses, keyspace, username=unquote(user), password=referred(url, given, "password"),
            tls=_tls(url, given), **given,
        )  # fmt: skip


def _address(text: str) -> tuple[str, int]:
    # Parsed as the authority of a URL, for IPv6 in brackets and the port.
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError
    return parts.hostname, parts.port or DEFAULT_PORT


def _tls(url: str, given: dict[str, Any]) -> Tls | None:
    wanted = given.pop("tls", None)
    check_hostname = given.pop("tls_hostname", "check") == "check"
    tls = Tls(
        given.pop("tls_ca", None), given.pop("tls_cert", None), given.pop("tls_key", None),
        referred(url, given, "tls_key_password"), check_hostname,
    )  # fmt: skip
    if tls != Tls() and wanted is False:
        raise InvalidUrl(f"{redact(url)} contains tls=off and other TLS options", "Keep one of them")
    return tls if wanted or tls != Tls() else None


def _partition(text: str) -> tuple[str, str, str]:
    return text.partition(":")


_OPTIONS: Final[dict[str, Callable[[str], Any]]] = {
    "dc": str,
    "consistency": choice("local_quorum", "quorum", "all"),
    "serial_consistency": choice("local_serial", "serial"),
    "mode": choice(CONDITIONAL, TIMESTAMP),
    "buckets": whole(1, 65_536),
    "batch_bytes": whole(1 << 10, 8 << 20),
    "max_value_bytes": whole(1 << 10, 8 << 20),
    "concurrency": whole(1, 256),
    "timeout": seconds,
    "connect_timeout": seconds,
    "retry_for": seconds,
    "replication": Replication.parse,
    "password_file": Path,
    "password_env": str,
    "tls": lambda text: choice("on", "off")(text) == "on",
    "tls_ca": Path,
    "tls_cert": Path,
    "tls_key": Path,
    "tls_key_password_file": Path,
    "tls_key_password_env": str,
    "tls_hostname": choice("check", "ignore"),
}
