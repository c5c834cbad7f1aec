"""Converts errors of Redis and redis-py to store errors.

A reply's text may quote arguments of the command, so only its code is passed on.
"""

import re
from dataclasses import dataclass

from redis import exceptions as redis

from persistence.errors import Corrupt, StoreError, Terminal, Transient


@dataclass(frozen=True, slots=True)
class Meaning:
    """What an error stands for.

    Attributes:
        what: What happened.
        remedy: What to do.
        kind: The store error it becomes when trying again did not help.
        again: Trying again may help. The scripts decide on what they find, so it does no harm
            even where the first try took effect.
    """

    what: str
    remedy: str
    kind: type[StoreError] = Transient
    again: bool = True

    def error(self, url: str) -> StoreError:
        """The store error; `url` is the store's, without secrets."""
        return self.kind(f"{self.what} ({url})", self.remedy)


_LOST = Meaning(
    "the server cannot be reached, or its answer did not come in time",
    "Check that it runs, the URL and the network; raise the options timeout and retry_for if it is slow",
)
_UNTRUSTED = Meaning(
    "the server's certificate is not trusted",
    "Name the authority that signed it with ssl_ca_certs, and the server as the certificate names it",
    Terminal,
    again=False,
)
_NO_DATABASE = Meaning(
    "the server does not have the database that the URL names",
    "Correct the number at the end of the URL, or leave it out",
    Terminal,
    again=False,
)
_WAITS = "It ends by itself; raise the option retry_for if it takes longer"

_CODES = {
    "LOADING": Meaning("the server is still reading its data (LOADING)", _WAITS),
    "READONLY": Meaning(
        "the server is a replica (READONLY)", "Name the primary, or use redis+sentinel:// or redis+cluster://"
    ),
    "OOM": Meaning(
        "the server has no memory left (OOM)",
        "Raise maxmemory or move other data away, then start the flow again",
        Terminal,
    ),
    "MISCONF": Meaning(
        "the server cannot write to its disk and refuses writes (MISCONF)",
        "Look at the server's log and disk, then start the flow again",
        Terminal,
    ),
    "MOVED": Meaning("the cluster is moving slots (MOVED)", _WAITS),
    "ASK": Meaning("the cluster is moving slots (ASK)", _WAITS),
    "TRYAGAIN": Meaning("the cluster is moving slots (TRYAGAIN)", _WAITS),
    "CLUSTERDOWN": Meaning("the cluster does not serve all slots (CLUSTERDOWN)", "Look at `redis-cli cluster info`"),
    "MASTERDOWN": Meaning("the replica has lost its primary (MASTERDOWN)", "Look at the primary"),
    "NOREPLICAS": Meaning("too few replicas are connected (NOREPLICAS)", "Look at min-replicas-to-write and replicas"),
    "BUSY": Meaning("the server is busy with a script (BUSY)", _WAITS),
    "NOSCRIPT": Meaning(
        "the server forgets its scripts (NOSCRIPT)", "Something runs SCRIPT FLUSH all the time: end it"
    ),
    "NOAUTH": Meaning("the server wants a password", "Put user and password into the URL", Terminal, again=False),
    "WRONGPASS": Meaning("user or password is wrong", "Correct the URL", Terminal, again=False),
    "NOPERM": Meaning(
        "the user may not run a command or touch a key (NOPERM)",
        "Grant it +@read +@write +@scripting +info +config|get on the prefix's keys",
        Terminal,
        again=False,
    ),
    "CROSSSLOT": Meaning(
        "the server is part of a cluster", "Use redis+cluster:// instead of redis://", Terminal, again=False
    ),
    "WRONGTYPE": Meaning(
        "a key is of another type: another program has written it",
        "Delete it if it is not of headwater, or choose another prefix",
        Corrupt,
        again=False,
    ),
}

# From inside a script, servers before 7.0 wrap the code: "ERR Error running script ...: OOM command not allowed".
_CODE = re.compile(r"\b(" + "|".join(_CODES) + r")\b")

_CLASSES = {
    redis.BusyLoadingError: "LOADING",
    redis.ReadOnlyError: "READONLY",
    redis.OutOfMemoryError: "OOM",
    redis.MovedError: "MOVED",
    redis.AskError: "ASK",
    redis.TryAgainError: "TRYAGAIN",
    redis.MasterDownError: "MASTERDOWN",
    redis.ClusterDownError: "CLUSTERDOWN",
    redis.ClusterCrossSlotError: "CROSSSLOT",
    redis.NoScriptError: "NOSCRIPT",
    redis.NoPermissionError: "NOPERM",
    redis.AuthenticationWrongNumberOfArgsError: "WRONGPASS",
}


def meaning_of(error: Exception) -> Meaning:
    """What `error`, raised by redis-py or by the socket, stands for."""
    if isinstance(error, redis.AuthenticationError):
        return _CODES["NOAUTH" if "Authentication required" in str(error) else "WRONGPASS"]
    if code := _CLASSES.get(type(error)):
        return _CODES[code]
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return _UNTRUSTED
    if isinstance(error, (redis.ConnectionError, redis.TimeoutError, OSError)):
        return _LOST
    if any(text in str(error) for text in ("DB index is out of range", "SELECT is not allowed")):
        return _NO_DATABASE
    if found := _CODE.search(str(error)):
        return _CODES[found[1]]
    code = str(error).partition(" ")[0]
    return Meaning(
        f"the server refused a command ({code if code.isupper() else type(error).__name__})",
        "Redis 6.2 or later, or Valkey, with Lua scripts allowed is needed; see the server's log",
        Terminal,
        again=False,
    )
