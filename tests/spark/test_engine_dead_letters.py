"""Records that cannot be used: set aside byte for byte with a reason, acknowledged before the commit, never in the way."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource

from aggregations.definition.source import Topic
from aggregations.engine import batches
from aggregations.errors import RunRefusedError
from envelope import Envelope, Hop, Limits, Reason, Verdict, decode, encode
from envelope.deadletter import own_headers
from jobs.dead_letters.redrive import redrive
from persistence.commit.faults import Fault, FaultOutcome, Injector, use
from persistence.errors import Transient
from persistence.kafka import BrokerRefused
from tests.messages import Leg
from tests.support.flows import PATHS, Path, counted, fleet, totals
from tests.support.world import Sent, World, alone, legs, verdicts
from tests.unit.bad_inputs import BAD_INPUTS

pytestmark = [pytest.mark.spark, pytest.mark.integration]

HEADERS = (("trace", b"1"), ("trace", b"\xff\x00"), ("empty", b""), ("null", None))


def enveloped(leg: Any = None, *chain: Hop, **fields: object) -> bytes:
    payload = (leg or Leg(tail="N1", carrier="AA", minutes=3)).SerializeToString()
    return encode(Envelope(payload, chain, **fields), Limits(hops=64))  # type: ignore[arg-type]


def bad_records(topic: str) -> list[tuple[Sent, Reason]]:
    """One record for everything that can be wrong."""
    good = enveloped(key=b"N1")
    loop = (Hop("raw", 0, 1, via="a", index=0), Hop("mid", 0, 1, via="b", index=0), Hop("raw", 0, 2, via="c", index=0))
    return [
        (Sent(None, b"N1", HEADERS), Reason.EMPTY),
        (Sent(b"", b"N1", HEADERS), Reason.EMPTY),
        (Sent(good[:-3], b"N1", HEADERS), Reason.TRUNCATED),
        (Sent(good[:9] + bytes([good[9] ^ 4]) + good[10:], b"N1"), Reason.CHECKSUM_MISMATCH),
        (Sent(b'{"tail": "N1"}', b"N1", HEADERS), Reason.NOT_AN_ENVELOPE),
        (Sent(b"\x08\x63" + good[2:], b"N1"), Reason.UNSUPPORTED_FORMAT),
        (Sent(enveloped(Leg(carrier="AA", minutes=3)), None, HEADERS), Reason.NULL_KEY),
        (Sent(enveloped(Leg(carrier="AA", minutes=3)), b"N1"), Reason.NULL_KEY),
        (Sent(good, b"N2"), Reason.KEY_MISMATCH),
        (Sent(enveloped(None, *loop), b"N1"), Reason.CHAIN_LOOP),
        (Sent(enveloped(None, Hop(topic, 0, 1, via="a", index=0)), b"N1"), Reason.CHAIN_LOOP),
        (Sent(enveloped(None, *(Hop(f"t{i}", 0, 1) for i in range(33))), b"N1"), Reason.TOO_MANY_HOPS),
        (Sent(enveloped(destination="elsewhere"), b"N1"), Reason.WRONG_DESTINATION),
        (Sent(enveloped(payload_type="other.Type"), b"N1"), Reason.UNKNOWN_PAYLOAD_TYPE),
        (Sent(encode(Envelope(b"\xff\xff\xff")), b"N1"), Reason.BAD_PAYLOAD),
        (Sent(encode(Envelope(bytes(5000))), b"N1"), Reason.PAYLOAD_TOO_LARGE),
        (Sent(enveloped(Leg(tail="N1", carrier="AA", minutes=-4)), b"N1", HEADERS), Reason.DIVERTED),
    ]


@pytest.mark.parametrize("path", PATHS)
def test_tombstones_are_skipped_and_counted_and_need_no_dead_letter_topic(world: World, path: Path) -> None:
    good, flow = legs(30), fleet(world.topic, path)
    mixed = [*map(alone, good), *(Sent(None, b"N1") for _ in range(7))]
    random.Random(3).shuffle(mixed)
    world.send(mixed)
    report = world.run(flow, dead_letters=None)
    assert (report.records, report.tombstones, report.reasons) == (37, 7, {})
    world.check(flow)
    assert world.results(flow, "aircraft") == totals(good, "tail")


@pytest.mark.parametrize("path", PATHS)
def test_every_bad_record_is_set_aside_as_it_came_with_its_reason_and_the_stream_goes_on(
    world: World, path: Path
) -> None:
    bad = bad_records(world.topic)
    good = legs(60)
    mixed = [*(alone(leg, headers=HEADERS) for leg in good), *(record for record, _ in bad)]
    random.Random(3).shuffle(mixed)
    world.send(mixed)
    flow = fleet(Topic(world.topic, Leg, limits=Limits(payload_bytes=4096), tombstones="dead_letter"), path)
    report = world.run(flow, max_records=30)
    assert (report.records, report.tombstones) == (len(mixed), 0)
    world.check(flow)
    assert world.results(flow, "aircraft") == totals(good, "tail")
    found = sorted((str(letter.reason), dead.value or b"") for letter, dead in world.dead_letters())
    assert found == sorted((reason.value, record.value or b"") for record, reason in bad)
    for letter, dead in world.dead_letters():
        assert (letter.topic, letter.application) == (world.topic, "fleet")
        assert letter.lineage.endswith(f"{letter.topic}:{letter.partition}:{letter.offset}")
        assert b"N1" not in b"".join(value or b"" for name, value in dead.headers if name.startswith("hw-dlq"))


@pytest.mark.parametrize("path", PATHS)
def test_a_thousand_odd_records_end_where_the_oracle_says(world: World, path: Path) -> None:
    world.send(
        Sent(value, odd.key, odd.headers)
        for odd in BAD_INPUTS
        for value in odd.values
        if len(value or b"") < 500_000  # more than that the broker does not take
    )
    flow = counted(world.topic, path)
    report = world.run(flow)
    assert report.records > 1000
    assert report.reasons == world.check(flow).report.reasons


@pytest.mark.parametrize("path", PATHS)
def test_a_batch_of_nothing_but_poison_is_committed(world: World, path: Path) -> None:
    world.send(Sent(random.Random(n).randbytes(20), b"N1") for n in range(40))
    flow = fleet(world.topic, path)
    assert world.run(flow).reasons.total() == 40
    assert world.run(flow).records == 0
    assert len(world.dead_letters()) == 40
    world.check(flow)


@pytest.mark.parametrize("path", PATHS)
def test_without_a_dead_letter_topic_the_run_ends_at_the_record_with_its_coordinates(world: World, path: Path) -> None:
    good = legs(20)
    world.send([*(alone(leg) for leg in good), Sent(b"secret payload", b"N1", partition=1)])
    flow = fleet(world.topic, path)
    with pytest.raises(RunRefusedError, match=f"{world.topic}:1:.*not_an_envelope.*--dead-letters") as refused:
        world.run(flow, dead_letters=None)
    assert "secret" not in str(refused.value)
    world.run(flow)
    world.check(flow)
    assert world.results(flow, "carrier") == totals(good, "carrier")


def test_a_dead_letter_topic_that_does_not_exist_is_refused_before_anything_is_read(world: World) -> None:
    with pytest.raises(BrokerRefused, match="no-such-topic"):
        world.run(fleet(world.topic), dead_letters="no-such-topic")


def test_what_is_larger_than_the_dead_letter_topic_takes_is_trimmed_and_points_to_its_record(
    world: World, topic: Callable[..., str]
) -> None:
    small = topic(name="small", max_message_bytes=4000)
    world.send([Sent(b"x" * 20_000, b"N1", HEADERS, partition=0), Sent(b"x" * 100, b"N1", HEADERS, partition=0)])
    world.run(fleet(world.topic), dead_letters=small)
    large, whole = world.records(small)
    assert whole.value == b"x" * 100
    assert large.value is not None
    assert b"x" * len(large.value) == large.value
    headers = dict(large.headers)
    assert (headers["hw-dlq-trimmed"], headers["hw-dlq-value-bytes"]) == (b"value", b"20000")
    assert (headers["hw-dlq-offset"], own_headers(large.headers)) == (b"0", list(HEADERS))


def mended(key: bytes | None, value: bytes | None) -> bytes:
    envelope = decode(value)
    leg: Any = Leg.FromString(envelope.payload)
    leg.minutes = 7
    return encode(replace(envelope, payload=leg.SerializeToString()))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stage", ["aircraft", "carrier"])
def test_a_record_that_is_mended_and_redriven_twice_is_folded_once_at_the_stage_where_it_died(
    world: World, path: Path, stage: str
) -> None:
    # Two of them are more than 64 bits hold, in the first stage or only in the second one.
    half: list[Any] = [
        Leg(tail="N9", carrier="AA", minutes=2**62),
        Leg(tail="N9" if stage == "aircraft" else "N10", carrier="AA", minutes=2**62),
    ]
    good, flow = [half[0], *legs(50)], fleet(world.topic, path)
    world.send(alone(leg, partition=0) for leg in [*good, half[1]])
    world.run(flow, max_records=20)
    first = world.records()
    for _ in range(2):
        redrive(world.settings, world.dead, apply=True, mend=mended)
    report = world.run(flow)
    assert verdicts(report)[stage] == {Verdict.REDRIVEN: 1, Verdict.DUPLICATE_IN_BATCH: 1}
    assert report.reasons.total() == 0
    world.check(flow, first, [record for record in world.records() if record not in first])
    once = [*good, Leg(tail="N9", carrier="AA", minutes=7)]
    assert world.results(flow, stage) == totals(once, "tail" if stage == "aircraft" else "carrier")
    assert not any(view.histories.holes for view in world.views(flow, stage).values())


def test_dead_letters_are_acknowledged_before_the_manifest_moves_and_repeated_when_it_could_not(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = fleet(world.topic)
    monkeypatch.setattr(batches, "ATTEMPTS", 2)
    world.send([alone(Leg(tail="N1", carrier="AA", minutes=1)), Sent(b"poison", b"N1")])
    with use(Injector([Fault("manifest", FaultOutcome.ERROR, n) for n in (1, 2)])), pytest.raises(Transient):
        world.run(flow)
    assert len(world.dead_letters()) >= 1
    world.run(flow)
    assert len(world.dead_letters()) >= 2
    world.check(flow)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("what", ["dead letter", "output"])
def test_nothing_is_persisted_until_the_broker_has_acknowledged_what_goes_out_before_it(
    world: World, topic: Callable[..., str], path: Path, what: str
) -> None:
    # An output that is too large would become a dead letter. The broker refuses this one as too old when it arrives.
    setting, least = ("max.message.bytes", 1) if what == "dead letter" else ("message.timestamp.before.max.ms", 0)
    refusing = topic(name="refusing", **{setting.replace(".", "_"): least})
    flow, good = fleet(world.topic, path), legs(20)
    poison = [Sent(b"poison", b"N1", partition=1)] if what == "dead letter" else []
    dead_letters = refusing if poison else topic(name="dead")
    world.send([*(alone(leg) for leg in good), *poison])
    if what == "output":
        flow = flow.publish_states(refusing) if path == "columns" else flow.publish(refusing)
    with pytest.raises(BrokerRefused, match="refusing"):
        world.run(flow, dead_letters=dead_letters)
    assert world.views(flow, "aircraft") == world.views(flow, "carrier") == {}
    assert world.ends(flow) == {0: 0, 1: 0}
    change = ConfigEntry(setting, "1048588", incremental_operation=AlterConfigOpType.SET)
    admin = AdminClient({"bootstrap.servers": world.settings.bootstrap})
    for done in admin.incremental_alter_configs(
        [ConfigResource("topic", refusing, incremental_configs=[change])]
    ).values():
        done.result(30)
    world.run(flow, dead_letters=dead_letters)
    assert world.results(flow, "carrier") == totals(good, "carrier")
    assert world.records(refusing)
