"""Servers, and how to find the server that stores a key. Nothing here sends a command twice."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from typing import Any, Final, Protocol

import hiredis
from redis import exceptions as redis
from redis.backoff import NoBackoff
from redis.connection import Connection, ConnectionPool, SSLConnection, UnixDomainSocketConnection
from redis.crc import key_slot
from redis.retry import Retry
from redis.sentinel import Sentinel

from persistence.credentials import Secret
from persistence.redis.settings import Endpoint, RedisSettings

Command = Sequence[Any]
Read = Callable[[Any], Any]
_AHEAD: Final = 16
"""Commands sent before the answer to the first of them is read: the server executes while the client packs and reads."""
LOST = (redis.ConnectionError, redis.TimeoutError, redis.InvalidResponse, OSError)
"""After one of these errors it is unknown whether a command took effect."""


class Server:
    """One server, with a pool of connections. Safe for threads and across forks."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool

    def exchange(self, commands: Iterable[Command], reads: Iterable[Read | None] = ()) -> list[Any]:
        """Send commands over one connection, without waiting for each answer, and return the answers in order.

        An error reply is returned in place of the answer.

        Args:
            commands: The commands; each is made when it is sent.
            reads: For the first commands a function of the answer whose result is returned; None for the answer.

        Raises:
            redis.ConnectionError: The connection, or an answer, was lost.
            redis.TimeoutError: An answer took too long.
            redis.InvalidResponse: What came is no answer of Redis.
            OSError: The connection was lost.
        """
        answers: list[Any] = []
        with self.conversation() as talk:
            waiting = deque[Read | None]()
            for command, read in zip(commands, chain(reads, repeat(None)), strict=False):
                if len(waiting) == _AHEAD:
                    answers.append(_answer(talk, waiting.popleft()))
                talk.send(command)
                waiting.append(read)
            answers += [_answer(talk, read) for read in waiting]
        return answers

    @contextmanager
    def conversation(self) -> Iterator["Conversation"]:
        """Use one connection. If the block raises, the connection is closed: answers may still arrive."""
        connection: Any = self._pool.get_connection()
        complete = False
        try:
            yield Conversation(connection)
            complete = True
        finally:
            if not complete:
                connection.disconnect()
            self._pool.release(connection)

    def close(self) -> None:
        """Close the connections that no thread is using."""
        self._pool.disconnect(inuse_connections=False)


class Conversation:
    """Commands and answers over one connection, in order."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def send(self, *commands: Command) -> None:
        """Send commands."""
        # redis-py's own serializer first looks at every argument in Python, which takes longer than all else.
        self._connection.send_packed_command([hiredis.pack_command(tuple(command)) for command in commands])

    def read(self) -> Any:
        """The next answer.

        Raises:
            redis.ResponseError: It is an error.
        """
        return self._connection.read_response()


def _answer(talk: Conversation, read: Read | None) -> Any:
    try:
        answer = talk.read()
    except redis.ResponseError as error:
        return error
    return answer if read is None else read(answer)


class Nodes(Protocol):
    """All servers of one store."""

    def of(self, key: bytes) -> Server:
        """The server that stores a key."""
        ...

    def primaries(self) -> list[Server]:
        """Every server that may be written to."""
        ...

    def forget(self) -> None:
        """Locate the servers again before the next use, because something has moved or failed."""
        ...

    def close(self) -> None:
        """Close all connections."""
        ...


class Single:
    """One server, or the primary that the sentinels report when a connection is opened."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._node = Server(pool)

    def of(self, key: bytes) -> Server:
        return self._node

    def primaries(self) -> list[Server]:
        return [self._node]

    def forget(self) -> None:
        """Drop the connections; the next one asks the sentinels again."""
        self._node.close()

    def close(self) -> None:
        self._node.close()


class Cluster:
    """The primaries of a cluster by slot, from the `CLUSTER SLOTS` of any node."""

    def __init__(self, place: Endpoint, settings: RedisSettings) -> None:
        self._place = place
        self._settings = settings
        self._lock = threading.Lock()
        self._nodes: dict[tuple[str, int], Server] = {}
        self._slots: list[Server | None] = []

    def of(self, key: bytes) -> Server:
        node = self._known()[key_slot(key)]
        if node is None:
            raise redis.ClusterDownError("a slot is not served")
        return node

    def primaries(self) -> list[Server]:
        return list(dict.fromkeys(node for node in self._known() if node is not None))

    def forget(self) -> None:
        self._slots = []

    def close(self) -> None:
        for node in list(self._nodes.values()):
            node.close()

    def _known(self) -> list[Server | None]:
        with self._lock:
            if not self._slots:
                self._slots = self._ask()
            return self._slots

    def _ask(self) -> list[Server | None]:
        failure: Exception = redis.ConnectionError("no node of the cluster answers")
        for host, port in dict.fromkeys((*self._place.hosts, *self._nodes)):
            try:
                (answer,) = self._node(host, port).exchange([("CLUSTER", "SLOTS")])
            except LOST as error:
                failure = error
                continue
            if isinstance(answer, Exception):
                failure = answer
                continue
            return self._map(answer, host)
        raise failure

    def _map(self, ranges: Iterable[Any], asked: str) -> list[Server | None]:
        slots: list[Server | None] = [None] * 16384
        for low, high, primary, *_ in ranges:
            # A node that does not know its own address leaves it empty; this is the node that answered.
            node = self._node(primary[0].decode() if primary[0] else asked, int(primary[1]))
            slots[low : high + 1] = [node] * (high + 1 - low)
        return slots

    def _node(self, host: str, port: int) -> Server:
        if (host, port) not in self._nodes:
            self._nodes[host, port] = Server(_pool(self._place, self._settings, host, port))
        return self._nodes[host, port]


def connect(place: Endpoint, settings: RedisSettings) -> Nodes:
    """Return the servers of an endpoint. Nothing is sent yet."""
    if place.kind == "cluster":
        return Cluster(place, settings)
    if place.kind == "single":
        return Single(_pool(place, settings, *(place.hosts[0] if place.hosts else ("", 0))))
    client = dict(settings.client)
    asking = {
        "username": client.pop("sentinel_username", None),
        "password": _read_secret(settings.sentinel_password, client.pop("sentinel_password", None)),
        "ssl": place.tls,
        **_common(settings),
        **client,
    }
    sentinel: Any = Sentinel(list(place.hosts), sentinel_kwargs=asking)  # type: ignore[no-untyped-call]
    primary = sentinel.master_for(
        place.service,
        db=place.db,
        username=place.username,
        password=_read_secret(settings.password, place.password),
        ssl=place.tls,
        **_common(settings),
        **client,
    )
    return Single(primary.connection_pool)


def _pool(place: Endpoint, settings: RedisSettings, host: str, port: int) -> ConnectionPool:
    kind = UnixDomainSocketConnection if place.socket else SSLConnection if place.tls else Connection
    where = {"path": place.socket} if place.socket else {"host": host, "port": port}
    return ConnectionPool(
        connection_class=kind,
        db=place.db,
        username=place.username,
        password=_read_secret(settings.password, place.password),
        **where,
        **_common(settings),
        **{name: value for name, value in settings.client if not name.startswith("sentinel_")},
    )


def _read_secret(kept: Secret | None, written: str | None) -> str | None:
    return kept.read() if kept else written


def _common(settings: RedisSettings) -> dict[str, Any]:
    return {
        "socket_timeout": settings.timeout,
        "socket_connect_timeout": settings.connect_timeout,
        # By default redis-py retries commands by itself, which has executed a command twice.
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }
