"""States between a stage and its store."""

from collections.abc import Mapping, Sequence

from aggregations.definition.flow import Stage
from aggregations.errors import DefinitionChangedError
from aggregations.per_message.stage import KeyState
from aggregations.run.run import Run
from persistence.protocol import StageRef, StateStore, Stored, Write
from persistence.record import StateRecord, decode_record, encode_record


def load_states(run: Run, stage: Stage, keys: Sequence[bytes]) -> dict[bytes, KeyState]:
    """Load the states of `keys`; keys without one are missing."""
    ref = run.stage_ref(stage)
    return read_states(run.stores[stage.name], ref, keys, "" if run.accept_definition else stage.definition)


def read_states(store: StateStore, ref: StageRef, keys: Sequence[bytes], definition: str) -> dict[bytes, KeyState]:
    """Load states.

    Raises:
        Corrupt: A state cannot be read.
        DefinitionChangedError: A state is of another definition than `definition`, if that is given.
    """
    return {key: state_of(stored, ref, key, definition) for key, stored in store.load(ref, keys).items()}


def state_of(stored: Stored, ref: StageRef, key: bytes, definition: str = "") -> KeyState:
    """Read one stored state; see `read_states`."""
    record = decode_record(stored.value, ref, key)
    if definition and record.definition != definition:
        raise DefinitionChangedError(
            f"{ref}: a state has definition {record.definition}, the flow has {definition}. Rebuild into a new "
            "generation (--generation). If both mean the same and source, siblings and co_partitioned are the same, go on "
            "with --accept definition"
        )
    return KeyState(record.state, record.histories, stored.version)


def save_states(run: Run, stage: Stage, states: Mapping[bytes, KeyState]) -> None:
    """Write the changed states of a stage, each on condition of the version that was loaded.

    Raises:
        StoreWentBack: A bucket has less than it acknowledged to this run.
    """
    marks = run.stores[stage.name].save(
        run.stage_ref(stage),
        writes_of(states, stage.definition),
        epoch=run.epoch,
        batch=run.batch,
        known=run.known.of(stage.name),
        downstream=run.known.downstream(stage.name),
    )
    run.known.note(stage.name, marks)


def writes_of(states: Mapping[bytes, KeyState], definition: str) -> list[Write]:
    """The conditional writes of changed states."""
    return [
        Write(key, state.version, encode_record(StateRecord(definition, state.fold, state.histories)))
        for key, state in states.items()
    ]
