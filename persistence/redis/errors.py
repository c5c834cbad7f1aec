"""Converts errors of Redis and redis-py to store errors.

The text of a reply may quote arguments of the command, so only its code is used.
"""

import re
from dataclasses import dataclass

from redis import exceptions as redis

from persistence.errors import Corrupt, StoreError, Terminal, Transient


@dataclass(frozen=True, slots=True)
class Meaning:
    """Meaning of an error.

    Attributes:
        what: What happened.
        remedy: What to do.
        kind: The store error to raise when retries did not help.
        again: A retry may help. It is safe even if the first attempt took effect, since the scripts
            check what is stored.
    """

    what: str
    remedy: str
    kind: type[StoreError] = Transient
    again: bool = True

    def error(self, url: str) -> StoreError:
        """The store error; `url` is the store's, without secrets."""
        return self.kind(f"{self.what} ({url})", self.remedy)


_LOST = Meaning(
    "the server cannot be reached, or did not answer in time",
    "Check the server, the URL and the network; if the server is slow, raise the options timeout and retry_for",
)
_UNTRUSTED = Meaning(
    "the server's certificate is not trusted",
    "Give the authority that signed it in ssl_ca_certs, and use the host name that the certificate contains",
    Terminal,
    again=False,
)
_NO_DATABASE = Meaning(
    "the server does not have the database given in the URL",
    "Correct or remove the number at the end of the URL",
    Terminal,
    again=False,
)
_FOREIGN = Meaning(
    "what answers there does not speak Redis's protocol",
    "Check host and port in the URL; a server with TLS needs rediss://",
    Terminal,
    again=False,
)
_NO_CLUSTER = Meaning(
    "the server is not part of a cluster", "Write redis:// instead of redis+cluster://", Terminal, again=False
)
_NO_SENTINEL = Meaning(
    "the server is not a sentinel", "Give the sentinels' addresses, or write redis://", Terminal, again=False
)
_TEXTS = {
    "DB index is out of range": _NO_DATABASE,
    "SELECT is not allowed": _NO_DATABASE,
    "cluster support disabled": _NO_CLUSTER,
    "unknown command 'SENTINEL'": _NO_SENTINEL,
}
_WAITS = "This is temporary; raise the option retry_for if it takes longer"

_CODES = {
    "LOADING": Meaning("the server is still reading its data (LOADING)", _WAITS),
    "READONLY": Meaning(
        "the server is a replica (READONLY)", "Use the primary's address, or redis+sentinel:// or redis+cluster://"
    ),
    "OOM": Meaning(
        "the server has no memory left (OOM)",
        "Raise maxmemory or move other data elsewhere, then start the flow again",
        Terminal,
    ),
    "MISCONF": Meaning(
        "the server cannot write to its disk and refuses writes (MISCONF)",
        "Check the server's log and disk, then start the flow again",
        Terminal,
    ),
    "MOVED": Meaning("the cluster is moving slots (MOVED)", _WAITS),
    "ASK": Meaning("the cluster is moving slots (ASK)", _WAITS),
    "TRYAGAIN": Meaning("the cluster is moving slots (TRYAGAIN)", _WAITS),
    "CLUSTERDOWN": Meaning("the cluster does not serve all slots (CLUSTERDOWN)", "Check `redis-cli cluster info`"),
    "MASTERDOWN": Meaning("the replica has lost its primary (MASTERDOWN)", "Check the primary"),
    "NOREPLICAS": Meaning(
        "too few replicas are connected (NOREPLICAS)", "Check min-replicas-to-write and the replicas"
    ),
    "BUSY": Meaning("the server is running a script (BUSY)", _WAITS),
    "NOSCRIPT": Meaning(
        "the server's script cache is flushed again and again (NOSCRIPT)",
        "Find and stop the client that runs SCRIPT FLUSH",
    ),
    "NOAUTH": Meaning("the server requires a password", "Add user and password to the URL", Terminal, again=False),
    "WRONGPASS": Meaning("the user or password is wrong", "Correct the URL", Terminal, again=False),
    "NOPERM": Meaning(
        "the user may not run a command or access a key (NOPERM)",
        "Grant it +@read +@write +@scripting +info +config|get on the keys of the prefix",
        Terminal,
        again=False,
    ),
    "CROSSSLOT": Meaning(
        "the server is part of a cluster", "Use redis+cluster:// instead of redis://", Terminal, again=False
    ),
    "WRONGTYPE": Meaning(
        "a key has another type: another program has written it",
        "Delete it if it does not belong to headwater, or choose another prefix",
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
    """The meaning of `error`, which redis-py or the socket raised."""
    if isinstance(error, redis.AuthenticationError):
        return _CODES["NOAUTH" if "Authentication required" in str(error) else "WRONGPASS"]
    if code := _CLASSES.get(type(error)):
        return _CODES[code]
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return _UNTRUSTED
    if isinstance(error, redis.InvalidResponse):
        return _FOREIGN
    if isinstance(error, (redis.ConnectionError, redis.TimeoutError, OSError)):
        return _LOST
    if found := next((meaning for text, meaning in _TEXTS.items() if text in str(error)), None):
        return found
    if named := _CODE.search(str(error)):
        return _CODES[named[1]]
    code = str(error).partition(" ")[0]
    return Meaning(
        f"the server refused a command ({code if code.isupper() else type(error).__name__})",
        "headwater needs Redis 6.2 or later, or Valkey, with Lua scripts enabled; see the server's log",
        Terminal,
        again=False,
    )
