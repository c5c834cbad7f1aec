"""Loads and saves the states of a stage."""

from collections.abc import Collection, Mapping, Sequence

from aggregations.definition.expiry import Expiry
from aggregations.definition.flow import Stage
from aggregations.definition.sessions import SessionWindow
from aggregations.definition.windows import Window
from aggregations.errors import DefinitionChangedError
from aggregations.per_message.stage import KeyState
from aggregations.per_message.times import latest
from aggregations.run.retire import with_dues
from aggregations.run.run import Run
from aggregations.run.shapes import continued
from persistence.protocol import StageRef, StateStore, Stored, Write
from persistence.record import StateRecord, decode_record, encode_record


def load_states(run: Run, stage: Stage, keys: Sequence[bytes]) -> dict[bytes, KeyState]:
    """Load the states of `keys`; keys without one are missing."""
    return read_states(run.stores[stage.name], run.stage_ref(stage), keys, stage, run.earlier_of(stage))


def read_states(
    store: StateStore, ref: StageRef, keys: Sequence[bytes], stage: Stage, earlier: Collection[str] | None
) -> dict[bytes, KeyState]:
    """Load states.

    Args:
        store: The stage's store.
        ref: Identity of the stage's states.
        keys: Their keys.
        stage: The stage.
        earlier: Earlier definitions whose states are continued; None for any.

    Raises:
        Corrupt: A state cannot be read.
        DefinitionChangedError: A state is of a definition that is not continued, or does not have the shape of the
            stage's states.
    """
    return states_in(store.load(ref, keys), ref, stage, earlier)


def states_in(
    found: Mapping[bytes, Stored], ref: StageRef, stage: Stage, earlier: Collection[str] | None
) -> dict[bytes, KeyState]:
    """Decode loaded states; see `read_states`."""
    return {key: _state_of(stored, ref, key, stage, earlier) for key, stored in found.items()}


def _state_of(stored: Stored, ref: StageRef, key: bytes, stage: Stage, earlier: Collection[str] | None) -> KeyState:
    record = decode_record(stored.value, ref, key)
    state = record.state
    if record.definition != stage.definition:
        if earlier is not None and record.definition not in earlier:
            raise DefinitionChangedError(
                f"{ref}: a state has definition {record.definition}; the stage has {stage.definition}. Rebuild the flow "
                "(`headwater replay --redefine`). If both mean the same and source, siblings and co_partitioned are the same, "
                "continue with --accept definition"
            )
        state = continued(stage, state, ref, key)
    return KeyState(state, record.histories, stored.version, record.time_us, record.hole_us, record.kept)


def state_of(stored: Stored, ref: StageRef, key: bytes) -> KeyState:
    """Read one stored state unchanged, of any definition."""
    record = decode_record(stored.value, ref, key)
    return KeyState(record.state, record.histories, stored.version, record.time_us, record.hole_us, record.kept)


def save_states(run: Run, stage: Stage, states: Mapping[bytes, KeyState]) -> None:
    """Write the changed states of a stage, each only if its version is still the one that was loaded.

    Raises:
        StoreWentBack: A bucket lost writes that it acknowledged to this run.
    """
    marks = run.stores[stage.name].save(
        run.stage_ref(stage),
        with_dues(stage, writes_of(states, stage.definition, stage.aggregate.renewed)),
        epoch=run.epoch,
        batch=run.batch,
        known=run.known.of(stage.name),
        downstream=run.known.downstream(stage.name),
    )
    run.known.note(stage.name, marks)


def writes_of(
    states: Mapping[bytes, KeyState], definition: str, renewed: SessionWindow | Expiry | None = None
) -> list[Write]:
    """The conditional writes of changed states; see `Aggregate.renewed`."""
    return [
        Write(
            key,
            state.version,
            encode_record(
                StateRecord(definition, state.fold, state.histories, state.time_us, state.hole_us, state.kept)
            ),
            _noted_due(state, renewed),
        )
        for key, state in states.items()
    ]


def due_of(stage: Stage, ref: StageRef, key: bytes, value: bytes) -> int | None:
    """The time at which a stored state is due, as when it was written, in seconds since 1970; None if it has none.

    Args:
        stage: The stage, with the window or expiry that the state was written with.
        ref: Identity of the stage's states.
        key: Key of the state.
        value: Its record.

    Raises:
        Corrupt: It cannot be read.
    """
    if isinstance(stage.aggregate.window, Window):
        return stage.aggregate.window.due(key)
    if stage.aggregate.renewed is None:
        return None
    return renewed_due(state_of(Stored(0, 0, 0, value), ref, key), stage.aggregate.renewed)


def renewed_due(state: KeyState, renewed: SessionWindow | Expiry | None) -> int | None:
    """The due time of a state that each write puts off, in seconds since 1970; None if it has none."""
    time_us = _renewed_us(state, renewed)
    return None if renewed is None or time_us is None else renewed.due(time_us)


def _noted_due(state: KeyState, renewed: SessionWindow | Expiry | None) -> int | None:
    """The same as the store notes it."""
    time_us = _renewed_us(state, renewed)
    return None if renewed is None or time_us is None else renewed.noted_due(time_us)


def _renewed_us(state: KeyState, renewed: SessionWindow | Expiry | None) -> int | None:
    """The event time after which a state is due, in microseconds since 1970."""
    ends_us = state.fold[-1][1] if isinstance(renewed, SessionWindow) and state.fold else state.time_us
    return latest(ends_us, state.hole_us)
