"""What a rebuild sends when it becomes live: the dead letters that it held, and the states that the flow publishes."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

from aggregations.definition.flow import Stage
from aggregations.engine.held import forget_letters, held_letters
from aggregations.run.snapshots import snapshots_of
from aggregations.run.states import states_in
from jobs.replaying.generations import Generations
from persistence.commit.faults import HELD, effect
from persistence.kafka import AcknowledgedProducer, KafkaSettings


def send_letters(found: Generations, generation: int, kafka: KafkaSettings) -> int:
    """Send the dead letters that a rebuild held, then remove them from its store. A crash sends them again.

    Returns:
        Their number.

    Raises:
        BrokerError: One was not acknowledged.
        StoreError: The store does not answer, or a newer rebuild has begun.
    """
    ref, store, count = found.ref(generation), found.stores[0], 0
    epoch = store.installed_epoch(ref)  # before they are read: what a newer command holds stays

    def send() -> None:
        nonlocal count
        with closing(AcknowledgedProducer(kafka)) as producer:
            for count, letter in enumerate(held_letters(store, ref), start=1):  # noqa: B007 - the count is the result
                producer.send(letter.topic, letter.value, letter.key, letter.headers)
            producer.flush()

    effect(HELD, send)
    if count:
        effect(HELD, lambda: forget_letters(store, ref, epoch=epoch))
    return count


def send_states(found: Generations, generation: int, kafka: KafkaSettings) -> int:
    """Publish every state of the stages that publish their states, as `publish_states` does.

    The run of a rebuild published none, and from now on only changed states are published. A snapshot of a higher
    generation is newer for readers, whatever its version.

    Returns:
        Number of states.

    Raises:
        BrokerError: One was not acknowledged.
        StoreError: A store does not answer.
    """
    stages = [stage for stage in found.flow.stages if stage.snapshots]
    return effect(HELD, lambda: _send_stages(found, generation, kafka, stages)) if stages else 0


def _send_stages(found: Generations, generation: int, kafka: KafkaSettings, stages: Sequence[Stage]) -> int:
    count = 0
    with closing(AcknowledgedProducer(kafka)) as producer:
        for stage in stages:
            ref = found.ref(generation).stage(stage.name)
            for key, stored in found.run.stores[stage.name].scan(ref):
                states = states_in({key: stored}, ref, stage, None)
                # A snapshot has the version that a state gets by being written; these have been written.
                before = {key: replace(state, version=state.version - 1) for key, state in states.items()}
                messages = snapshots_of(stage, before, ref=ref.flow_ref, epoch=stored.epoch, attempt=1)
                for message in messages:
                    producer.send(message.topic, message.value, message.key, message.headers)
                count += bool(messages)
        producer.flush()
    return count
