"""The pointer of a flow: which of its generations is live, and who changed that, when and why.

It is one value, beside the epochs: a state of generation 0, which no run has. So what the contract of stores promises of
states holds for it: it is replaced as a whole, conditionally and fenced, and survives what a state survives. Every
command that changes it first acquires the epoch of generation 0 in all stores of the flow, so an older command writes
nothing afterwards. The first stage's store decides; the others get a copy, and the highest version is valid everywhere.
A crash between two stores leaves a copy behind, which the next run or command replaces.

A flow without a pointer has one live generation, 1.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec

from persistence.commit.faults import POINTER, effect
from persistence.epochs import take_epoch
from persistence.errors import Corrupt, Fenced
from persistence.names import FlowRef, StageRef
from persistence.protocol import StateStore, Write
from persistence.seal import DamagedError, seal, unseal

SCHEMA: Final = 1
MOST_CHANGES: Final = 100
"""Changes that the pointer lists; about 200 bytes each."""
_STAGE: Final = "pointer"
_KEY: Final = b"live"


class Change(msgspec.Struct, frozen=True):
    """One change, for the audit.

    Attributes:
        at_ms: When, in milliseconds since 1970.
        by: Who: user and host.
        what: What was done: `rebuild`, `swap`, `rollback`, `abandon`, `drop` or `mend`.
        generation: The generation that it was done to: the one rebuilt, abandoned, dropped or mended, or the one that
            became live.
        why: The reason that was given.
        states: Which states of the generation, for a person; empty for all.
    """

    at_ms: int
    by: str
    what: str
    generation: int
    why: str
    states: str = ""

    def __str__(self) -> str:
        at = datetime.fromtimestamp(self.at_ms // 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        which = f", {self.states}," if self.states else ""
        link = "to" if self.what == "rollback" else "of"
        return f"{at} {self.what} {link} generation {self.generation}{which} by {self.by}: {self.why}"


class Origin(msgspec.Struct, frozen=True):
    """The snapshot that a rebuild begins with.

    Attributes:
        file: Absolute path of the file, on the machine that began the rebuild.
        checksum: SHA-256 of the file up to its end, as hexadecimal text.
        generations: The generation that it was made of, then those whose snapshots that one began with.
    """

    file: str
    checksum: str
    generations: tuple[int, ...]


class Rebuild(msgspec.Struct, frozen=True):
    """A generation that `headwater replay` rebuilds.

    Attributes:
        generation: The generation.
        replaces: The generation that was live when the rebuild began.
        worker: The process that is at work on it, as HOST/PID; empty when none is.
        redefined: The definition differs from that of the live generation.
        origin: The snapshot that it begins with; None if it begins where the flow began.
        outputs: Its outputs are held, and sent by the swap; otherwise they are dropped.
        sends: The swap publishes its states: readers that have seen them ignore those of the generation before.
    """

    generation: int
    replaces: int
    worker: str = ""
    redefined: bool = False
    origin: Origin | None = None
    outputs: bool = False
    sends: bool = False

    @property
    def process(self) -> str:
        """The process that is at work on it, for a person."""
        host, _, pid = self.worker.rpartition("/")
        return f"process {pid} on {host}"


class Pointer(msgspec.Struct, frozen=True):
    """Which generation of a flow is live.

    Attributes:
        version: Number of changes; 0 if the stores have no pointer.
        live: The live generation.
        previous: The generation that was live before; 0 if none was.
        newest: The highest generation that was ever rebuilt, or live by a swap. One above it may be run by hand.
        closing: The generation that is being replaced as live, on which no run begins any more; 0 if none is.
        rebuild: The rebuild that is not swapped or abandoned yet; None if there is none.
        changes: The last `MOST_CHANGES` changes, oldest first, and always the one that began the rebuild under way.
        schema: Version of this layout.
    """

    version: int = 0
    live: int = 1
    previous: int = 0
    newest: int = 1
    closing: int = 0
    rebuild: Rebuild | None = None
    changes: tuple[Change, ...] = ()
    schema: int = SCHEMA

    def noting(self, change: Change) -> "Pointer":
        """The pointer with one more change in its list."""
        changes = [*self.changes, change]
        began = None if self.rebuild is None else ("rebuild", self.rebuild.generation)
        while len(changes) > MOST_CHANGES:
            del changes[(changes[0].what, changes[0].generation) == began]
        return msgspec.structs.replace(self, changes=tuple(changes))


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Pointer)


def load_pointer(stores: Sequence[StateStore], flow: str) -> Pointer:
    """The pointer of a flow: that of the highest version, since one store may not have the last change yet.

    Args:
        stores: The flow's stores, each once.
        flow: Name of the flow.

    Raises:
        Corrupt: A copy cannot be read.
        StoreError: A store does not answer.
    """
    return max((_load(store, flow)[0] for store in stores), key=lambda found: found.version, default=Pointer())


def change_pointer(stores: Sequence[StateStore], flow: str, before: Pointer, after: Pointer) -> Pointer:
    """Replace the pointer in every store, if it is still the one that was read.

    Args:
        stores: The flow's stores, each once, that of the first stage first.
        flow: Name of the flow.
        before: The pointer that was read.
        after: The new one; its version does not count.

    Returns:
        The new pointer, with its version.

    Raises:
        Fenced: Another command has changed it meanwhile, or is about to.
        StoreError: A store does not answer, or refuses a request. The change then is or is not made; repeat the command.
    """
    return _write(stores, flow, before, msgspec.structs.replace(after, version=before.version + 1))


def copy_pointer(stores: Sequence[StateStore], flow: str) -> Pointer:
    """Copy the pointer into every store that does not have its last change, after a crash between two stores.

    Args: see `load_pointer`.

    Raises:
        Fenced: A command is about to change it.
        StoreError: A store does not answer, or refuses a request.
    """
    held = [_load(store, flow)[0] for store in stores]
    newest = max(held, key=lambda found: found.version, default=Pointer())
    return newest if all(one.version == newest.version for one in held) else _write(stores, flow, newest, newest)


def _write(stores: Sequence[StateStore], flow: str, before: Pointer, after: Pointer) -> Pointer:
    ref = FlowRef(flow, 0)
    epoch = take_epoch(ref, stores, point=POINTER)
    if (found := load_pointer(stores, flow)) != before:
        raise Fenced(
            f"the pointer to the live generation has version {found.version}; this command read version {before.version}",
            "Another command has changed it: look again before you repeat this one",
            ref,
        )
    for store in stores:
        effect(POINTER, lambda store=store: _save(store, flow, after, epoch))  # type: ignore[misc]
    return after


def _load(store: StateStore, flow: str) -> tuple[Pointer, int]:
    """The copy of a store, and its version as a state."""
    ref = _ref(flow)
    stored = store.load(ref, [_KEY]).get(_KEY)
    if stored is None:
        return Pointer(), 0
    try:
        found = _decoder.decode(unseal(stored.value))
    except (DamagedError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(f"the pointer cannot be read: {error}", ref=ref, key=_KEY) from error
    if found.schema > SCHEMA:
        raise Corrupt(
            f"the pointer has schema {found.schema}; this code reads {SCHEMA}", "Upgrade headwater", ref=ref, key=_KEY
        )
    return found, stored.version


def _save(store: StateStore, flow: str, pointer: Pointer, epoch: int) -> None:
    held, version = _load(store, flow)
    if held != pointer:
        write = Write(_KEY, version, seal(_encoder.encode(pointer)))
        store.save(_ref(flow), [write], epoch=epoch, batch=pointer.version)


def _ref(flow: str) -> StageRef:
    return FlowRef(flow, 0).stage(_STAGE)
