"""Short runs of the fuzzer; `make fuzz` is the long one."""

import random

import pytest

from aggregations.columns.decode import Decoder
from aggregations.definition.element import Record
from aggregations.definition.payloads import Raw
from aggregations.definition.source import Topic
from tests.fuzz import records
from tests.fuzz.codec import corpus, fuzz, mutate
from tests.property.test_columns_decode import TOPIC_IDS, check
from tests.unit.bad_inputs import BAD_INPUTS

SEED = 20_261_121


def test_nothing_but_envelope_errors_comes_out_of_the_codec() -> None:
    outcomes = fuzz(15_000, SEED)
    assert outcomes["read"] > 500
    assert len(outcomes) > 6


def test_both_readers_of_a_flow_agree_on_damaged_envelopes() -> None:
    rng = random.Random(SEED)
    values = corpus(rng)
    decoder = Decoder(Topic("legs", Raw()), TOPIC_IDS)
    for _ in range(500):
        batch = [rng.choice(values) for _ in range(3)] + [
            mutate(rng, rng.choice(values), rng.choice(values)) for _ in range(3)
        ]
        keys = rng.choices([None, b"", b"key"], k=6)
        check(decoder, None, [Record("legs", 2, i, keys[i], value, timestamp_ms=5) for i, value in enumerate(batch)])


def test_both_readers_of_a_flow_agree_on_the_table_of_bad_inputs() -> None:
    decoder = Decoder(Topic("legs", Raw()), TOPIC_IDS)
    for bad in BAD_INPUTS:
        for value in bad.values:
            check(decoder, None, [Record("legs", 2, 17, bad.key, value, timestamp_ms=bad.timestamp_ms)])


@pytest.mark.parametrize("name", records.RUNS)
def test_no_odd_record_ends_what_reads_it_and_each_is_accounted_for(name: str) -> None:
    outcomes = records.run(name, 60, SEED)
    assert outcomes["read"] == 60
    assert len(outcomes) > 2
