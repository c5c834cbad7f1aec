"""Redis servers for single tests: started on a free port with their own directory, ended by their process id."""

import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import hiredis
import redis

from jobs.stack.redis import _program
from persistence.murmur2 import murmur2

DURABLE = ("--appendonly", "yes", "--appendfsync", "always", "--save", "")


class Server:
    """One server process. `url` reaches it, `client` asks it."""

    def __init__(self, *options, configuration=None):
        self.port = free_port()
        self.directory = Path(tempfile.mkdtemp(prefix="headwater-redis-"))
        # A configuration file comes first on the command line; a sentinel needs one that it can write.
        self.options = ([configuration] if configuration else []), options
        self.url = f"redis://127.0.0.1:{self.port}"
        self.client = redis.Redis(port=self.port, protocol=2)
        self.start()

    def start(self):
        configuration, options = self.options
        self.process = subprocess.Popen(
            [
                _program(),
                *configuration,
                *("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.directory), "--daemonize", "no"),
                *options,
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until(self._answers)

    def _answers(self):
        try:
            return self.client.ping()
        except redis.RedisError:
            return False

    def signal(self, number):
        self.process.send_signal(number)

    def kill(self):
        self.signal(signal.SIGKILL)
        self.process.wait()

    def close(self):
        self.client.close()
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)


@contextmanager
def server(*options, configuration=None):
    running = Server(*options, configuration=configuration)
    try:
        yield running
    finally:
        running.close()


@contextmanager
def cluster(masters=3):
    """A cluster of masters without replicas."""
    nodes = [Server(*DURABLE, "--cluster-enabled", "yes", "--cluster-node-timeout", "2000") for _ in range(masters)]
    try:
        share = 16384 // masters
        for i, node in enumerate(nodes):
            last = 16383 if i == masters - 1 else (i + 1) * share - 1
            node.client.execute_command("CLUSTER", "ADDSLOTSRANGE", i * share, last)
            node.client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", i + 1)
            node.client.execute_command("CLUSTER", "MEET", "127.0.0.1", nodes[0].port)
        for node in nodes:
            until(lambda node=node: node.client.execute_command("CLUSTER INFO")["cluster_state"] == "ok")
            until(lambda node=node: len(node.client.execute_command("CLUSTER SLOTS")) >= masters)
        yield nodes
    finally:
        for node in nodes:
            node.close()


def until(condition, seconds=20):
    """Wait until a condition of the server holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the server did not get there in time"
        time.sleep(0.02)


def states_name(stage, bucket=0):
    """Name of the hash of a stage's states in a bucket."""
    return b"hw:{%b:1:%d}:%b" % (stage.flow.encode(), bucket, stage.stage.encode())


def value_in(client, stage, key=b"k"):
    """The value of a state, without its head, of a flow with four buckets."""
    return client.hget(states_name(stage, murmur2(key) % 4), key).split(b" ", 3)[3]


def free_port():
    """A free port whose cluster bus port, 10,000 higher, is free as well."""
    while True:
        with socket.socket() as probe, socket.socket() as bus, suppress(OSError):
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
            if port < 55_000:
                bus.bind(("127.0.0.1", port + 10_000))
                return port


@contextmanager
def encrypted(server, directory):
    """A TLS port for a server, with a new certificate: yields the port and the CA file."""
    key, certificate = str(directory / "key.pem"), str(directory / "cert.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate]
        + ["-days", "1", "-subj", "/CN=headwater", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    def pump(source, target):
        with suppress(OSError, ValueError), source, target:
            while data := source.recv(1 << 16):
                target.sendall(data)

    def accept():
        with suppress(OSError):
            while True:
                plain, _ = listener.accept()
                try:
                    client = context.wrap_socket(plain, server_side=True)
                except OSError:  # the client does not trust it
                    continue
                upstream = socket.create_connection(("127.0.0.1", server.port))
                threading.Thread(target=pump, args=(client, upstream), daemon=True).start()
                threading.Thread(target=pump, args=(upstream, client), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1], certificate


class Answering:
    """A proxy of a server that answers some scripts itself, with an error.

    Attributes:
        url: Its URL.
        refused: Number of scripts that it has answered.
    """

    def __init__(self, server, error, times):
        self.refused = 0
        self._server, self._error, self._left = server, error, times
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        self._listener.close()

    def _accept(self):
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client):
        requests = hiredis.Reader()
        server = socket.create_connection(("127.0.0.1", self._server.port))
        with suppress(OSError), client, server:
            while data := client.recv(1 << 16):
                requests.feed(data)
                while command := requests.gets():
                    client.sendall(self._answer(command, server))

    def _answer(self, command, server):
        if command[0] == b"EVALSHA" and self._left:
            self._left -= 1
            self.refused += 1
            return b"-" + self._error.encode() + b"\r\n"
        server.sendall(hiredis.pack_command(tuple(command)))
        answers, raw = hiredis.Reader(), b""
        while answers.gets() is False:
            answers.feed(data := server.recv(1 << 16))
            raw += data
        return raw
