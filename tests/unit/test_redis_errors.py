import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import hiredis
import pytest
from redis import exceptions as redis
from redis._parsers.base import BaseParser

from persistence.errors import Corrupt, Terminal, Transient
from persistence.names import FlowRef
from persistence.redis import open_store
from persistence.redis.errors import meaning_of

SCRIPT = "script: 5f2b, on @user_script:12."


@pytest.mark.parametrize(
    ("answer", "kind", "again", "says"),
    [
        ("LOADING Redis is loading the dataset in memory", Transient, True, "LOADING"),
        ("READONLY You can't write against a read only replica.", Transient, True, "replica"),
        (f"READONLY You can't write against a read only replica. {SCRIPT}", Transient, True, "replica"),
        ("OOM command not allowed when used memory > 'maxmemory'.", Terminal, True, "maxmemory"),
        (f"OOM command not allowed when used memory > 'maxmemory'. {SCRIPT}", Terminal, True, "maxmemory"),
        ("ERR Error running script (call to f_5f2b): @user_script:12: OOM command not allowed", Terminal, True, "OOM"),
        ("MISCONF Errors writing to the AOF file: No space left on device", Terminal, True, "disk"),
        ("MOVED 3999 127.0.0.1:6381", Transient, True, "moving slots"),
        ("ASK 3999 127.0.0.1:6381", Transient, True, "moving slots"),
        ("TRYAGAIN Multiple keys request during rehashing of slot", Transient, True, "moving slots"),
        ("CLUSTERDOWN Hash slot not served", Transient, True, "cluster"),
        ("MASTERDOWN Link with MASTER is down", Transient, True, "primary"),
        ("NOREPLICAS Not enough good replicas to write.", Transient, True, "replicas"),
        ("BUSY Redis is busy running a script.", Transient, True, "script"),
        ("NOSCRIPT No matching script.", Transient, True, "SCRIPT FLUSH"),
        ("NOAUTH Authentication required.", Terminal, False, "password"),
        ("WRONGPASS invalid username-password pair or user is disabled.", Terminal, False, "wrong"),
        ("NOPERM this user has no permissions to run the 'evalsha' command", Terminal, False, "Grant"),
        ("CROSSSLOT Keys in request don't hash to the same slot", Terminal, False, "redis+cluster://"),
        (f"WRONGTYPE Operation against a key holding the wrong kind of value {SCRIPT}", Corrupt, False, "another type"),
        ("ERR This instance has cluster support disabled", Terminal, False, "redis:// instead of redis+cluster://"),
        ("ERR unknown command 'SENTINEL', with args beginning with: 'x'", Terminal, False, "not a sentinel"),
        ("ERR unknown command 'EVALSHA', with args beginning with: 'payload'", Terminal, False, "Lua"),
    ],
)
def test_what_a_server_answers_becomes_an_error_with_a_remedy(answer, kind, again, says):
    meaning = meaning_of(BaseParser.parse_error(answer))
    assert (meaning.kind, meaning.again) == (kind, again)
    text = str(meaning.error("redis://h"))
    assert says in text
    assert "(redis://h)" in text
    assert meaning.remedy
    assert "payload" not in text


@pytest.mark.parametrize(
    "error", [redis.ConnectionError("refused"), redis.TimeoutError("late"), ConnectionResetError(), BrokenPipeError()]
)
def test_a_lost_connection_is_transient_and_tried_again(error):
    meaning = meaning_of(error)
    assert (meaning.kind, meaning.again) == (Transient, True)


SILENCE = b""


@contextmanager
def answering(answer: bytes) -> Iterator[int]:
    """A server that gives every command the same answer, or none; returns its port."""

    def serve(client: socket.socket) -> None:
        requests = hiredis.Reader()
        with suppress(OSError), client:
            while data := client.recv(1 << 16):
                requests.feed(data)
                while requests.gets():
                    client.sendall(answer)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=listener.accept()[:1], daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (SILENCE, "did not answer in time"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not speak Redis's protocol"),
        (b"-READONLY You can't write against a read only replica.\r\n", "replica"),
        (b"-OOM command not allowed when used memory > 'maxmemory'.\r\n", "memory"),
        (b"-WRONGPASS invalid username-password pair\r\n", "password is wrong"),
        (b"-ERR DB index is out of range\r\n", "does not have the database"),
        (b"-NOAUTH Authentication required.\r\n", "requires a password"),
    ],
)
def test_an_error_names_the_server_s_url_without_its_password(answer, says):
    timeout = 0.1 if answer == SILENCE else 60  # a late answer on a busy machine is no silence
    with answering(answer) as port:
        store = open_store(f"redis://fleet:hush@127.0.0.1:{port}/3?timeout={timeout}&retry_for=0.1")
        for request in (lambda: store.installed_epoch(FlowRef("fleet")), store.facts):
            with pytest.raises((Transient, Terminal), match=re.escape(f"redis://...@127.0.0.1:{port}/3")) as caught:
                request()
            assert says in str(caught.value)
            assert "hush" not in str(caught.value)
        store.close()


def test_a_server_that_does_not_run_is_named_by_its_url():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    store = open_store(f"redis://127.0.0.1:{port}?retry_for=0.1")
    with pytest.raises(Transient, match=rf"cannot be reached.*redis://127\.0\.0\.1:{port}"):
        store.installed_epoch(FlowRef("fleet"))
