"""Snapshots: states of a stage, published once per batch, or when their window closes; the newest snapshot of a key wins.

States are conflated: a batch that folds a thousand events publishes one snapshot per key. A snapshot contains the
whole state, never a difference, so lost, repeated or late snapshots do no harm to a consumer that applies a snapshot
only if it is newer.
"""

import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import msgspec

from aggregations.definition.flow import Aggregate, Stage
from aggregations.definition.windows import Window
from aggregations.per_message.publishing import OutputMessage
from aggregations.per_message.stage import KeyState
from aggregations.report import Report
from aggregations.run.results import results_of
from envelope import Envelope, EnvelopeError, Reason, decode, encode
from envelope.deadletter import size_of
from envelope.limits import DEFAULT_LIMITS, Limits
from persistence.errors import show_key
from persistence.protocol import FlowRef

_LOG = logging.getLogger("headwater.snapshots")
_UNLIMITED: Final = Limits(payload_bytes=sys.maxsize)
_SESSION = ("window_start", "window_end", "state")
PAYLOAD_TYPE = "headwater.snapshot.v1"
"""Payload type in the envelope of a snapshot."""


class Snapshot(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of one key as of one version.

    Attributes:
        flow: Name of the flow.
        stage: Name of the stage.
        generation: Generation of the states; a rebuild writes the next one.
        version: Version of the state: number of writes to it. It begins at 1 again if the state had left the store.
        epoch: Epoch of the run that published it.
        attempt: Attempt at the batch, from 1: a batch that is retried may publish a version twice.
        state: The state as readers see it; in a stage with sessions, on update, a list of all sessions of the key, in
            order of time, each with `window_start`, `window_end` and `state`.
        window_start: Start of the state's window, or first time of a closed session, in ISO 8601 and UTC; None without
            windows, and with sessions on update.
        window_end: End of the window: the first time that is not in it; last time of a closed session.
        batch: Batch of this run, in which the state was folded or after which it was published.
    """

    flow: str
    stage: str
    generation: int
    version: int
    epoch: int
    attempt: int
    state: Any
    window_start: str | None = None
    window_end: str | None = None
    batch: int = 0

    @property
    def order(self) -> tuple[int, int, int, int, int]:
        """Sort key of the snapshots of one key; the highest is the newest.

        The version decides within a batch only, and where there is no batch: in snapshots of an earlier release.
        """
        return self.generation, self.epoch, self.batch, self.version, self.attempt


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Snapshot)


def snapshots_of(
    stage: Stage,
    states: Mapping[bytes, KeyState],
    *,
    ref: FlowRef,
    epoch: int,
    batch: int,
    attempt: int,
    largest: Mapping[str, int] = {},
    counts: Report | None = None,
) -> list[OutputMessage]:
    """The messages that publish a stage's changed states, keyed by the states' keys.

    A state that is too large for a topic, or whose result raises, is not published: the log names it, `counts` counts it.

    Args:
        stage: The stage.
        states: Its states with the versions that were loaded; they are about to be written.
        ref: The flow's name and generation.
        epoch: Epoch of the run.
        batch: Number of the batch.
        attempt: Attempt at the batch, from 1.
        largest: Largest record that can be produced to a topic, in bytes, by topic.
        counts: Where states that are not published are counted.
    """
    if not stage.snapshots:
        return []
    made = _messages(stage, stage.snapshots, states, ref, epoch, batch, attempt, written=1)
    return _published(stage, made, largest, counts)


def final_snapshots_of(
    stage: Stage,
    states: Mapping[bytes, KeyState],
    *,
    ref: FlowRef,
    epoch: int,
    batch: int,
    largest: Mapping[str, int] = {},
    counts: Report | None = None,
) -> list[OutputMessage]:
    """The messages that publish states of a stage's closed windows, as they are stored; see `snapshots_of`.

    Of a key in a stage with sessions, `states` has only those to publish, and each has a message of its own.
    """
    made = _messages(stage, stage.final_snapshots, states, ref, epoch, batch, attempt=1, written=0)
    return _published(stage, made, largest, counts)


class _Left(NamedTuple):
    """A state that is not published.

    Attributes:
        key: Key of its message.
        why: What prevents it.
    """

    key: bytes
    why: str


def _published(
    stage: Stage, made: Iterable[OutputMessage | _Left], largest: Mapping[str, int], counts: Report | None
) -> list[OutputMessage]:
    """The messages that readers get; the first state that is left out is logged, and all of them are counted."""
    published, left = list[OutputMessage](), list[_Left]()
    for one in made:
        if isinstance(one, OutputMessage) and not (why := _prevented(one, largest)):
            published.append(one)
        else:
            left.append(one if isinstance(one, _Left) else _Left(one.key or b"", why))
    if left:
        _LOG.warning(
            "stage %s, key %s: its state is in the store, and was not published: %s. States that were not published: %d",
            *(stage.name, show_key(left[0].key), left[0].why, len(left)),
        )
        if counts is not None:
            counts.unpublished[stage.name] += len(left)
    return published


def _prevented(message: OutputMessage, largest: Mapping[str, int]) -> str:
    """Why a message cannot be produced; empty if it can."""
    size, most = size_of(message.key, message.value, ()), largest.get(message.topic, sys.maxsize)
    if size > most:
        return f"{size} bytes, {message.topic} takes {most}. Raise max.message.bytes, or keep less in the state"
    try:
        if len(message.value) > DEFAULT_LIMITS.payload_bytes:
            decode(message.value)
    except EnvelopeError as error:
        return f"{error.detail}. Keep less in the state"
    return ""


class MendedSnapshot(NamedTuple):
    """A message that publishes a mended state.

    Attributes:
        topic: Topic.
        key: Key of the state.
        value: Its snapshot; None for a tombstone, with which readers forget the key and what its version was.
    """

    topic: str
    key: bytes
    value: bytes | None


def mended_snapshots_of(
    stage: Stage,
    states: Mapping[bytes, KeyState],
    before: Mapping[bytes, KeyState],
    *,
    ref: FlowRef,
    epoch: int,
    batch: int,
    published: int | None,
    largest: Mapping[str, int] = {},
) -> list[MendedSnapshot]:
    """The messages that publish mended states, in order.

    A key without a result gets a tombstone, and so does one whose versions begin at 1 again, before its snapshot.

    Args:
        stage: The stage.
        states: Its states with the versions that were loaded; they are about to be written.
        before: The states that they replace, without sessions that have left the store.
        ref: The flow's name and generation.
        epoch: Epoch of the mend.
        batch: Number of the batch that it writes.
        published: Due time up to which windows that have closed are published; see `Manifest.published`.
        largest: Largest record that can be produced to a topic, in bytes, by topic.
    """
    run: dict[str, Any] = {"ref": ref, "epoch": epoch, "batch": batch, "largest": largest}
    found: list[MendedSnapshot] = []
    for key, state in states.items():
        if stage.snapshots:
            new = snapshots_of(stage, {key: state}, attempt=1, **run)
            gone = [] if state.version and new else [(topic, key) for topic in stage.snapshots]
            found += _mended(gone, new)
        if stage.final_snapshots and published is not None:
            written = replace(state, version=state.version + 1)
            new, old = (
                final_snapshots_of(stage, _closed(stage, key, one, published), **run)
                for one in (written, before.get(key, KeyState()))
            )
            kept = {(one.topic, one.key) for one in new} if state.version else set()
            gone = [(one.topic, one.key or b"") for one in (*old, *new) if (one.topic, one.key) not in kept]
            found += _mended(gone, new)
    return found


def _closed(stage: Stage, key: bytes, state: KeyState, published: int) -> dict[bytes, KeyState]:
    """What is published of a state in a stage that publishes its windows when they close, by its key."""
    window = stage.aggregate.window
    if isinstance(window, Window):
        return {key: state} if window.due(key) <= published else {}
    closed = [] if window is None else window.due_between(state.fold or [], None, published)
    return {key: replace(state, fold=closed)} if closed else {}


def _mended(gone: Iterable[tuple[str, bytes]], new: Iterable[OutputMessage]) -> Iterator[MendedSnapshot]:
    """Tombstones by topic and key, then snapshots."""
    yield from (MendedSnapshot(topic, key, None) for topic, key in gone)
    yield from (MendedSnapshot(one.topic, one.key or b"", one.value) for one in new)


def _messages(
    stage: Stage,
    topics: Sequence[str],
    states: Mapping[bytes, KeyState],
    ref: FlowRef,
    epoch: int,
    batch: int,
    attempt: int,
    *,
    written: int,
) -> Iterator[OutputMessage | _Left]:
    for key, state in states.items():
        if not state.folded:
            continue  # the state contains only a hole: nothing was folded yet
        version = state.version + written
        bodies = []
        try:
            for own, shown, span in _shown(stage.aggregate, key, state.fold, alone=not written):
                begin, end = span or (None, None)
                one = Snapshot(ref.flow, stage.name, ref.generation, version, epoch, attempt, shown, begin, end, batch)
                bodies.append((own, _encoder.encode(one)))
        except Exception as error:  # user code may raise anything
            yield _Left(key, f"its result cannot be written ({type(error).__name__})")
            continue
        for own, body in bodies:
            for topic in topics:
                envelope = Envelope(
                    body, key=own, payload_type=PAYLOAD_TYPE, content_type="application/json", destination=topic
                )
                yield OutputMessage(topic, own, encode(envelope, _UNLIMITED))


def _shown(stage: Aggregate, key: bytes, state: Any, *, alone: bool) -> list[tuple[bytes, Any, tuple[str, ...]]]:
    """Key, state as readers see it, and start and end of its window, of each message; `alone` divides sessions."""
    results = results_of(stage, key, state)
    if stage.sessions is None or alone:
        return [(one.key, one.state, () if one.window is None else one.window.texts) for one in results]
    # All sessions of a key in one message: a merge replaces sessions, and no reader ever sees a part of it.
    return [
        (key, [dict(zip(_SESSION, (*one.window.texts, one.state), strict=True)) for one in results if one.window], ())
    ]


def read_snapshot(value: bytes | None) -> Snapshot:
    """Read one message of a topic of snapshots.

    Raises:
        EnvelopeError: It is not an envelope, or does not contain a snapshot.
    """
    envelope = decode(value)
    if envelope.payload_type != PAYLOAD_TYPE:
        raise EnvelopeError(Reason.UNKNOWN_PAYLOAD_TYPE, f"the payload is not a {PAYLOAD_TYPE}")
    try:
        return _decoder.decode(envelope.payload)
    except msgspec.DecodeError as error:
        raise EnvelopeError(Reason.BAD_PAYLOAD, "the payload is not a snapshot") from error


class Latest:
    """The newest snapshot of every key, for consumers of snapshots.

    Example::

        latest = Latest()
        for record in consumer:
            if latest.apply(record.key, read_snapshot(record.value)):
                show(record.key, latest.state(record.key))
    """

    def __init__(self, known: Iterable[tuple[bytes, Snapshot]] = ()) -> None:
        self._held: dict[bytes, Snapshot] = {}
        for key, snapshot in known:
            self.apply(key, snapshot)

    def apply(self, key: bytes, snapshot: Snapshot) -> bool:
        """Keep a snapshot if it is newer than the one held; return whether it was."""
        held = self._held.get(key)
        if held is not None and snapshot.order <= held.order:
            return False
        self._held[key] = snapshot
        return True

    def forget(self, key: bytes) -> None:
        """Forget a key whose tombstone was read, a record without a value: the live generation has no state of it."""
        self._held.pop(key, None)

    def state(self, key: bytes) -> Any:
        """State of a key; None when no snapshot of it was applied."""
        held = self._held.get(key)
        return None if held is None else held.state

    def __iter__(self) -> Iterator[tuple[bytes, Snapshot]]:
        return iter(self._held.items())
