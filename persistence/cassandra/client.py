"""A handle's connections: one session and one set of prepared statements per process, opened on first use."""

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import stamina

from persistence.cassandra.driver import DRIVER_ERRORS, connect, disconnect, forget, serial_level
from persistence.cassandra.errors import translate
from persistence.cassandra.settings import CassandraSettings
from persistence.cassandra.statements import Statements
from persistence.errors import Conflict, Corrupt, Fenced, StoreError, Terminal, Transient
from persistence.names import FlowRef, StageRef

T = TypeVar("T")
Row = tuple[Any, ...]
Ref = FlowRef | StageRef | None

_PAGE_ROWS: Final = 100
_PAGE_BYTES: Final = 4 << 20
"""Target size of a page, estimated from the largest state of the previous page."""

_SEVERITY: Final = (Fenced, Corrupt, Terminal, Transient, Conflict)
"""Order of severity: if several tasks fail, the call raises the most severe error."""


@dataclass(frozen=True, slots=True)
class Live:
    """Open connections of a process."""

    cluster: Any
    session: Any
    statements: Statements
    pool: ThreadPoolExecutor


class Client:
    """Executes statements for one handle. Safe for threads and across forks."""

    def __init__(self, settings: CassandraSettings) -> None:
        self.settings = settings
        self._serial = serial_level(settings)
        self._live: Live | None = None
        self._set_lock()
        self._retrying = stamina.RetryingCaller(
            attempts=None, timeout=settings.retry_for, wait_initial=0.05, wait_max=2.0, wait_jitter=0.1
        ).on(Transient)
        _clients.add(self)

    def _set_lock(self) -> None:
        self._connecting = threading.Lock()

    def retried(self, action: Callable[[], T]) -> T:
        """Call `action`, and retry it for `retry_for` seconds while it raises `Transient`.

        For reads, and for transactions that are safe to run twice.
        """
        return self._retrying(action)

    def live(self, ref: Ref) -> Live:
        """The open connections; connects if there are none, with the retries of `retried`.

        Raises:
            Transient: No host can be reached.
            Terminal: The keyspace or its tables are missing, or the login was refused.
        """
        if (live := self._live) is not None:
            return live
        with self._connecting:
            # Another thread may have connected while this one waited.
            live = self._live or self.retried(lambda: self._connect(ref))
            self._live = live
            return live

    def rows(self, ref: Ref, statement: Any, *, serial: bool = False) -> list[Row]:
        """Execute a bound statement or a batch once, and return its rows (the first page of them).

        Args:
            ref: Flow or stage concerned, for errors.
            statement: A statement from `Statements`.
            serial: Read at the serial consistency, which first completes a transaction in progress.
        """
        return self._execute(ref, statement, None, serial=serial)[0]

    def applied(self, ref: Ref, statement: Any) -> tuple[bool, dict[str, Any]]:
        """Execute a transaction once; return whether it took effect, and the columns of the first row returned."""
        live = self.live(ref)
        try:
            result = live.session.execute(statement)
            return bool(result.current_rows[0][0]), dict(zip(result.column_names, result.current_rows[0], strict=True))
        except DRIVER_ERRORS as error:
            raise translate(error, self.settings.place, ref) from error

    def pages(
        self, ref: Ref, statement: Any, size: Callable[[Row], int], *, serial: bool = False
    ) -> Iterator[list[Row]]:
        """Execute a read and yield its pages, each with the retries of `retried`.

        Args:
            ref: Flow or stage concerned, for errors.
            statement: A statement from `Statements`.
            size: Returns the bytes of a row, to limit the size of the next page.
            serial: As in `rows`.
        """
        state: bytes | None = None
        statement.fetch_size = _PAGE_ROWS
        while True:
            page, state = self.retried(lambda: self._execute(ref, statement, state, serial=serial))  # noqa: B023
            yield page
            if not state:
                return
            largest = max((size(row) for row in page), default=1)
            statement.fetch_size = min(max(_PAGE_BYTES // max(largest, 1), 1), 10 * _PAGE_ROWS)

    def together(self, ref: Ref, tasks: Sequence[Callable[[], T]]) -> list[T]:
        """Run tasks in parallel and return their results in order.

        When this method returns or raises, all tasks have ended, so nothing is written later.

        Raises:
            StoreError: The most severe error of the tasks.
        """
        if len(tasks) == 1:
            return [tasks[0]()]
        pool = self.live(ref).pool
        futures: list[Future[T]] = []
        try:
            futures.extend(pool.submit(task) for task in tasks)
            wait(futures, return_when=FIRST_EXCEPTION)
        except RuntimeError as error:  # the pool is shut down
            raise Transient("the store was closed by another thread", ref=ref) from error
        finally:
            for future in futures:
                future.cancel()
            wait(futures)
        failures = [failure for future in futures if not future.cancelled() and (failure := future.exception())]
        if failures:
            raise min(failures, key=_rank)
        return [future.result() for future in futures]

    def close(self) -> None:
        """Close the connections; the next use opens new ones."""
        live, self._live = self._live, None  # without the lock: a thread that has it may wait for the network
        if live is not None:
            live.pool.shutdown(wait=False, cancel_futures=True)
            disconnect(live.cluster)

    def forked(self) -> None:
        """Forget the parent's connections in a child process."""
        self._set_lock()
        if self._live is not None:
            forget(self._live.cluster)
            _inherited.append(self._live)
            self._live = None

    def _execute(
        self, ref: Ref, statement: Any, paging_state: bytes | None, *, serial: bool
    ) -> tuple[list[Row], bytes | None]:
        live = self.live(ref)
        if serial:
            statement.consistency_level = self._serial
        try:
            result = live.session.execute(statement, paging_state=paging_state)
            return list(result.current_rows), result.paging_state
        except DRIVER_ERRORS as error:
            raise translate(error, self.settings.place, ref) from error

    def _connect(self, ref: Ref) -> Live:
        cluster = None
        try:
            cluster, session = connect(self.settings)
            statements = Statements(session, self.settings.keyspace)
        except (*DRIVER_ERRORS, StoreError) as error:
            if cluster is not None:
                disconnect(cluster)
            raise translate(error, self.settings.place, ref) from error
        pool = ThreadPoolExecutor(self.settings.concurrency, thread_name_prefix="headwater-cassandra")
        return Live(cluster, session, statements, pool)


def _rank(error: BaseException) -> int:
    return next((rank for rank, kind in enumerate(_SEVERITY) if isinstance(error, kind)), -1)


_clients: weakref.WeakSet[Client] = weakref.WeakSet()
_inherited: list[Live] = []  # referenced, because the driver closes connections that are garbage collected


def _after_fork_in_child() -> None:
    for client in list(_clients):
        client.forked()


os.register_at_fork(after_in_child=_after_fork_in_child)
