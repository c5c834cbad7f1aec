"""The table of bad inputs against the codec and the pure half of a republisher."""

import pytest

from envelope import decode
from envelope.hops import HopWriter
from jobs.republish import InputRecord, InputTopics, Processor, identity
from tests.unit.bad_inputs import BAD_INPUTS, OFFSET, PARTITION, TOPIC, BadInput, reason

NAMES = [bad.name for bad in BAD_INPUTS]


def test_every_bad_input_has_a_name_of_its_own() -> None:
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize("bad", BAD_INPUTS, ids=NAMES)
def test_the_codec_reads_it_or_says_why_not(bad: BadInput) -> None:
    for value in bad.values:
        assert reason(lambda value=value: decode(value)) in (bad.codec or {None})


@pytest.mark.parametrize("bad", BAD_INPUTS, ids=NAMES)
def test_a_republisher_passes_it_on_or_says_why_not(bad: BadInput) -> None:
    processor = Processor(
        identity, via="r2", source=InputTopics((TOPIC,)), targets={"out": 1_048_588}, roots={"raw", "t0", TOPIC}
    )
    hops = HopWriter(TOPIC, PARTITION, "r2")
    for value in bad.values:
        record = InputRecord(TOPIC, PARTITION, OFFSET, bad.key, value, bad.headers, bad.timestamp_ms)
        result = reason(lambda record=record: processor.process(record, hops))
        assert result in (bad.processor or {None})
        if result is None:
            (out,) = processor.process(
                InputRecord(TOPIC, PARTITION, OFFSET, bad.key, value, bad.headers, bad.timestamp_ms), hops
            )
            assert (out.key, tuple(out.headers)) == (bad.key, bad.headers)
            before, after = decode(value), decode(out.value)
            assert after.chain[:-1] == before.chain
            assert (after.payload, after.unknown) == (before.payload, before.unknown)
