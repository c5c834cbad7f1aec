"""A TCP proxy that breaks connections at chosen points: before or after a server receives a request."""

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum

_CHUNK = 1 << 16


class Fault(Enum):
    """What happens to the connection of a chosen request. Other connections are not affected."""

    CUT_BEFORE = "the request is dropped and the connection reset: the server never gets all of it"
    CUT_AFTER = "the request is passed on; instead of the next answer the connection is reset"
    HOLD_BEFORE = "the request, and what follows on its connection, waits until `release`"
    HOLD_AFTER = "the request is passed on, its answer waits until `release`"
    HALF_CLOSE = "the request is passed on, and the connection to the client is half closed: no answer follows"


BREAKING = [Fault.CUT_BEFORE, Fault.CUT_AFTER, Fault.HALF_CLOSE]
"""Faults after which the connection is unusable."""


class Proxy:
    """Passes bytes between clients and one server.

    Attributes:
        port: Where clients connect, on 127.0.0.1.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._armed: list[_Armed] = []
        self._counts: dict[bytes, int] = {}
        self._links: set[_Link] = set()
        self._refusing = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def arm(self, needle: bytes, fault: Fault, *, skip: int = 0) -> threading.Event:
        """Apply `fault` to the next request that contains `needle`, or to the one after `skip` of them.

        Returns:
            An event that is set when the fault was applied.
        """
        armed = _Armed(needle, fault, skip)
        with self._lock:
            self._armed.append(armed)
        return armed.met

    def watch(self, needle: bytes) -> None:
        """Count how often `needle` is sent to the server from now on."""
        with self._lock:
            self._counts[needle] = 0

    def sent(self, needle: bytes) -> int:
        """How often a watched `needle` was sent to the server."""
        return self._counts[needle]

    def release(self) -> None:
        """Release the bytes held by `HOLD_BEFORE` and `HOLD_AFTER`."""
        for link in self._open_links():
            link.requests_free.set()
            link.answers_free.set()

    def cut(self) -> None:
        """Reset every open connection."""
        for link in self._open_links():
            link.reset()

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Reset every connection, and each new one immediately, while the block runs."""
        self._refusing = True
        try:
            self.cut()
            yield
        finally:
            self._refusing = False

    def close(self) -> None:
        """Close the proxy and all its connections."""
        self._refusing = True
        self._listener.close()
        self.cut()

    def _open_links(self) -> list["_Link"]:
        with self._lock:
            return list(self._links)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                if self._refusing:
                    raise ConnectionRefusedError
                link = _Link(self, client, socket.create_connection(self._target))
            except OSError:
                # A reset, as a server that is not there resets each attempt to connect.
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.close()
                continue
            with self._lock:
                self._links.add(link)
            for pump in (link.pass_requests, link.pass_answers):
                threading.Thread(target=pump, daemon=True).start()

    def forget(self, link: "_Link") -> None:
        """Called by a connection that has ended."""
        with self._lock:
            self._links.discard(link)

    def judge(self, tail: bytes, data: bytes) -> Fault | None:
        """The fault to apply to `data`, which follows `tail`."""
        both = tail + data  # a needle may be split between them
        with self._lock:
            for armed in self._armed:
                if armed.needle in both and armed.needle not in tail:
                    if armed.skip:
                        armed.skip -= 1
                        continue
                    self._armed.remove(armed)
                    armed.met.set()
                    if armed.fault is Fault.CUT_BEFORE:
                        return armed.fault
                    break
            else:
                armed = None
            for needle in self._counts:
                self._counts[needle] += both.count(needle) - tail.count(needle)
            return armed.fault if armed else None


class _Armed:
    def __init__(self, needle: bytes, fault: Fault, skip: int) -> None:
        self.needle, self.fault, self.skip = needle, fault, skip
        self.met = threading.Event()


class _Link:
    """One connection of a client, and its counterpart to the server."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy, self._client, self._server = proxy, client, server
        self.requests_free, self.answers_free = threading.Event(), threading.Event()
        self.requests_free.set()
        self.answers_free.set()
        self._muted = False
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def pass_requests(self) -> None:
        """Bytes from the client to the server."""
        tail = b""
        with suppress(OSError):
            while data := self._client.recv(_CHUNK):
                fault = self._proxy.judge(tail, data)
                tail = (tail + data)[-64:]
                if fault is Fault.CUT_BEFORE:
                    break
                self._prepare(fault)
                self.requests_free.wait()
                self._server.sendall(data)
                if fault is Fault.HALF_CLOSE:
                    self._client.shutdown(socket.SHUT_WR)
        self.reset()

    def pass_answers(self) -> None:
        """Bytes from the server to the client."""
        with suppress(OSError):
            while data := self._server.recv(_CHUNK):
                self.answers_free.wait()
                if self._muted:
                    break
                self._client.sendall(data)
        self.reset()

    def reset(self) -> None:
        """End both connections."""
        self._proxy.forget(self)
        self.requests_free.set()
        self.answers_free.set()
        for end in (self._client, self._server):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _prepare(self, fault: Fault | None) -> None:
        if fault is Fault.HOLD_BEFORE:
            self.requests_free.clear()
        elif fault is Fault.HOLD_AFTER:
            self.answers_free.clear()
        elif fault in (Fault.CUT_AFTER, Fault.HALF_CLOSE):
            self._muted = True
