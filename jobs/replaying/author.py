"""Who changes the pointer of a flow, and why."""

import getpass
import os
import socket
import time
from dataclasses import dataclass

from persistence.pointer import Change


@dataclass(frozen=True, slots=True)
class Author:
    """Who changes the pointer, and why.

    Attributes:
        by: User and host.
        why: The reason that was given.
        worker: The process, as HOST/PID.
    """

    by: str
    why: str
    worker: str

    @classmethod
    def here(cls, why: str) -> "Author":
        """This process and its user."""
        host = socket.gethostname()
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # in a container the user may have a number only
            user = str(os.getuid())
        return cls(f"{user}@{host}", why, f"{host}/{os.getpid()}")

    def change(self, what: str, generation: int) -> Change:
        """A change that is made now."""
        return Change(time.time_ns() // 1_000_000, self.by, what, generation, self.why)

    def may_follow(self, worker: str) -> bool:
        """Whether a process has ended for certain, so that this one may continue its work."""
        host, _, pid = worker.rpartition("/")
        if host != self.worker.rpartition("/")[0]:
            return False
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            return True
        except (PermissionError, ValueError):
            return False
        return False
