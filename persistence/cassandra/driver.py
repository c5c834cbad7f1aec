"""Configures the driver so that it sends nothing twice, and handles forks."""

import os
import socket
import ssl
import threading
from typing import Any, Final

from cassandra import ConsistencyLevel, DependencyException, DriverException
from cassandra.auth import PlainTextAuthProvider
from cassandra.policies import (
    DCAwareRoundRobinPolicy,
    ExponentialReconnectionPolicy,
    FallthroughRetryPolicy,
    NoSpeculativeExecutionPolicy,
    TokenAwarePolicy,
)
from cassandra.query import tuple_factory

from persistence.cassandra.settings import CassandraSettings, Tls
from persistence.errors import Terminal

try:
    from cassandra.cluster import EXEC_PROFILE_DEFAULT, Cluster, ExecutionProfile, NoHostAvailable
except DependencyException as error:
    raise Terminal(
        "the Cassandra driver has no event loop for this Python",
        "Install a wheel of cassandra-driver, which includes libev; to build it, install libev's headers first",
    ) from error

from cassandra.connection import ConnectionBusy, ConnectionException, ProtocolError
from cassandra.protocol import ErrorMessage

DRIVER_ERRORS: Final = (
    DriverException,
    ErrorMessage,
    NoHostAvailable,
    ConnectionException,
    ConnectionBusy,
    ProtocolError,
    OSError,
)
"""Errors that a request may raise; the driver has no common base class. Any other error is a bug and not caught."""

_PROTOCOL: Final = 5
"""Native protocol of Cassandra 4.0 and newer, the first whose frames have checksums."""

_HEARTBEAT: Final = 5.0
"""Seconds of silence before a heartbeat is sent, and seconds to wait for its answer."""


def connect(settings: CassandraSettings) -> tuple[Any, Any]:
    """Open connections; return (cluster, session). The session has no keyspace: statements name it.

    Raises:
        DRIVER_ERRORS: No host can be reached, or all refuse.
        Terminal: A secret or a certificate cannot be read, or the data centre does not exist.
    """
    cluster = Cluster(
        settings.hosts,
        protocol_version=_PROTOCOL,
        execution_profiles={EXEC_PROFILE_DEFAULT: _profile(settings)},
        auth_provider=_login(settings),
        ssl_context=_ssl_context(settings.tls) if settings.tls else None,
        connect_timeout=settings.connect_timeout,
        control_connection_timeout=settings.timeout,
        # If packets are dropped, a connection fails after ten seconds instead of a minute.
        idle_heartbeat_interval=_HEARTBEAT,
        idle_heartbeat_timeout=_HEARTBEAT,
        # The default policy gives up after 64 attempts and waits up to ten minutes between them.
        reconnection_policy=ExponentialReconnectionPolicy(0.2, 2.0, max_attempts=None),
        # Without it a conditional batch of several kilobytes waits 40 ms for an acknowledgement.
        sockopts=[(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)],
    )
    try:
        session = cluster.connect()
    except BaseException as error:
        disconnect(cluster)
        if isinstance(error, NoHostAvailable):
            _check_datacentre(cluster, settings)
        raise
    # The server's clock and ballots order writes, never this machine's clock.
    session.use_client_timestamp = False
    return cluster, session


def disconnect(cluster: Any) -> None:
    """Close all connections of `cluster` without waiting: a reconnection in progress may take seconds to fail."""
    threading.Thread(target=cluster.shutdown, name="headwater-cassandra-close", daemon=True).start()


def forget(cluster: Any) -> None:
    """Stop the driver from cleaning up the parent's connections in a forked child.

    The driver would clean them up when the child connects or ends. The cleanup takes locks that a thread of the
    parent may have held during the fork, and wakes the parent's event loop.
    """
    from cassandra import cluster as driver

    driver._discard_cluster_shutdown(cluster)
    try:
        from cassandra.io import libevreactor as libev
    except (ImportError, DependencyException):
        return
    if libev._global_loop is not None and libev._global_loop._pid != os.getpid():
        _inherited.append(libev._global_loop)
        libev._global_loop = None


_inherited: list[Any] = []  # referenced, because libev would otherwise end the loop shared with the parent


def _profile(settings: CassandraSettings) -> Any:
    return ExecutionProfile(
        load_balancing_policy=TokenAwarePolicy(DCAwareRoundRobinPolicy(settings.dc)),
        # A repeated write may overwrite a newer one, so the store reads back before it repeats a write.
        retry_policy=FallthroughRetryPolicy(),
        speculative_execution_policy=NoSpeculativeExecutionPolicy(),
        consistency_level=ConsistencyLevel.name_to_value[settings.consistency.upper()],
        serial_consistency_level=serial_level(settings),
        request_timeout=settings.timeout,
        row_factory=tuple_factory,
    )


def _check_datacentre(cluster: Any, settings: CassandraSettings) -> None:
    """Refuse a data centre that does not exist: the driver would find the cluster, but no host to send requests to."""
    known = {host.datacenter for host in cluster.metadata.all_hosts() if host.datacenter}
    if settings.dc and known and settings.dc not in known:
        raise Terminal(
            f"{settings.place} has no data centre with the name given in the option dc",
            f"Set ?dc= to one of {', '.join(sorted(known))}",
        )


def serial_level(settings: CassandraSettings) -> int:
    """The driver's constant for the serial consistency."""
    return int(ConsistencyLevel.name_to_value[settings.serial_consistency.upper()])


def _login(settings: CassandraSettings) -> Any:
    if not settings.username:
        return None
    if settings.password is None:
        raise Terminal(
            f"{settings.place}: a user without a password",
            "Add ?password_file=/run/secrets/x or ?password_env=X to the URL",
        )
    return PlainTextAuthProvider(settings.username, settings.password.read())


def _ssl_context(tls: Tls) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=str(tls.authority) if tls.authority else None)
        context.check_hostname = tls.check_hostname
        if tls.certificate:
            password = tls.key_password.read() if tls.key_password else None
            context.load_cert_chain(tls.certificate, tls.key, password)
    except (OSError, ssl.SSLError) as error:
        # The error names no file; this text names the files without quoting them.
        files = ", ".join(str(path) for path in (tls.authority, tls.certificate, tls.key) if path)
        reason = getattr(error, "reason", None) or error.strerror or type(error).__name__
        raise Terminal(
            f"TLS cannot be set up from {files}: {reason}", "Use PEM files, and give the password of the key"
        ) from error
    return context
