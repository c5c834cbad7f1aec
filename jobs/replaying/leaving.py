"""What a rebuild sends when it becomes live: what it held, and the states that the flow publishes."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from itertools import islice
from typing import Final, TypeAlias

from aggregations.definition.flow import Stage
from aggregations.definition.sessions import SessionWindow, are_sessions, row_key
from aggregations.definition.windows import Window
from aggregations.engine.held import HELD as LETTERS
from aggregations.engine.held import HeldLetter, dropping, forget_held, held_letters, note_dropping
from aggregations.errors import RunRefusedError
from aggregations.per_message.stage import KeyState
from aggregations.run.begin import begin, look
from aggregations.run.border import removed_by_stage
from aggregations.run.held_outputs import HELD_OUTPUTS, HeldOutput, held_outputs
from aggregations.run.run import Run
from aggregations.run.snapshots import snapshots_of
from aggregations.run.states import due_of, state_of, states_in
from envelope import Hop
from envelope.deadletter import DeadLetterHeaders
from jobs.dead_letters.discard import give_up
from jobs.dead_letters.letters import Selection, StoredDeadLetter
from jobs.replaying.generations import Generations
from persistence.commit.faults import HELD, effect
from persistence.errors import StoreError
from persistence.kafka import AcknowledgedProducer, KafkaSettings, Topics
from persistence.kafka.producer import COMMAND_BATCH_BYTES
from persistence.manifest import Rebuilt
from persistence.names import FlowRef
from persistence.protocol import StageRef, StateStore, Stored
from persistence.record import decode_record

_Held: TypeAlias = Callable[[StateStore, FlowRef], Iterable[HeldLetter | HeldOutput]]

_PAGE: Final = 1_000
"""States of a generation whose keys are looked up in the other one at once."""


def send_letters(found: Generations, generation: int, kafka: KafkaSettings) -> int:
    """Send the dead letters that a rebuild held, then remove them from its store. A crash sends them again.

    Returns:
        Their number.

    Raises:
        RunRefusedError: A command that was interrupted has begun to drop them.
        BrokerError: One was not acknowledged.
        StoreError: The store does not answer, or a newer rebuild has begun.
    """
    ref = found.ref(generation)
    if dropping(found.stores[0], ref):
        raise RunRefusedError(
            f"{ref}: an interrupted swap has begun to drop its dead letters. Drop all of them (--letters drop), or "
            "give up the rebuild with --abandon"
        )
    return _send_held(found, generation, kafka, LETTERS, held_letters)


def drop_letters(found: Generations, generation: int, note: Rebuilt) -> int:
    """Give up the dead letters that a rebuild held, as `headwater discard` does, then remove them from its store.

    Their holes are filled: otherwise they would wait for a dead letter that nobody has. Before the first one, a note is
    written: the letters that an interrupted command has given up do not show any more that their keys are known.

    Args:
        found: The generations.
        generation: The rebuild.
        note: The note for its manifests.

    Returns:
        Their number.

    Raises:
        RunRefusedError: The key of one cannot be found any more, so its hole cannot. Nothing is written then.
        StoreError: A store does not answer, or a newer command has begun.
    """
    ref, store, selection = found.ref(generation), found.stores[0], Selection(unproven=True)
    began = dropping(store, ref)
    with closing(look(found.flow, found.run.urls, generation=generation)) as seen:
        counted = give_up(seen, _as_stored(store, ref, after=began), selection=selection, apply=False)
    if unknown := counted.unusable.total():
        raise RunRefusedError(
            f"{ref}: {unknown} of its dead letters cannot be dropped, because their key is unknown. Send them with the swap, "
            "without --letters drop"
        )
    if not counted.dead_letters and not began:
        return 0
    with closing(begin(found.flow, found.run.urls, generation=generation, rebuilt=note)) as run:
        effect(HELD, lambda: note_dropping(store, ref, epoch=run.epoch))
        done = give_up(run, _as_stored(store, ref), selection=selection, apply=True)
        with suppress(StoreError):  # the work is done; without a clean end the next run only doubts needlessly
            run.finish()
        effect(HELD, lambda: forget_held(store, ref.stage(LETTERS), epoch=run.epoch))
    return done.dead_letters


def _as_stored(store: StateStore, ref: FlowRef, *, after: int = 0) -> Iterator[StoredDeadLetter]:
    """The dead letters that a rebuild holds, as if they were in their topic already."""
    for number, one in enumerate(held_letters(store, ref, after=after)):
        facts = DeadLetterHeaders.read(one.headers)
        yield StoredDeadLetter(Hop(one.topic, 0, number), one.key, one.value, one.headers, facts)


def send_outputs(found: Generations, generation: int, kafka: KafkaSettings) -> int:
    """Send the outputs that a rebuild held, then remove them from its store. A crash sends them again.

    Returns:
        Their number.

    Raises:
        BrokerError: One was not acknowledged.
        StoreError: The store does not answer, or a newer rebuild has begun.
    """
    return _send_held(found, generation, kafka, HELD_OUTPUTS, held_outputs)


def send_states(found: Generations, generation: int, before: int, kafka: KafkaSettings) -> int:
    """Publish every state of the stages that publish their states, as `publish_states` does.

    The run of a rebuild published none, and from now on only changed states are published. A snapshot of a higher
    generation is newer for readers, whatever its version. A key that only the generation before has gets a tombstone, a
    record without a value: readers of a compacted topic lose it.

    Args:
        found: The generations.
        generation: The rebuild.
        before: The generation that it replaces.
        kafka: Settings of the Kafka cluster.

    Returns:
        Number of states.

    Raises:
        BrokerError: One was not acknowledged.
        StoreError: A store does not answer.
    """
    stages = [stage for stage in found.flow.stages if stage.state_topics]
    largest = Topics(kafka).max_message_bytes(topic for stage in stages for topic in stage.snapshots) if stages else {}

    def send(producer: AcknowledgedProducer) -> int:
        count = 0
        for stage in stages:
            count += _send_stage(found, generation, stage, producer, largest) if stage.snapshots else 0
            for topics, key in tombstones(found, generation, before, stage):
                for topic in topics:
                    producer.send(topic, None, key)
        return count

    return effect(HELD, lambda: _sent(kafka, send)) if stages else 0


def tombstones(found: Generations, generation: int, before: int, stage: Stage) -> Iterator[tuple[Sequence[str], bytes]]:
    """What a generation no longer publishes of a stage, and the generation before has.

    A state, window or session that has left the store of the new generation, because it was due, is not missing.

    Args:
        found: The generations.
        generation: The new generation.
        before: The generation before.
        stage: The stage, as the new generation defines it.

    Yields:
        Topics, and the key of a message in them.

    Raises:
        Corrupt: A state cannot be read.
        StoreError: A store does not answer.
    """
    old, new, name = found.ref(before).stage(stage.name), found.ref(generation).stage(stage.name), stage.name
    kept = (store for store, manifest in found.manifests(before) if manifest and name in manifest.kept)
    states = found.run.stores[next(kept, name)].scan(old)
    run = Run(found.flow, found.ref(generation), found.run.stores, found.run.urls, 0, None)
    gone = removed_by_stage(run).get(name)
    while page := dict(islice(states, _PAGE)):
        now = states_in(found.run.stores[name].load(new, list(page)), new, stage, None)
        for key, stored in page.items():
            then, state = state_of(stored, old, key), now.get(key)
            if not then.folded:
                continue
            if stage.snapshots and not (state and state.folded) and not _left(stage, old, key, stored, gone):
                yield stage.snapshots, key
            if stage.final_snapshots:
                still = _closing(stage, key, state) if state and state.folded else {}
                for own, due in _closing(stage, key, then).items():
                    if own not in still and (gone is None or due is None or due > gone):
                        yield stage.final_snapshots, own


def _closing(stage: Stage, key: bytes, state: KeyState) -> dict[bytes, int | None]:
    """Key of the message that publishes each window or session of a state when it closes, and its due time.

    The due time is None if the state was made with another kind of window.
    """
    window = stage.aggregate.window
    if isinstance(window, SessionWindow) and are_sessions(state.fold):
        return {row_key(window.key_of(key, start, end)): window.due(end) for start, end, _ in state.fold}
    return {key: window.due(key) if isinstance(window, Window) and _is_of(window, key) else None}


def _left(stage: Stage, ref: StageRef, key: bytes, stored: Stored, gone: int | None) -> bool:
    """Whether a state was due at or before a time; not if the stage has other windows, or another expiry, now."""
    if gone is None:
        return False
    window = stage.aggregate.window
    if isinstance(window, Window):
        if not _is_of(window, key):
            return False
    elif decode_record(stored.value, ref, key).definition != stage.definition:
        return False
    due = due_of(stage, ref, key, stored.value)
    return due is not None and due <= gone


def _is_of(window: Window, key: bytes) -> bool:
    """Whether a key is that of a state with windows."""
    try:
        window.split(key)
    except ValueError:
        return False
    return True


def _send_stage(
    found: Generations, generation: int, stage: Stage, producer: AcknowledgedProducer, largest: Mapping[str, int]
) -> int:
    """Send the states of a stage, and return their number."""
    ref, count = found.ref(generation).stage(stage.name), 0
    for key, stored in found.run.stores[stage.name].scan(ref):
        states = states_in({key: stored}, ref, stage, None)
        # A snapshot has the version that a state gets by being written; these have been written.
        earlier = {key: replace(state, version=state.version - 1) for key, state in states.items()}
        messages = snapshots_of(
            *(stage, earlier),
            ref=ref.flow_ref,
            epoch=stored.epoch,
            batch=stored.batch,
            attempt=1,
            largest=largest,
        )
        for message in messages:
            producer.send(message.topic, message.value, message.key, message.headers)
        count += bool(messages)
    return count


def _send_held(found: Generations, generation: int, kafka: KafkaSettings, stage: str, held: _Held) -> int:
    ref, store = found.ref(generation), found.stores[0]
    epoch = store.installed_epoch(ref)  # before they are read: what a newer command holds stays

    def send(producer: AcknowledgedProducer) -> int:
        count = 0
        for count, one in enumerate(held(store, ref), start=1):  # noqa: B007 - the count is the result
            producer.send(one.topic, one.value, one.key, one.headers)
        return count

    count = effect(HELD, lambda: _sent(kafka, send))
    if count:
        effect(HELD, lambda: forget_held(store, ref.stage(stage), epoch=epoch))
    return count


def _sent(kafka: KafkaSettings, send: Callable[[AcknowledgedProducer], int]) -> int:
    """Send records, and return when all are acknowledged."""
    with closing(AcknowledgedProducer(kafka, batch_size=COMMAND_BATCH_BYTES)) as producer:
        count = send(producer)
        producer.flush()
    return count
