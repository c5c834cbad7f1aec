"""Views of stored states, for people and programs."""

import base64
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from aggregations.definition.flow import Flow, Stage
from aggregations.definition.windows import WindowKey
from aggregations.errors import FlowError
from aggregations.run.shapes import continued
from envelope import Histories
from persistence.names import FlowRef, StageRef
from persistence.protocol import StateStore, Stored
from persistence.record import decode_record
from persistence.registry import open_store


@dataclass(frozen=True, slots=True)
class View:
    """One state.

    Attributes:
        key: Key of the state: that of the stage, in a stage with windows followed by the start of the window.
        state: Result of the fold's `result`; None when the key has only dead-lettered messages.
        version: Number of writes to it.
        epoch: Epoch of the run that wrote it.
        batch: Batch of that run.
        definition: Hash of the definition that made it.
        histories: The positions that it holds.
        window: Key of the stage, and start and end of the window; None without windows.
    """

    key: bytes
    state: Any
    version: int
    epoch: int
    batch: int
    definition: str
    histories: Histories
    window: WindowKey | None = None

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
        return {
            **key_as_json(self.key),
            **(
                {} if self.window is None else dict(zip(("window_start", "window_end"), self.window.texts, strict=True))
            ),
            "state": self.state,
            "version": self.version,
            "epoch": self.epoch,
            "batch": self.batch,
            "definition": self.definition,
            "lanes": lanes,
            "holes": holes,
        }


def states(
    flow: Flow[Any],
    stage: str,
    stores: Mapping[str, str],
    *,
    generation: int = 1,
    keys: Sequence[bytes] | None = None,
    start: datetime | None = None,
) -> Iterator[View]:
    """Read states: all states of a stage as a stream, or those of some keys.

    Nothing is locked: a running job continues, and each state is one that its store had at some moment of the read.

    Args:
        flow: The flow.
        stage: Name of the stage.
        stores: URL of the store by stage name, from `bind`.
        generation: Generation of the states.
        keys: Keys of the stage to read, all windows of each; keys without a state are left out.
        start: Read only the window that starts at this time, which has a time zone.

    Raises:
        FlowError: The stage does not exist, its store is in the memory of one process, or it has no window that starts
            at `start`.
        Corrupt: A state cannot be read.
        DefinitionChangedError: A state of an earlier definition does not have the shape of the stage's states.
    """
    found_stage = flow.stage(stage)
    ref = FlowRef(flow.name, generation).stage(stage)
    with closing(open_store(stores[stage])) as store:
        if not store.capabilities.shared:
            raise FlowError(
                f"the store of stage {stage} is in the memory of one process: give another one with --store URL"
            )
        for key, stored in _found(found_stage, store, ref, keys, start):
            yield _view(found_stage, ref, key, stored)


def _found(
    stage: Stage, store: StateStore, ref: StageRef, keys: Sequence[bytes] | None, start: datetime | None
) -> Iterator[tuple[bytes, Stored]]:
    window = stage.aggregate.window
    if window is None:
        if start is not None:
            raise FlowError(f"stage {stage.name} has no windows")
        return store.scan(ref) if keys is None else iter(store.load(ref, keys).items())
    if keys is not None and start is not None:
        return iter(store.load(ref, [window.key_at(key, start) for key in keys]).items())
    end, wanted = window.key_at(b"", start) if start is not None else b"", None if keys is None else frozenset(keys)
    return (
        (key, stored)
        for key, stored in store.scan(ref)
        if key.endswith(end) and (wanted is None or window.split(key).key in wanted)
    )


def key_as_json(key: bytes) -> dict[str, str]:
    """A key as text, or in base64 when it is not UTF-8."""
    try:
        return {"key": key.decode()}
    except UnicodeDecodeError:
        return {"key_base64": base64.b64encode(key).decode()}


def _view(stage: Stage, ref: StageRef, key: bytes, stored: Stored) -> View:
    record = decode_record(stored.value, ref, key)
    state = record.state
    if record.definition != stage.definition:
        state = continued(stage, state, ref, key)
    if state is not None:
        state = getattr(stage.aggregate.fold, "result", lambda state: state)(state)
    window = None if stage.aggregate.window is None else stage.aggregate.window.split(key)
    return View(key, state, stored.version, stored.epoch, stored.batch, record.definition, record.histories, window)
