"""What a rebuild sends when it becomes live: what it held, and the states that the flow publishes."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice
from typing import Final

from aggregations.definition.flow import Stage
from aggregations.definition.windows import Window
from aggregations.engine.held import forget_letters, held_letters
from aggregations.run.border import removed_by_stage
from aggregations.run.held_outputs import forget_outputs, held_outputs
from aggregations.run.run import Run
from aggregations.run.snapshots import snapshots_of
from aggregations.run.states import due_of, state_of, states_in
from jobs.replaying.generations import Generations
from persistence.commit.faults import HELD, effect
from persistence.kafka import AcknowledgedProducer, KafkaSettings
from persistence.protocol import StageRef, Stored
from persistence.record import decode_record

_PAGE: Final = 1_000
"""States of a generation whose keys are looked up in the other one at once."""


def send_letters(found: Generations, generation: int, kafka: KafkaSettings) -> int:
    """Send the dead letters that a rebuild held, then remove them from its store. A crash sends them again.

    Returns:
        Their number.

    Raises:
        BrokerError: One was not acknowledged.
        StoreError: The store does not answer, or a newer rebuild has begun.
    """
    ref, store = found.ref(generation), found.stores[0]
    epoch = store.installed_epoch(ref)  # before they are read: what a newer command holds stays

    def send(producer: AcknowledgedProducer) -> int:
        count = 0
        for count, letter in enumerate(held_letters(store, ref), start=1):  # noqa: B007 - the count is the result
            producer.send(letter.topic, letter.value, letter.key, letter.headers)
        return count

    count = effect(HELD, lambda: _sent(kafka, send))
    if count:
        effect(HELD, lambda: forget_letters(store, ref, epoch=epoch))
    return count


def send_outputs(found: Generations, generation: int, kafka: KafkaSettings) -> int:
    """Send the outputs that a rebuild held, then remove them from its store. A crash sends them again.

    Returns:
        Their number.

    Raises:
        BrokerError: One was not acknowledged.
        StoreError: The store does not answer, or a newer rebuild has begun.
    """
    ref, store = found.ref(generation), found.stores[0]
    epoch = store.installed_epoch(ref)  # as for dead letters

    def send(producer: AcknowledgedProducer) -> int:
        count = 0
        for count, output in enumerate(held_outputs(store, ref), start=1):  # noqa: B007 - the count is the result
            producer.send(output.topic, output.value, output.key, output.headers)
        return count

    count = effect(HELD, lambda: _sent(kafka, send))
    if count:
        effect(HELD, lambda: forget_outputs(store, ref, epoch=epoch))
    return count


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

    def send(producer: AcknowledgedProducer) -> int:
        count = 0
        for stage in stages:
            count += _send_stage(found, generation, stage, producer) if stage.snapshots else 0
            for key in keys_removed(found, generation, before, stage):
                for topic in stage.state_topics:
                    producer.send(topic, None, key)
        return count

    return effect(HELD, lambda: _sent(kafka, send)) if stages else 0


def keys_removed(found: Generations, generation: int, before: int, stage: Stage) -> Iterator[bytes]:
    """Keys of a stage of which a generation has no state, and the generation before has one.

    A state that has left the store of the new generation, because it was due, is not missing.

    Args:
        found: The generations.
        generation: The new generation.
        before: The generation before.
        stage: The stage, as the new generation defines it.

    Raises:
        Corrupt: A state cannot be read.
        StoreError: A store does not answer.
    """
    old, new, store = found.ref(before).stage(stage.name), found.ref(generation).stage(stage.name), stage.name
    kept = (name for name, manifest in found.manifests(before) if manifest and stage.name in manifest.kept)
    states = found.run.stores[next(kept, store)].scan(old)
    gone = removed_by_stage(Run(found.flow, found.ref(generation), found.run.stores, found.run.urls, 0, None))
    while page := dict(islice(states, _PAGE)):
        now = states_in(found.run.stores[store].load(new, list(page)), new, stage, None)
        for key, stored in page.items():
            if (state := now.get(key)) is not None and state.folded:
                continue
            left = _left(stage, old, key, stored, gone.get(stage.name))
            if state_of(stored, old, key).folded and not left:
                yield key


def _left(stage: Stage, ref: StageRef, key: bytes, stored: Stored, gone: int | None) -> bool:
    """Whether a state was due at or before a time; not if the stage has other windows, or another expiry, now."""
    if gone is None:
        return False
    window = stage.aggregate.window
    if isinstance(window, Window):
        try:
            window.split(key)
        except ValueError:
            return False
    elif decode_record(stored.value, ref, key).definition != stage.definition:
        return False
    due = due_of(stage, ref, key, stored.value)
    return due is not None and due <= gone


def _send_stage(found: Generations, generation: int, stage: Stage, producer: AcknowledgedProducer) -> int:
    """Send the states of a stage, and return their number."""
    ref, count = found.ref(generation).stage(stage.name), 0
    for key, stored in found.run.stores[stage.name].scan(ref):
        states = states_in({key: stored}, ref, stage, None)
        # A snapshot has the version that a state gets by being written; these have been written.
        earlier = {key: replace(state, version=state.version - 1) for key, state in states.items()}
        messages = snapshots_of(stage, earlier, ref=ref.flow_ref, epoch=stored.epoch, attempt=1)
        for message in messages:
            producer.send(message.topic, message.value, message.key, message.headers)
        count += bool(messages)
    return count


def _sent(kafka: KafkaSettings, send: Callable[[AcknowledgedProducer], int]) -> int:
    """Send records, and return when all are acknowledged."""
    with closing(AcknowledgedProducer(kafka)) as producer:
        count = send(producer)
        producer.flush()
    return count
