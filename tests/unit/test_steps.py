"""The steps between source and stages, element by element, and the door of a stage."""

from typing import Any

import polars as pl
import pytest

from aggregations.definition.aggregates import count
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Aggregate, Divert, Filter, FlatMap, Map, Publish
from aggregations.definition.schemas import UNKNOWN, Passed
from aggregations.per_message.arrivals import arrive
from aggregations.per_message.ledger import Ledger
from aggregations.per_message.steps import apply_steps
from envelope import EnvelopeError, Hop, Reason, Siblings, Verdict, decode
from tests.support.pure import TOPIC_ID, element, hop

SCHEMA = {"tail": pl.String(), "minutes": pl.Int64()}


def legs(*minutes):
    return [element({"tail": "N1", "minutes": m}, offset) for offset, m in enumerate(minutes)]


def apply(step, elements, schema=SCHEMA):
    return apply_steps([step], elements, schema)


def offsets(elements):
    return [one.offset for one in elements]


def rejections(applied):
    return [(one.element.offset, one.reason) for one in applied.rejected]


def boom(one):
    raise RuntimeError("secret")


LONG = [pl.col("minutes") > 10, lambda one: one["minutes"] > 10]


@pytest.mark.parametrize("keep", LONG, ids=["expression", "callable"])
def test_a_filter_keeps_what_is_true_and_counts_the_others(keep):
    applied = apply(Filter(keep), legs(5, 15, 10, 11))
    assert offsets(applied.elements) == [1, 3]
    assert applied.filtered == 2
    assert applied.schema is SCHEMA


def test_null_counts_as_false():
    assert offsets(apply(Filter(pl.col("minutes") > 10), legs(None, 15)).elements) == [1]
    assert offsets(apply(Filter(lambda one: None), legs(1)).elements) == []


@pytest.mark.parametrize("when", LONG, ids=["expression", "callable"])
def test_a_diversion_sends_what_is_true_to_the_dead_letters(when):
    applied = apply(Divert(when), legs(5, 15))
    assert offsets(applied.elements) == [0]
    assert rejections(applied) == [(1, Reason.DIVERTED)]


def test_a_predicate_whose_result_has_no_truth_rejects_its_element_only():
    class Neither:
        def __bool__(self):
            raise ValueError

    keep: Any = lambda one: Neither() if one.offset == 1 else True
    applied = apply(Filter(keep), legs(1, 2, 3))
    assert offsets(applied.elements) == [0, 2]
    assert rejections(applied) == [(1, Reason.TRANSFORM_FAILED)]


def test_a_map_by_expressions_adds_columns_and_keeps_the_lineage():
    applied = apply(Map({"hours": pl.col("minutes") / 60}), legs(90))
    assert applied.elements[0].value == {"tail": "N1", "minutes": 90, "hours": 1.5}
    assert applied.elements[0].own == legs(90)[0].own
    assert applied.schema == {**SCHEMA, "hours": pl.Float64()}


def test_a_map_by_a_function_makes_a_new_value_and_may_pass_columns_on():
    applied = apply(Map(function=lambda one: one["minutes"] * 2), legs(7))
    assert [one.value for one in applied.elements] == [14]
    assert applied.schema == Passed(SCHEMA)


@pytest.mark.parametrize(
    "step",
    [Filter(boom), Divert(boom), Map(function=boom), FlatMap(boom), Publish("out", value=boom, name="f")],
    ids=lambda step: type(step).__name__,
)
def test_a_function_that_raises_rejects_its_element_without_quoting_the_message(step):
    applied = apply(step, legs(1))
    [rejected] = applied.rejected
    assert applied.elements == []
    assert rejected.reason is Reason.TRANSFORM_FAILED
    assert rejected.detail.startswith("RuntimeError in ")
    assert "secret" not in rejected.detail


def test_a_function_may_choose_the_reason_code():
    def choose(one):
        raise EnvelopeError(Reason.BAD_PAYLOAD, "no such airport")

    assert rejections(apply(Map(function=choose), legs(1))) == [(0, Reason.BAD_PAYLOAD)]


def test_a_flat_map_numbers_its_items_and_nested_ones_again():
    pair = FlatMap(lambda one: [1, 2])
    applied = apply_steps([pair, pair], legs(9), SCHEMA)
    assert [one.indices for one in applied.elements] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_flat_map_of_nothing_leaves_nothing():
    assert apply(FlatMap(lambda one: []), legs(1)).elements == []


def test_when_the_third_of_five_items_fails_a_step_none_of_them_goes_on():
    def third_fails(one):
        if one.value == 2 and one.offset == 1:
            raise RuntimeError
        return one.value

    applied = apply_steps([FlatMap(lambda one: range(5)), Map(function=third_fails)], legs(1, 1, 1), SCHEMA)
    assert offsets(applied.elements) == [0] * 5 + [2] * 5
    assert rejections(applied) == [(1, Reason.TRANSFORM_FAILED)] * 5


def test_a_generator_that_fails_half_way_gives_no_items():
    def items(one):
        yield 1
        raise RuntimeError

    applied = apply(FlatMap(items), legs(1))
    assert applied.elements == []
    assert rejections(applied) == [(0, Reason.TRANSFORM_FAILED)]


def published(step, one):
    [output] = apply(step, [one], UNKNOWN).outputs
    return output, decode(output.value)


def test_an_output_has_the_chain_with_this_processor_behind_it():
    before = hop("raw", 3, 17)
    one = element({"x": 1}, 4, chain=(before,), event_id="e", event_time_us=5, indices=(2,))
    output, envelope = published(Publish("out", name="fleet"), one)
    assert envelope.chain == (
        before,
        Hop("legs", 0, 4, via="fleet", index=2, rekeyed=False, topic_id=TOPIC_ID),
    )
    assert (output.topic, output.key, envelope.key) == ("out", b"N1", b"N1")
    assert (envelope.payload, envelope.content_type) == (b'{"x":1}', "application/json")
    assert (envelope.event_id, envelope.event_time_us, envelope.destination) == ("e", 5, "out")


@pytest.mark.parametrize("key", ["carrier", lambda one: one["carrier"]], ids=["column", "callable"])
def test_an_output_with_another_key_says_so_in_its_hop(key):
    output, envelope = published(Publish("out", key, name="f"), element({"carrier": "UA"}))
    assert output.key == envelope.key == b"UA"
    assert envelope.chain[-1].rekeyed
    _, kept = published(Publish("out", key, name="f"), element({"carrier": "N1"}))
    assert not kept.chain[-1].rekeyed


def test_an_output_may_have_a_null_key():
    output, envelope = published(Publish("out", lambda one: None, name="f"), element({}))
    assert output.key is envelope.key is None
    assert envelope.chain[-1].rekeyed


def test_an_output_names_the_cluster_that_its_record_is_in():
    from dataclasses import replace

    one = element({})
    _, envelope = published(Publish("out", name="f"), replace(one, own=replace(one.own, cluster="west")))
    assert envelope.chain[-1].cluster == "west"


def test_outputs_of_nested_collections_have_different_indices():
    places = [(a, b) for a in (0, 1, 65_535) for b in (0, 1, 65_535)]
    found = {published(Publish("out", name="f"), element({}, indices=place))[1].chain[-1].index for place in places}
    assert len(found) == len(places)


@pytest.mark.parametrize("indices", [(1, 65_536), (0, 0, 1024), (2**32,)], ids=str)
def test_a_collection_too_large_to_number_its_outputs_is_rejected_whole(indices):
    applied = apply(Publish("out", name="f"), [element({}, indices=indices)])
    assert applied.outputs == []
    assert len(applied.rejected) == 1


def test_a_value_that_json_cannot_hold_is_rejected_and_not_published():
    applied = apply(Publish("out", name="f"), [element({"x": object()}), element({"x": 1}, 1)], UNKNOWN)
    assert len(applied.outputs) == 1
    assert rejections(applied) == [(0, Reason.TRANSFORM_FAILED)]


COUNT = Fields(n=count())


def at_stage(elements, key="tail", fold=COUNT, schema=UNKNOWN, siblings=Siblings.EVENT_ID, **options):
    applied = apply_steps([], elements, schema)
    arrivals = arrive(
        Aggregate("a", key, fold, **options),
        applied,
        ledger=Ledger("fleet"),
        topic_ids={"raw": "id-now"},
        incarnation=lambda topic, topic_id: Verdict.NEW_INCARNATION if topic_id == "new" else None,
        siblings=siblings,
    )
    return applied, arrivals


def test_an_arrival_has_key_standing_and_the_inputs_of_its_fields():
    _, [arrival] = at_stage([element({"tail": "N1"}, 3)], fold=Fields(n=count("tail")))
    assert (arrival.key, arrival.values, arrival.incarnation) == (b"N1", {"n": "N1"}, None)
    assert (arrival.standing.lane, arrival.standing.position) == (f"legs:0#{TOPIC_ID}", (3,))


def test_a_stage_that_changes_the_key_has_the_partition_in_the_lane():
    _, [arrival] = at_stage([element({"carrier": "UA"}, chain=(hop("raw", 1, 2),), partition=5)], key="carrier")
    assert arrival.standing.lane == "raw:1#id-raw>wrap>legs:5"
    assert arrival.standing.group == "raw:1#id-raw>wrap>legs"


def test_a_topic_that_is_not_partitioned_by_the_key_has_its_partition_in_the_lane():
    one = element({"tail": "N1"}, chain=(hop("raw", 1, 2),), partition=5)
    assert at_stage([one])[1][0].standing.lane == "raw:1#id-raw>wrap>legs"
    assert at_stage([one], co_partitioned=False)[1][0].standing.lane == "raw:1#id-raw>wrap>legs:5"


def test_an_unknown_topic_id_of_the_root_is_the_current_one():
    _, [arrival] = at_stage([element({"tail": "N1"}, chain=(Hop("raw", 1, 2, via="w", index=0),))])
    assert arrival.standing.lane == "raw:1#id-now>w>legs"


def test_the_root_of_a_topic_created_again_is_told():
    _, [arrival] = at_stage([element({"tail": "N1"}, chain=(Hop("raw", 1, 2, via="w", index=0, topic_id="new"),))])
    assert arrival.incarnation is Verdict.NEW_INCARNATION


@pytest.mark.parametrize("siblings", Siblings)
def test_the_event_id_stands_in_for_an_index_only_where_the_policy_says_so(siblings):
    one = element({"tail": "N1"}, chain=(hop("raw", 0, 7, None),), event_id="e")
    _, [arrival] = at_stage([one], siblings=siblings)
    by_id = siblings is Siblings.EVENT_ID
    assert arrival.standing.position == ((7, -1, "e") if by_id else (7, -1))
    assert arrival.standing.ambiguous is not by_id


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("tail", {"tail": None}, Reason.NULL_KEY),
        (lambda one: None, {}, Reason.NULL_KEY),
        ("tail", {}, Reason.MISSING_FIELD),
        ("tail", {"tail": 1.5}, Reason.BAD_PAYLOAD),
        (lambda one: "\ud800", {}, Reason.BAD_PAYLOAD),
        (boom, {}, Reason.TRANSFORM_FAILED),
        ("tail", 17, Reason.MISSING_FIELD),
    ],
    ids=["null", "null of a callable", "missing", "number", "surrogate", "raises", "no columns"],
)
def test_an_element_without_a_key_is_rejected_and_the_others_arrive(key, value, reason):
    good = element({"tail": "N2"}, 1) if key == "tail" else None
    applied, arrivals = at_stage([element(value), *([good] if good else [])], key=key)
    assert rejections(applied) == [(0, reason)]
    assert [arrival.key for arrival in arrivals] == ([b"N2"] if good else [])


def test_when_one_item_of_a_record_has_no_key_none_of_them_arrives():
    items = [element({"tail": tail}, 4).nth(n, {"tail": tail}) for n, tail in enumerate(["N1", None, "N3"])]
    applied, arrivals = at_stage([*items, element({"tail": "N1"}, 5)])
    assert [arrival.element.offset for arrival in arrivals] == [5]
    assert rejections(applied) == [(4, Reason.NULL_KEY)] * 3


def test_a_field_that_cannot_be_evaluated_arrives_with_the_cause_so_that_it_leaves_a_hole():
    _, [arrival] = at_stage([element({"tail": "N1"})], fold=Fields(n=count("missing")))
    assert isinstance(arrival.values, EnvelopeError)
    assert arrival.values.reason is Reason.MISSING_FIELD
