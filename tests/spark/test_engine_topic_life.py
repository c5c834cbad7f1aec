"""Topics that grow or lose records in a whole chain: a republisher, then the engine."""

import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from aggregations.errors import RunRefusedError
from envelope import decode
from jobs.republish import InputRecord, InputTopics, OutputRecord, Republisher
from persistence.kafka import AcknowledgedProducer
from tests.messages import Leg
from tests.support.flows import PATHS, Path, fleet, totals
from tests.support.world import Sent, World, alone, legs, verdicts

pytestmark = [pytest.mark.spark, pytest.mark.integration]


def by_aircraft(record: InputRecord) -> OutputRecord:
    """The unchanged leg; the root topic is keyed by its carrier."""
    return OutputRecord(key=leg_of(record.payload).tail.encode())


def leg_of(payload: bytes) -> Any:
    return Leg.FromString(payload)


@pytest.mark.parametrize("path", PATHS)
def test_partitions_added_at_the_root_and_in_the_middle_make_new_lanes_and_copies_are_dropped(
    world: World, topic: Callable[..., str], path: Path
) -> None:
    root, group, sent, flow = topic(partitions=2, name="root"), uuid.uuid4().hex, legs(160), fleet(world.topic, path)

    def produced(some: list[Any]) -> None:
        with AcknowledgedProducer(world.settings) as producer:
            for leg in some:
                producer.send(root, leg.SerializeToString(), leg.carrier.encode())
            producer.flush()

    def republished() -> None:
        source = InputTopics.of(root, "raw")
        service = Republisher(
            by_aircraft,
            source=source,
            target=world.topic,
            name="kit",
            group=group,
            settings=world.settings,
            accept=["grown-undrained"],  # partitions are added while it does not run
        )
        service.run(until_caught_up=True)

    produced(sent[:60])
    republished()
    world.run(flow)
    first = world.records()
    world.topics.add_partitions(root, 4)
    produced(sent[60:120])
    republished()
    world.topics.add_partitions(world.topic, 5)
    produced(sent[120:])
    # A republisher that is set back: everything since half-way comes again, to the partitions that there are now.
    back = {place: offset // 2 for place, offset in world.topics.group_offsets(group, [root]).items()}
    world.topics.alter_group_offsets(group, back)
    republished()
    report = world.run(flow)
    found = verdicts(report)["aircraft"]
    assert found["new_lane"] > 0
    assert found["duplicate"] + found["duplicate_in_batch"] + found["below_floor"] > 0
    world.check(flow, first, [record for record in world.records() if record not in first])
    assert world.results(flow, "aircraft") == totals(sent, "tail")
    assert world.results(flow, "carrier") == totals(sent, "carrier")


@pytest.mark.parametrize("path", PATHS)
def test_a_compacted_source_is_refused_and_when_accepted_what_is_left_of_it_is_folded_once(
    world: World, path: Path
) -> None:
    admin = AdminClient({"bootstrap.servers": world.settings.bootstrap})
    broker = str(admin.list_topics(timeout=30).controller_id)
    _set(admin, ConfigResource(ResourceType.BROKER, broker), {"log.cleaner.backoff.ms": "50"})
    rules = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.001", "segment.ms": "1"}
    _set(admin, ConfigResource(ResourceType.TOPIC, world.topic), rules)
    sent, flow = legs(40, tails=4), fleet(world.topic, path)
    world.send(alone(leg, partition=0) for leg in sent[:20])
    with pytest.raises(RunRefusedError, match=rf"{world.topic} is compacted.*--accept compacted-source"):
        world.run(flow)
    world.run(flow, accept=["compacted-source"])
    world.send(alone(leg, partition=0) for leg in sent[20:])
    deadline = time.monotonic() + 60
    while len(legs_in(world)) > len({leg.tail for leg in sent}):  # of each key the last one stays
        assert time.monotonic() < deadline, "the log is not compacted within a minute"
        world.send([Sent(b"", b"rolls the segment", partition=0)])
    left = legs_in(world)
    world.run(flow, accept=["compacted-source"])
    kept = [leg_of(decode(record.value).payload) for record in left if record.offset >= 20]
    assert kept
    assert world.results(flow, "aircraft") == totals([*sent[:20], *kept], "tail")
    assert world.run(flow, accept=["compacted-source"]).records <= 1


def legs_in(world: World) -> list[Any]:
    return [record for record in world.records() if record.value]


def _set(admin: AdminClient, resource: ConfigResource, settings: dict[str, str]) -> None:
    for name, value in settings.items():
        resource.add_incremental_config(ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET))
    for done in admin.incremental_alter_configs([resource]).values():
        done.result(30)
