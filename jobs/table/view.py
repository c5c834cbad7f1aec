"""One stored state, for people and programs."""

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from aggregations.definition.flow import Stage
from aggregations.definition.windows import WindowKey
from aggregations.run.results import Result, results_of
from aggregations.run.shapes import continued
from envelope import Histories
from jobs.environment import UsageError
from persistence.names import StageRef
from persistence.protocol import Stored
from persistence.record import decode_record
from persistence.times import Committed, committed_by

_BASE64: Final = "base64:"
_NO_TIME: Final = datetime.min.replace(tzinfo=UTC)
_SPAN: Final = ("window_start", "window_end")


@dataclass(frozen=True, slots=True)
class View:
    """One state, or one session of it.

    Attributes:
        key: Key of the state: that of the stage, in a stage with windows followed by the start of the window, in a stage
            with sessions by the first and last time of the session.
        state: Result of the fold's `result`; None when the key has only dead-lettered messages.
        version: Number of writes to it.
        epoch: Epoch of the run that wrote it.
        batch: Batch of that run.
        definition: Hash of the definition that made it.
        histories: The positions that it holds.
        written_by_ms: When it was written at the latest, in milliseconds since 1970: when the batch was committed, or a
            batch soon after it (`persistence.times`). None if no batch since then is known to be committed.
        window: Key of the stage, and start and end of the window; None without windows, and if the key has no session.
    """

    key: bytes
    state: Any
    version: int
    epoch: int
    batch: int
    definition: str
    histories: Histories
    written_by_ms: int | None = None
    window: WindowKey | None = None

    @property
    def session_order(self) -> tuple[bytes, datetime]:
        """Sort key of the sessions of a stage: the stage's key, then the first time."""
        return (self.key, _NO_TIME) if self.window is None else (self.window.key, self.window.start)

    def as_json(self) -> dict[str, Any]:
        """The state as a JSON object; positions are lists."""
        lanes = {
            name: {
                "held": [list(position) for position in history.held],
                "floor": None if history.floor is None else list(history.floor),
                "used": history.used,
            }
            for name, history in self.histories.lanes.items()
        }
        holes = {name: sorted(list(one) for one in found) for name, found in self.histories.holes.items()}
        window = {} if self.window is None else dict(zip(_SPAN, self.window.texts, strict=True))
        return {
            **key_as_json(self.key),
            **window,
            "state": self.state,
            "version": self.version,
            "epoch": self.epoch,
            "batch": self.batch,
            "written_by_ms": self.written_by_ms,
            "definition": self.definition,
            "lanes": lanes,
            "holes": holes,
        }


def views_of(stage: Stage, ref: StageRef, key: bytes, stored: Stored, times: Sequence[Committed] = ()) -> list[View]:
    """Read a stored state, also one of an earlier definition: one view, in a stage with sessions one for each of them.

    Raises:
        Corrupt: It cannot be read.
        DefinitionChangedError: It is of an earlier definition, and does not have the shape of the stage's states.
    """
    record = decode_record(stored.value, ref, key)
    state = record.state
    if record.definition != stage.definition:
        state = continued(stage, state, ref, key)
    written_by = committed_by(times, stored.epoch, stored.batch)
    return [
        View(
            one.key,
            one.state,
            stored.version,
            stored.epoch,
            stored.batch,
            record.definition,
            record.histories,
            written_by,
            one.window,
        )
        for one in results_of(stage.aggregate, key, state) or [Result(key, None, None)]
    ]


def key_as_json(key: bytes) -> dict[str, str]:
    """A key as text, or in base64 when it is not UTF-8."""
    try:
        return {"key": key.decode()}
    except UnicodeDecodeError:
        return {"key_base64": base64.b64encode(key).decode()}


def key_as_text(key: bytes) -> str:
    """A key as `key_of` reads it."""
    [(name, text)] = key_as_json(key).items()
    return text if name == "key" and not text.startswith(_BASE64) else _BASE64 + base64.b64encode(key).decode()


def key_of(text: str) -> bytes:
    """The bytes of a key that a person wrote: text, or `base64:` and the base64 of any bytes.

    Raises:
        UsageError: The base64 is invalid.
    """
    if not text.startswith(_BASE64):
        return text.encode(errors="surrogateescape")
    try:
        return base64.b64decode(text.removeprefix(_BASE64), validate=True)
    except binascii.Error:
        raise UsageError(f"{text!r} is not valid base64; write the key as inspect shows it") from None
