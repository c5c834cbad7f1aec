"""The simulated service makes what the real republisher makes, and the worlds hold with the real one in its place."""

from dataclasses import replace

import msgspec
import pytest

from aggregations.simulation.service import Outgoing, Service, payload_of
from aggregations.simulation.shrink import outcome
from aggregations.simulation.steps import draw_world
from aggregations.simulation.topology import digest
from aggregations.simulation.world import World
from envelope import decode
from envelope.hops import HopWriter
from jobs.republish.passage import Passage
from jobs.republish.record import Output, Record
from jobs.republish.source import Source

SIMULATED = Service._passed


def really_passed(service, record):
    """What the real republisher makes of a record of a simulated topic."""
    spec = service.passage
    if spec.foreign:  # the kit always writes what such a one leaves out
        yield from SIMULATED(service, record)
        return
    retry = f"{spec.name}.retry"
    payloads = spec.outputs(payload_of(record))

    def transform(_):
        return [Output(msgspec.json.encode(one), key=one["k"].encode(), event_id=one["id"]) for one in payloads]

    passage = Passage(
        transform, via=spec.name, source=Source((spec.source,)), targets={spec.target: 1 << 20}, retry_topics=(retry,)
    )
    hops = HopWriter(record.topic, record.partition, spec.name, topic_id=record.topic_id)
    real = Record(record.topic, record.partition, record.offset, record.key, record.value, topic_id=record.topic_id)
    if spec.retries and record.topic == spec.source and service._detours(payload_of(record)):
        passage.open(real)
        made = passage.detour(real, hops, retry, ())
        yield Outgoing(retry, made.key, made.value, None, payload_of(record))
        return
    for payload, made in zip(payloads, passage.process(real, hops), strict=True):
        partition = digest(payload["id"], str(service.attempts)) if spec.spread else None
        yield Outgoing(made.topic, made.key, made.value, partition, payload)


def comparable(output):
    """An output with its envelope taken apart. The kit writes more than the lineage needs."""
    envelope = decode(output.value)
    chain = tuple(replace(hop, count=None, index=None if hop.transparent else hop.index) for hop in envelope.chain)
    return output._replace(value=replace(envelope, chain=chain, key=None))


def test_every_output_is_what_the_real_republisher_makes(monkeypatch):
    compared = 0

    def both(service, record):
        nonlocal compared
        simulated, real = list(SIMULATED(service, record)), list(really_passed(service, record))
        assert [comparable(one) for one in simulated] == [comparable(one) for one in real]
        compared += len(real)
        return simulated

    monkeypatch.setattr(Service, "_passed", both)
    for seed in range(40):
        spec, steps = draw_world(seed)
        World(spec).run(steps)
    assert compared > 1000


@pytest.mark.parametrize("start", range(0, 200, 50), ids=lambda start: f"from {start}")
def test_worlds_hold_with_the_real_republisher_in_them(start, monkeypatch):
    monkeypatch.setattr(Service, "_passed", really_passed)
    failed = {seed: text for seed in range(start, start + 50) if (text := outcome(seed))}
    assert not failed
