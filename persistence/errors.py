"""Errors of stores, named by what the caller does next.

All of them survive pickling (they cross from Spark's workers to the driver), say which flow,
stage and key they are about and what to do, and never quote a state, a payload or a password.
"""

from typing import ClassVar, Self

from persistence.names import FlowRef, StageRef

_SHOWN_KEY_BYTES = 64


def show_key(key: bytes) -> str:
    """`repr` of a key, cut to 64 bytes."""
    return repr(key) if len(key) <= _SHOWN_KEY_BYTES else f"{key[:_SHOWN_KEY_BYTES]!r}... ({len(key)} bytes)"


class StoreError(Exception):
    """A store could not complete a request.

    Attributes:
        what: What happened.
        remedy: What to do about it.
        ref: Flow or stage concerned.
        key: Key of the state concerned, if any.
    """

    usual_remedy: ClassVar[str] = ""

    def __init__(
        self,
        what: str,
        remedy: str = "",
        ref: FlowRef | StageRef | None = None,
        key: bytes | None = None,
    ) -> None:
        super().__init__(what, remedy, ref, key)
        self.what = what
        self.remedy = remedy or self.usual_remedy
        self.ref = ref
        self.key = key

    def __str__(self) -> str:
        place = [str(self.ref)] if self.ref else []
        if self.key is not None:
            place.append(f"key {show_key(self.key)}")
        parts = [": ".join(filter(None, [", ".join(place), self.what]))]
        if self.remedy:
            parts.append(self.remedy)
        return ". ".join(part.rstrip(".") for part in parts)


class Transient(StoreError):
    """A retry may succeed: a timeout, a lock, a server that is starting.

    Whether a write took effect is unknown. The states of the batch are loaded and folded again; the
    histories then drop what the store already holds.
    """

    usual_remedy = "The batch is retried; if this persists, check the log of the store"


class Terminal(StoreError):
    """A retry cannot succeed until an operator fixes the cause: a full disk, a missing permission."""


class StoreWentBack(Terminal):
    """A store, or a part of it, lost acknowledged writes: an older copy, or a failover to a lagging replica.

    The run ends, because further writes would hide the loss.
    """

    usual_remedy = (
        "Start the flow again: the run compares what its stores acknowledged with what they have. If the progress "
        "went back together with the states, the run resumes there; otherwise it reports what is missing"
    )


class InvalidUrl(Terminal):
    """A store's URL, or a setting that it names, is invalid. No connection was opened."""


class Corrupt(StoreError):
    """A stored value differs from what was written. It is never treated as an empty state; the job stops."""

    usual_remedy = (
        "Restore the store from a copy, or rebuild the state into a new generation (`headwater run --generation`)"
    )


class Fenced(StoreError):
    """A newer run of the flow has taken over. This one must stop and write nothing more."""

    usual_remedy = (
        "A newer run of this flow, or a command that changes its states, has taken over: stop this one. "
        "After a command, start it again"
    )

    @classmethod
    def by(cls, ref: FlowRef | StageRef, mine: int, newest: int) -> Self:
        """The error for a run of epoch `mine` that finds epoch `newest` in the store."""
        return cls(f"this run has epoch {mine}; the store has epoch {newest}", ref=ref)


class Conflict(StoreError):
    """States changed between load and save. The states of the batch are loaded and folded again.

    Attributes:
        keys: Keys whose states had changed, in the order of the call.
    """

    usual_remedy = "The batch is loaded and folded again; if this persists, another program writes these states"

    def __init__(self, keys: tuple[bytes, ...], ref: FlowRef | StageRef | None = None) -> None:
        count = "1 state has" if len(keys) == 1 else f"{len(keys)} states have"
        super().__init__(f"{count} changed since they were loaded", ref=ref, key=keys[0] if keys else None)
        self.args = (keys, ref)
        self.keys = keys
