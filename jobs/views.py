"""Views of stored states, for people and programs."""

import base64
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from aggregations.definition.flow import Flow, Stage
from aggregations.errors import FlowError
from aggregations.run.shapes import continued
from envelope import Histories
from persistence.names import FlowRef, StageRef
from persistence.protocol import Stored
from persistence.record import decode_record
from persistence.registry import open_store


@dataclass(frozen=True, slots=True)
class View:
    """One state.

    Attributes:
        key: Key of the stage.
        state: Result of the fold's `result`; None when the key has only dead-lettered messages.
        version: Number of writes to it.
        epoch: Epoch of the run that wrote it.
        batch: Batch of that run.
        definition: Hash of the definition that made it.
        histories: The positions that it holds.
    """

    key: bytes
    state: Any
    version: int
    epoch: int
    batch: int
    definition: str
    histories: Histories

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
) -> Iterator[View]:
    """Read states: all states of a stage as a stream, or those of some keys.

    Nothing is locked: a running job continues, and each state is one that its store had at some moment of the read.

    Args:
        flow: The flow.
        stage: Name of the stage.
        stores: URL of the store by stage name, from `bind`.
        generation: Generation of the states.
        keys: Keys to read; keys without a state are left out.

    Raises:
        FlowError: The stage does not exist, or its store is in the memory of one process.
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
        found = store.scan(ref) if keys is None else iter(store.load(ref, keys).items())
        for key, stored in found:
            yield _view(found_stage, ref, key, stored)


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
    return View(key, state, stored.version, stored.epoch, stored.batch, record.definition, record.histories)
