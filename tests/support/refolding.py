"""History in Kafka, live states of it, and their audit."""

import random
from contextlib import closing
from typing import Any

import msgspec
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from aggregations.definition.flow import Flow
from envelope import Envelope, Hop, encode
from jobs.refolding.audit import Audit, audit
from persistence.protocol import FlowRef, Write
from persistence.record import decode_record, encode_record
from persistence.registry import open_store
from tests.messages import Leg
from tests.support.options import called
from tests.support.world import Sent, World, alone, legs, republished

BEGIN_US = 1_600_000_000_000_000
MINUTE_US = 60_000_000


def at_times(found: list[Any], begin: int = 0) -> list[Sent]:
    """Legs that took off in turn, a minute apart, each up to three minutes early; some are sent again soon after."""
    rng, messages = random.Random(begin), []
    for i, one in enumerate(found, begin):
        hop = Hop("raw", i % 3, i // 3, via="kit", index=0, count=1)
        time = BEGIN_US + (i - rng.randrange(3)) * MINUTE_US
        value = encode(Envelope(one.SerializeToString(), (hop,), key=one.tail.encode(), event_time_us=time))
        messages.append(Sent(value, one.tail.encode()))
        if rng.randrange(5) == 0:
            messages.append(messages[rng.randrange(max(len(messages) - 4, 0), len(messages))])
    return messages


def history(world: World, count: int = 200) -> list[Any]:
    """Legs with copies, some of them late, records without an envelope and diverted ones."""
    sent = legs(count)
    again = [*range(count), *range(count // 2, count)]
    poison = [Sent(b"no envelope", b"N1"), alone(Leg(tail="N1", carrier="AA", minutes=-1))]
    world.send([*republished(sent, again[: count // 2]), *poison, *republished(sent, again[count // 2 :])])
    return sent


def audited(world: World, flow: Flow[Any], **options: Any) -> Audit:
    work = world.directory / "work"
    before = untouched(world, flow)
    try:
        return called(audit, flow, kafka=world.settings, stores=world.stores(flow), work=work, **options)
    finally:
        assert [one.name for one in work.iterdir()] == ["lock"]
        assert untouched(world, flow) == before


def untouched(world: World, flow: Flow[Any]) -> Any:
    """The live states, with their versions, and what is in the dead-letter topic."""
    found = [{key: (one.state, one.version, one.epoch) for key, one in views.items()} for views in world.untimed(flow)]
    with closing(open_store(world.stores(flow)[flow.stages[0].name])) as store:
        manifests = [store.load_manifest(FlowRef(flow.name, generation)) for generation in (1, 2)]
    return found, manifests, len(world.records(world.dead))


def delete_before(world: World, *places: tuple[int, int], topic: str = "") -> None:
    """Delete the records of a topic, by default the source, before these offsets, by partition, as retention does."""
    admin = AdminClient({"bootstrap.servers": world.settings.bootstrap})
    wanted = [TopicPartition(topic or world.topic, partition, offset) for partition, offset in places]
    for deleted in admin.delete_records(wanted).values():
        deleted.result(20)


def tamper(world: World, flow: Flow[Any], stage: str, key: bytes, **changed: Any) -> None:
    """Change the state of a key in its store, as an error of the engine would."""
    ref = FlowRef(flow.name, 1)
    with closing(open_store(world.stores(flow)[stage])) as store:
        stored = store.load(ref.stage(stage), [key])[key]
        record = decode_record(stored.value, ref.stage(stage), key)
        wrong = encode_record(msgspec.structs.replace(record, state={**record.state, **changed}))
        store.save(
            ref.stage(stage), [Write(key, stored.version, wrong)], epoch=store.installed_epoch(ref), batch=1_000_000
        )
