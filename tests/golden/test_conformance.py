"""The conformance vectors that are shipped with the schema: they are current, and reading them gives what they expect."""

import json
from dataclasses import fields
from enum import StrEnum

import pytest

from envelope import Reason, Verdict
from envelope.filters import EventIdFilter, ProducerFilter, SequenceFilter
from envelope.filters.distinct import DistinctSession, DistinctTumbling
from envelope.filters.interval import IntervalFilter
from tests.golden.conformance import FILE, made, read_envelope, read_hop, read_lineage, text
from tests.golden.filter_vectors import read_filter, read_maps, read_policy, rule_of
from tests.seeds.test_001_deduplicate import EXAMPLES

VECTORS = json.loads(FILE.read_text())


def named(part: str) -> list:
    return [pytest.param(one, id=one["name"]) for one in VECTORS[part]]


def test_the_file_is_the_one_that_the_program_writes() -> None:
    assert text(made()) == FILE.read_text(), "run python -m tests.golden.conformance, and look at the difference"


@pytest.mark.parametrize("one", named("envelopes"))
def test_the_bytes_of_an_envelope_give_its_fields_or_a_reason_code(one) -> None:
    expected = {name: one[name] for name in ("envelope", "reason") if name in one}
    assert read_envelope(one["bytes"]) == expected


@pytest.mark.parametrize("one", named("appended_hops"))
def test_a_hop_is_appended_byte_by_byte(one) -> None:
    assert read_hop(one["bytes"], one["hop"]) == one["result"]


@pytest.mark.parametrize("one", named("lineages"))
def test_records_give_lanes_positions_and_verdicts(one) -> None:
    assert read_lineage(one["records"]) == one["expected"]


@pytest.mark.parametrize("one", named("filters"))
def test_records_give_rulings_and_a_state(one) -> None:
    assert read_filter(one["filter"], one["records"]) == {"rulings": one["rulings"], "states": one["states"]}


@pytest.mark.parametrize("one", named("sequence_maps"))
def test_calls_of_the_sequence_maps_give_verdicts_snapshots_and_maps(one) -> None:
    assert read_maps(one) == {name: one[name] for name in ("returned", "pushed", "persisted", "covered")}


@pytest.mark.parametrize("one", named("policies"))
def test_the_most_specific_setting_of_a_policy_wins(one) -> None:
    assert read_policy(one, list(one["enabled"])) == one["enabled"]


@pytest.mark.parametrize(
    "kind", [SequenceFilter, IntervalFilter, DistinctTumbling, DistinctSession, ProducerFilter, EventIdFilter]
)
def test_the_vectors_set_every_option_of_a_filter(kind: type) -> None:
    rules = [rule for one in VECTORS["filters"] if type(rule := rule_of(one["filter"])) is kind]
    for field in fields(kind):
        found = {getattr(rule, field.name) for rule in rules}
        if field.name == "name":  # names its states in a store, and decides nothing
            continue
        choices = type(next(iter(found)))
        assert found == set(choices) if issubclass(choices, StrEnum) else len(found) > 1, field.name


@pytest.mark.parametrize("title", EXAMPLES)
def test_the_vectors_of_kip_655_expect_what_the_document_says(title: str) -> None:
    found = [one for one in VECTORS["filters"] if one["name"].startswith(f"001: {title}, by_")]
    expected = [forward for _, _, forward in EXAMPLES[title][1]]
    assert [[ruling["forward"] for ruling in one["rulings"]] for one in found] == [expected] * 3


def test_the_vectors_contain_every_reason_of_the_codec_and_every_verdict_of_a_filter() -> None:
    reasons = {one["reason"] for one in VECTORS["envelopes"] if "reason" in one}
    assert reasons >= {
        Reason.EMPTY,
        Reason.NOT_AN_ENVELOPE,
        Reason.UNSUPPORTED_FORMAT,
        Reason.TRUNCATED,
        Reason.CHECKSUM_MISMATCH,
        Reason.MISSING_FIELD,
        Reason.BAD_TOPIC,
        Reason.BAD_COORDINATES,
        Reason.TOO_MANY_HOPS,
    }
    verdicts = {ruling["verdict"] for one in VECTORS["filters"] for ruling in one["rulings"]}
    assert verdicts >= {
        *(Verdict.ACCEPTED, Verdict.LATE, Verdict.DUPLICATE, Verdict.BELOW_FLOOR, Verdict.REJECTED, Verdict.GAP),
        *(Verdict.UNIDENTIFIED, Verdict.REPROCESSED, Verdict.BEYOND_HORIZON, Verdict.HELD, Verdict.FENCED),
    }
    lineages = {one["verdict"] for vector in VECTORS["lineages"] for one in vector["expected"]}
    assert lineages >= {
        *(Verdict.ACCEPTED, Verdict.LATE, Verdict.DUPLICATE, Verdict.BELOW_FLOOR, Verdict.NEW_LANE, Verdict.UNPROVEN),
        Verdict.REJECTED,
    }
