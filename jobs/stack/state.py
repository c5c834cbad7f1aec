"""The servers that were started, stored in a file, and which of them still run."""

import json
import os
import re
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Self

from jobs.stack import process

_FILE: Final = "stack.json"


class StackError(RuntimeError):
    """A server could not be started, reached or stopped; the text names the remedy."""


def unusable(root: Path, error: OSError) -> StackError:
    """The error of a stack's directory that cannot be read or written: a full disk, or missing rights."""
    what = f" ({error.filename})" if error.filename else ""
    return StackError(
        f"the stack's directory {root} cannot be used: {error.strerror}{what}. Make room there, give this user the right "
        "to read and write it, or choose another directory with --root"
    )


@dataclass(frozen=True, slots=True)
class ServerState:
    """One server that was started.

    Attributes:
        name: `kafka`, `redis` or `cassandra`.
        pid: Its process.
        started: When that process began, as the system reports it; a reused pid has another value.
        address: Its address for clients: `host:port` for Kafka, a URL for others.
        log: File with its output.
    """

    name: str
    pid: int
    started: str
    address: str
    log: str

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return process.start_of(self.pid) == self.started


@dataclass(frozen=True, slots=True)
class StackState:
    """The servers of one stack, stored as JSON in its root directory."""

    root: Path
    servers: tuple[ServerState, ...] = ()

    @classmethod
    def load(cls, root: Path) -> Self:
        """Return the running servers of `root`; none if the file is missing.

        Raises:
            StackError: The file is damaged or cannot be read.
        """
        path = root / _FILE
        try:
            text = path.read_text(errors="replace")
        except FileNotFoundError:
            return cls(root)
        except OSError as error:
            raise unusable(root, error) from error
        try:
            servers = tuple(ServerState(**server) for server in json.loads(text)["servers"])
        except (ValueError, KeyError, TypeError) as error:
            pids = [pid for pid in re.findall(r'"pid": (\d+)\b', text) if process.start_of(int(pid))]
            which = (
                f"processes {', '.join(pids)} may be its servers"
                if pids
                else f"`pgrep -af {shlex.quote(str(root))}` shows its servers"
            )
            raise StackError(
                f"{path} is damaged, so it does not say which servers run: {which}. End them (kill PID), delete the file, "
                "and run `headwater stack up` again; their data stays"
            ) from error
        return cls(root, tuple(server for server in servers if server.alive))

    def save(self) -> None:
        """Replace the file in one step; delete it if no server runs, which works on a full disk too."""
        if not self.servers:
            (self.root / _FILE).unlink(missing_ok=True)
            return
        draft = self.root / f".{_FILE}.{os.getpid()}"
        try:
            draft.write_text(json.dumps({"servers": [asdict(server) for server in self.servers]}, indent=2) + "\n")
            draft.replace(self.root / _FILE)
        finally:
            draft.unlink(missing_ok=True)

    def having(self, server: ServerState) -> Self:
        """Return this state with `server` added."""
        return type(self)(self.root, (*(other for other in self.servers if other.name != server.name), server))

    def find(self, name: str) -> ServerState | None:
        """Return the server of a name if it runs."""
        return next((server for server in self.servers if server.name == name), None)

    @property
    def kafka(self) -> str:
        """Kafka's bootstrap address, `host:port`."""
        return self._address("kafka")

    @property
    def redis(self) -> str:
        """`redis://host:port`, without a database number."""
        return self._address("redis")

    @property
    def cassandra(self) -> str:
        """`cassandra://host:port`, without a keyspace."""
        return self._address("cassandra")

    def _address(self, name: str) -> str:
        server = self.find(name)
        if server is None:
            raise StackError(f"no {name} runs in {self.root}: start it with `headwater stack up`")
        return server.address
