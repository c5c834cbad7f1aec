"""A step in which states of a stage are spoiled, and an operator mends them: by the real code, from the topics."""

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from itertools import count
from typing import Any

import msgspec

from aggregations.definition.flow import Stage
from aggregations.errors import RunRefusedError
from aggregations.run.begin import look
from aggregations.run.memory import MemoryRunner
from aggregations.run.mend import Mending, check_can_mend
from aggregations.run.run import Run
from envelope import Histories
from jobs.mending import MENDS, Sides, apply_mends
from persistence.errors import Fenced, StoreError
from persistence.protocol import StageRef, Stored
from persistence.record import StateRecord, decode_record, encode_record
from tests.simulation.driver import METADATA_MAX_AGE
from tests.simulation.faults import ENDS, Crash, Script
from tests.simulation.functions import digest
from tests.simulation.kafka import CLOCK
from tests.simulation.oracle import Violation
from tests.simulation.stores import SCHEME, forget
from tests.simulation.world import World

_EFFECTS = 14
"""Faults are planned among so many effects of a mend: its epoch, the pointer, manifests and states in two stores."""
_REFUSED = ("dead letters that wait", "unproven")
"""Why a mend may be refused: what it would fold waits, or what it would take away may be right."""
_numbers = count()


def repair(world: World, a: int, b: int, c: int) -> None:
    """Spoil states of a stage and mend them, dying on the way; sometimes another run begins before they are written."""
    if not world.replayable or not _ends(world):
        return
    stages = world.spec.flow.stages
    stage = stages[a % len(stages)]
    states = world.home(stage.name).stage(world.live.ref.stage(stage.name))
    right = dict(states)
    spoiled = _spoil(states, world.live.ref.stage(stage.name), b)
    try:
        for number in range(c % 3):
            script = Script({(c >> (2 + 3 * number)) % _EFFECTS: ENDS[(c >> number) % len(ENDS)]})
            _mend(world, stage, 1 + b % 9, script, begins=c % 16 == 1)
        _mend(world, stage, 1 + b % 7, Script())
        _compare(world.live.ref.stage(stage.name), right, states)
        again = _mend(world, stage, 1 + c % 5, Script())
    except RunRefusedError as refused:
        if not any(cause in str(refused) for cause in _REFUSED):
            raise Violation(f"states cannot be mended: {refused}") from refused
        # The operator would redrive the letters first, or rebuild the flow; here nothing was spoiled.
        for key in [key for key, one in spoiled.items() if states.get(key) == one]:
            states.pop(key, None)
            states.update({key: right[key]} if key in right else {})
        _compare(world.live.ref.stage(stage.name), right, states)
        again = {}
    # Which lanes retire depends on batches.
    if wrong := {key for key, what in again.items() if what != Mending.POSITIONS}:
        raise Violation(f"stage {stage.name}: {wrong} are mended again")
    world.watch.forget()


def _ends(world: World) -> bool:
    """Let the engine end cleanly; return whether it did, and no partition was added that is not read yet."""
    world.engine(1000)
    world.check()
    if world.driver is None:
        return False
    driver, world.driver = world.driver, None
    try:
        driver.runner.run.finish()
    except Fenced:  # by a rebuild that was given up; without new records the engine has not noticed yet
        return False
    manifests = [store.load_manifest(world.live.ref) for store in world.stores.values()]
    return all(one is not None and one.clean and not one.growth for one in manifests)


def _spoil(states: dict[bytes, Stored], ref: StageRef, number: int) -> dict[bytes, Stored | None]:
    """Change some states, empty their positions, or lose them; return these as they are then, by key."""
    found = dict[bytes, Stored | None]()
    for key, stored in list(states.items()):
        what = digest(repr(key), str(number)) % 5
        record = decode_record(stored.value, ref, key)
        if what == 0:
            del states[key]
            found[key] = None
        elif what == 1 and (wrong := _wrong(record.state)) is not None:
            states[key] = found[key] = _with(stored, msgspec.structs.replace(record, state=wrong))
        elif what == 2:
            holes = record.histories.holes
            states[key] = found[key] = _with(stored, msgspec.structs.replace(record, histories=Histories({}, holes)))
    return found


def _with(stored: Stored, record: StateRecord) -> Stored:
    return msgspec.structs.replace(stored, value=encode_record(record))


def _wrong(state: Any) -> Any:
    """Another state of the same shape; None for that of a filter."""
    if isinstance(state, list):
        return [[start, end, _wrong(one)] for start, end, one in state]
    numbers = isinstance(state, dict) and all(isinstance(one, int) for one in state.values())
    return {name: one + 1 for name, one in state.items()} if numbers else None


def _mend(world: World, stage: Stage, size: int, script: Script, *, begins: bool = False) -> Mapping[bytes, Mending]:
    """Mend all keys of a stage; the process may die.

    Args:
        world: The world.
        stage: The stage.
        size: Records of each partition in a batch of the fold.
        script: The faults.
        begins: Another run begins and ends after the states were read.

    Returns:
        What was done, by key; nothing if the process died.

    Raises:
        RunRefusedError: They cannot be mended.
    """
    with closing(look(world.spec.flow, world.urls)) as run:
        check_can_mend(run, MENDS)
        with _folded(world, run, size) as folded:
            ref, store = run.stage_ref(stage), folded.run.stores[stage.name]
            keys = {*world.home(stage.name).stage(ref), *(key for key, _ in store.scan(ref))}
            mends = Sides.of(run, folded.run, folded.report, stage, keys).mends(run.batch)
        if begins:
            world.start().runner.run.finish()
        before = {url: store.copy() for url, store in world.stores.items()}
        try:
            world.under(script, lambda: apply_mends(run, stage, mends, why="", publish=lambda _: None))
        except (Crash, StoreError):
            return {}
        except RunRefusedError:
            if not begins or before != {url: store.copy() for url, store in world.stores.items()}:
                raise
            return {}
        if begins and mends:
            raise Violation("a mend does not see that a run began after the states were read")
        return {one.key: one.mending for one in mends}


@contextmanager
def _folded(world: World, live: Run, size: int) -> Iterator[MemoryRunner]:
    """A fold of what the live states have read, into a store of its own."""
    url, flow, logs = f"{SCHEME}://fold{next(_numbers)}", world.spec.flow, world.cluster.topics
    runner = MemoryRunner(
        flow,
        dict.fromkeys(flow.stage_names, url),
        topic_ids={topic: log.topic_id for topic, log in logs.items()},
        ends={},
        whole={topic: partial(_ends_of, world, topic) for topic in flow.topics},
        clock=lambda: CLOCK.time_ns() / 1e9,
        metadata_max_age=METADATA_MAX_AGE,
        generation=live.ref.generation,
    )
    try:
        for topic in flow.topics:
            runner.run.start_at(topic, logs[topic].topic_id, dict.fromkeys(_ends_of(world, topic), 0))
        while records := [
            record
            for place, end in live.start.items()
            for record in world.cluster.read(*place, runner.run.start.get(place, 0), size)
            if record.offset < end
        ]:
            runner.process(records)
        yield runner
    finally:
        forget(url)


def _ends_of(world: World, topic: str) -> dict[int, int]:
    return {number: partition.high for number, partition in enumerate(world.cluster.topics[topic].partitions)}


def _compare(ref: StageRef, right: Mapping[bytes, Stored], found: Mapping[bytes, Stored]) -> None:
    """Check that the states have the results and holes that they had before they were spoiled."""
    for key in sorted(right.keys() | found.keys()):
        before, after = (
            decode_record(side[key].value, ref, key) if key in side else StateRecord("", None, Histories())
            for side in (right, found)
        )
        if (before.state, before.histories.holes) != (after.state, after.histories.holes):
            raise Violation(f"stage {ref.stage}, key {key!r}: mended to {after.state}, not {before.state}")
