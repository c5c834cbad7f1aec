"""Stores that a run has begun to write to."""

from collections.abc import Sequence

from persistence.protocol import StageRef, StateStore, Write


def begun(store: StateStore, stage: StageRef, keys: Sequence[bytes] = (b"k",)) -> int:
    """Begin a run and write every key once; return its epoch."""
    epoch = store.acquire_epoch(stage.flow_ref)
    store.save(stage, [Write(key, 0, b"first") for key in keys], epoch=epoch, batch=0)
    return epoch
