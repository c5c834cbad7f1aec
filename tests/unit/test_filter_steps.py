"""A filter as a step of a flow: its definition, its verdicts, its dead letters, and what a crash repeats."""

import json
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from typing import Any

import polars as pl
import pytest

from aggregations.definition.aggregates import count
from aggregations.definition.element import Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.errors import DefinitionChangedError, FlowError, RunRefusedError
from envelope import Envelope, Hop, Reason, Verdict, decode, encode
from envelope.filters import (
    Arrival,
    Decreasing,
    DedupPolicy,
    EventIdFilter,
    FilterStates,
    Gaps,
    ProducerFilter,
    Ruling,
    Scope,
    SequenceFilter,
    Unusable,
    deduplicate,
    deduplicate_by_key,
    from_envelope,
    from_header,
    from_value,
)
from persistence.errors import Fenced
from tests.support.letters import back, runner, url

ORDERS = Topic("legs", Json({"k": str, "n": int}), envelope=False)
CODES = Topic("codes", Json({"code": int}), envelope=False)
MESSAGES = Topic("legs", Json({"k": str, "n": int}))
NUMBERS = SequenceFilter(from_value("n"))
MINUTE = timedelta(minutes=1)


def order(offset: int, n: object, k: str = "K", *, partition: int = 0, ms: int = 0, **headers: str) -> Record:
    pairs = tuple((name, value.encode()) for name, value in headers.items())
    body = json.dumps({"k": k} if n is None else {"k": k, "n": n}).encode()
    return Record("legs", partition, offset, k.encode(), body, ms, pairs, "T")


def counted(rule: Any, source: Topic = ORDERS, **options: Any) -> Flow[Any]:
    return Flow("counted").source(source).deduplicate(rule, **options).aggregate("k", "k", Fields(n=count()))


def test_what_the_filter_drops_is_not_aggregated_and_has_the_verdict_of_the_filter() -> None:
    run = runner(counted(NUMBERS))
    report = run.process([order(offset, n) for offset, n in enumerate([1, 2, 2, 1, 3])])
    assert report.verdicts == {"sequence": {"accepted": 3, "duplicate": 1, "below_floor": 1}, "k": {"accepted": 3}}
    assert run.results("k") == {b"K": {"n": 3}}
    assert run.results("sequence") == {b"legs:0": {"seen": 3}}


def test_a_filter_and_a_publish_step_are_a_flow() -> None:
    flow = Flow("relay").source(ORDERS).deduplicate(NUMBERS).publish("out")
    run = runner(flow)
    run.process([order(offset, n) for offset, n in enumerate([4, 4, 5])])
    assert [decode(one.value).chain[-1].offset for one in run.outputs] == [0, 2]


def test_a_filter_by_key_of_several_topics_is_refused_because_they_have_no_order() -> None:
    # Two copies of an event in two topics: a crash may change which of them is read first, and both would be passed on.
    several = Flow("counted").source(ORDERS, Topic("more", Json({"k": str, "n": int}), envelope=False))
    with pytest.raises(FlowError, match="No order is certain between topics"):
        several.deduplicate(SequenceFilter(from_value("n"), scope_by=Scope.KEY))
    with pytest.raises(FlowError, match="No order is certain between topics"):
        several.deduplicate(EventIdFilter(from_value("n"), horizon=MINUTE, scope_by=Scope.KEY))
    with pytest.raises(FlowError, match="No order is certain between topics"):
        several.deduplicate(deduplicate(from_value("n"), MINUTE))
    several.deduplicate(NUMBERS).aggregate("k", "k", Fields(n=count()))
    several.deduplicate(deduplicate(from_value("n"), MINUTE), policy=DedupPolicy(namespaces={"le": True}))


def test_the_topics_that_a_policy_excludes_are_passed_on_and_not_judged() -> None:
    more = Topic("more", Json({"k": str, "n": int}), envelope=False)
    policy = DedupPolicy(default=True, namespaces={"mo": False})
    flow = Flow("counted").source(ORDERS, more).deduplicate(NUMBERS, policy=policy)
    run = runner(flow.aggregate("k", "k", Fields(n=count())))
    records = [order(offset, n) for offset, n in enumerate([1, 1, 2])]
    report = run.process([*records, *(replace(one, topic="more") for one in records)])
    assert report.verdicts["sequence"] == {"accepted": 2, "duplicate": 1, "unidentified": 3}
    assert run.results("sequence") == {b"legs:0": {"seen": 2}, b"more:0": {"seen": None}}
    assert run.results("k") == {b"K": {"n": 5}}
    again = run.process([replace(records[0], topic="more")])
    assert again.verdicts["sequence"] == {"duplicate": 1}, "what is read again is dropped by its position"


def relayed(offset: int, root: int) -> Record:
    """A message of one of two keys, whose root has another place in the order of its partition."""
    value = encode(Envelope(b'{"k": "%d", "n": 1}' % (root % 2), chain=(Hop("raw", 0, root, topic_id="R", via="r"),)))
    return Record("more", 0, offset, b"%d" % (root % 2), value, topic_id="T")


@pytest.mark.parametrize("path", ["columns", "function"])
def test_topics_that_a_filter_by_key_does_not_judge_may_have_as_much_disorder_between_keys_as_without_it(
    path: str,
) -> None:
    number = from_value("n") if path == "columns" else lambda element: element["n"]
    flow = Flow("counted").source(MESSAGES, Topic("more", Json({"k": str, "n": int})))
    rule = SequenceFilter(number, scope_by=Scope.KEY)
    flow = flow.deduplicate(rule, policy=DedupPolicy(topics={"legs": True}))
    run = runner(flow.aggregate("k", "k", Fields(n=count())))
    roots = [*range(1, 100, 2), *range(0, 100, 2)]  # the middle partition with the odd ones was read first
    for first in range(0, 100, 10):
        run.process([relayed(first + number, root) for number, root in enumerate(roots[first : first + 10])])
    assert run.results("k") == {b"0": {"n": 50}, b"1": {"n": 50}}
    assert set(run.results("sequence")) == {b"more:0/0", b"more:0/1"}


def test_a_policy_is_part_of_the_definition_as_far_as_the_flow_reads_the_topics() -> None:
    plain, same, other = (
        counted(NUMBERS, policy=policy).stages[0].definition
        for policy in (DedupPolicy(default=True), DedupPolicy(topics={"legs": True}), DedupPolicy())
    )
    assert plain == same != other
    assert "not of legs" in counted(NUMBERS, policy=DedupPolicy()).describe()


def test_a_policy_must_be_one() -> None:
    with pytest.raises(FlowError, match="a DedupPolicy"):
        counted(NUMBERS, policy={"legs": True})


def test_a_filter_cannot_have_the_name_of_a_table() -> None:
    looked = Flow("counted").source(ORDERS).deduplicate(NUMBERS).lookup("codes", CODES, "k")
    with pytest.raises(FlowError, match="already has a stage 'codes'"):
        looked.deduplicate(NUMBERS, name="codes")


def test_a_filter_without_anything_after_it_is_refused() -> None:
    with pytest.raises(FlowError, match="does nothing with its elements"):
        _ = Flow("f").source(ORDERS).deduplicate(NUMBERS).stages


def test_a_record_that_is_read_again_after_its_state_was_written_is_dropped_by_its_position() -> None:
    store = url()
    rule = deduplicate_by_key(MINUTE)
    first = runner(counted(rule), store)
    first.process([order(0, 1), order(1, 2)])
    again = runner(counted(rule), store)
    assert again.process([order(0, 1), order(1, 2)]).verdicts["deduplicate"] == {"duplicate": 2}


def test_a_newer_run_fences_the_states_of_a_filter() -> None:
    store = url()
    first = runner(counted(NUMBERS), store)
    with closing(runner(counted(NUMBERS), store)) as second:
        second.process([order(0, 1)])
        with pytest.raises(Fenced):
            first.process([order(0, 1)])


def test_dropped_records_are_remembered_so_that_the_floor_rises_and_the_state_stays_small() -> None:
    run = runner(counted(NUMBERS, history=32))
    run.process([order(offset, 1) for offset in range(100)])
    [state] = run.states("sequence").values()
    [history] = state.histories.lanes.values()
    assert (len(history.held), history.floor) == (32, (67,))
    assert counted(NUMBERS).stages[0].aggregate.history == 1024


def test_two_filters_follow_each_other() -> None:
    flow = Flow("f").source(ORDERS).deduplicate(NUMBERS).deduplicate(deduplicate_by_key(MINUTE)).publish("out")
    run = runner(flow)
    run.process([order(0, 1, "a"), order(1, 1, "b"), order(2, 2, "a"), order(3, 3, "b")])
    assert [one.key for one in run.outputs] == [b"a", b"b"]
    assert flow.stage_names == ("sequence", "deduplicate")


def test_records_without_a_scope_are_passed_on_once() -> None:
    store = url()
    rule = SequenceFilter(from_value("n"), scope_by=Scope.KEY)
    keyless = [Record("legs", 0, offset, None, b'{"k":"K","n":1}', topic_id="T") for offset in range(2)]
    run = runner(counted(rule), store)
    assert run.process(keyless).verdicts["sequence"] == {"unidentified": 2}
    assert run.results("k") == {b"K": {"n": 2}}
    assert runner(counted(rule), store).process(keyless).verdicts["sequence"] == {"duplicate": 2}


def test_ids_may_come_from_headers() -> None:
    run = runner(counted(EventIdFilter(from_header("ce_id"), horizon=MINUTE)))
    run.process([order(0, 1, ce_id="a"), order(1, 2, ce_id="b"), order(2, 3, ce_id="a")])
    assert run.results("k") == {b"K": {"n": 2}}


@pytest.mark.parametrize(
    "rule",
    [ProducerFilter(), SequenceFilter(from_envelope("sequence")), EventIdFilter(from_envelope("event_id"), MINUTE)],
    ids=lambda rule: rule.name,
)
def test_filters_read_the_envelope_from_which_an_element_was_made(rule: Any) -> None:
    run = runner(counted(rule, MESSAGES))
    payload = b'{"k":"K","n":1}'
    sent = [Envelope(payload, event_id=f"e{n}", producer="till", sequence=n, producer_epoch=1) for n in (0, 1, 1, 5)]
    run.process([Record("legs", 0, offset, b"K", encode(one), topic_id="T") for offset, one in enumerate(sent)])
    assert run.results("k") == {b"K": {"n": 3}}


def test_a_filter_by_key_keeps_the_order_of_keys_when_partitions_are_added() -> None:
    assert counted(SequenceFilter(from_value("n"), scope_by=Scope.KEY)).filters_by_key
    assert not counted(NUMBERS).filters_by_key


def test_a_key_that_is_found_in_two_partitions_is_judged_in_the_order_of_partitions() -> None:
    run = runner(counted(SequenceFilter(from_value("n"), scope_by=Scope.KEY)))
    report = run.process([order(0, 7, partition=1), order(0, 6, partition=0)])
    assert report.verdicts["sequence"] == {"accepted": 1, "new_lane": 1}
    assert run.results("sequence") == {b"K": {"seen": 7}}


def test_a_filter_of_ones_own_is_a_step_too() -> None:
    class Odd:
        name = "odd"

        def scope(self, arrival: Arrival) -> bytes:
            return b"all"

        def zero(self) -> int:
            return 0

        def judge(self, state: int, arrival: Any) -> tuple[Ruling, int]:
            passes = arrival["n"] % 2 == 1
            return Ruling(Verdict.ACCEPTED if passes else Verdict.DUPLICATE, passes), state + passes

        def dump(self, state: int) -> int:
            return state

        def load(self, value: int) -> int:
            return value

    run = runner(counted(Odd()))
    run.process([order(n, n) for n in range(5)])
    assert (run.results("odd"), run.results("k")) == ({b"all": 2}, {b"K": {"n": 2}})


def test_a_warning_of_a_filter_is_in_the_report_and_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    run = runner(counted(NUMBERS))
    report = run.process([order(n, n, f"order-{n}") for n in range(20)])
    [warning] = report.warnings
    assert warning in caplog.text
    assert "contain their sequence numbers" in warning


class Fed:
    """A flow whose filter has rejected a record without a number, and whose number was 3, as the operator knows."""

    def __init__(self, rule: SequenceFilter = NUMBERS) -> None:
        self.flow = Flow("counted").source(MESSAGES).deduplicate(rule).aggregate("k", "k", Fields(n=count()))
        self.run = runner(self.flow)
        self.run.process([self.message(offset, offset if offset != 3 else None) for offset in range(100)])
        [self.died] = self.run.dead_letters

    @staticmethod
    def message(offset: int, n: int | None) -> Record:
        body = order(offset, n).value
        assert body is not None
        return Record("legs", 0, offset, b"K", encode(Envelope(body, key=b"K")), topic_id="T")


def test_a_rejected_record_is_a_dead_letter_with_the_name_of_the_filter_and_leaves_no_hole() -> None:
    fed = Fed()
    assert (fed.died.stage, fed.died.reason, fed.died.hole) == ("sequence", Reason.MISSING_FIELD, False)
    assert fed.run.report.verdicts["sequence"] == {"accepted": 99, "rejected": 1}
    assert sum(map(len, fed.run.run.ledger.listed["sequence"].values())) == 1
    [state] = fed.run.states("sequence").values()
    assert not state.histories.holes


def test_a_rejected_record_that_is_mended_and_redriven_is_passed_on_once_although_later_numbers_were() -> None:
    fed = Fed()
    mended = back(fed.died, 100, "counted")
    value = decode(mended.value)
    payload = json.dumps({"k": "K", "n": 3}).encode()
    mended = Record("legs", 0, 100, b"K", encode(Envelope(payload, value.chain, b"K")), topic_id="T")
    report = fed.run.process([mended])
    assert report.verdicts == {"sequence": {"redriven": 1}, "k": {"redriven": 1}}
    assert fed.run.results("k") == {b"K": {"n": 100}}
    assert fed.run.run.ledger.listed == {}
    again = Record("legs", 0, 101, b"K", mended.value, topic_id="T")
    fed.run.process([again])
    assert fed.run.results("k") == {b"K": {"n": 100}}
    assert fed.run.results("sequence") == {b"legs:0": {"seen": 99}}


def test_a_rejected_record_that_is_redriven_as_it_was_is_rejected_again() -> None:
    fed = Fed()
    report = fed.run.process([back(fed.died, 100, "counted")])
    assert report.verdicts["sequence"] == {"rejected": 1}
    assert len(fed.run.dead_letters) == 2
    assert sum(map(len, fed.run.run.ledger.listed["sequence"].values())) == 1


def test_a_rejected_record_publishes_before_the_filter_once_and_not_again_when_it_is_redriven() -> None:
    flow = Flow("f").source(MESSAGES).publish("copy").deduplicate(NUMBERS).publish("out", name="after")
    run = runner(flow)
    run.process([Fed.message(0, 1), Fed.message(1, None), Fed.message(2, 2)])
    assert [one.topic for one in run.outputs] == ["copy", "copy", "copy", "out", "out"]
    [died] = run.dead_letters
    run.process([back(died, 3, "f")])
    assert len(run.outputs) == 5


def test_a_lower_number_goes_to_the_dead_letters_if_the_filter_says_so() -> None:
    run = runner(counted(SequenceFilter(from_value("n"), decreasing=Decreasing.REJECT)))
    run.process([order(0, 5), order(1, 3)])
    assert [(one.reason, one.detail) for one in run.dead_letters] == [
        (Reason.OUT_OF_SEQUENCE, "sequence number 3 follows 5")
    ]


def test_without_a_number_a_record_is_passed_on_if_the_filter_says_so() -> None:
    run = runner(counted(SequenceFilter(from_value("n"), unusable=Unusable.FORWARD)))
    assert run.process([order(0, None), order(1, 1)]).verdicts["sequence"] == {"unidentified": 1, "accepted": 1}


def test_a_state_of_thousands_of_dead_letters_does_not_stop_the_flow() -> None:
    run = runner(counted(NUMBERS))
    run.process([order(offset, None) for offset in range(1500)])
    assert run.process([order(1500, 1)]).verdicts["sequence"] == {"accepted": 1}


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        (SequenceFilter(from_value("n"), name="other"), True),
        (SequenceFilter(from_value("k")), False),
        (SequenceFilter(from_header("n")), False),
        (SequenceFilter(from_value("n"), scope_by=Scope.KEY), False),
        (SequenceFilter(from_value("n"), decreasing=Decreasing.REJECT), False),
        (SequenceFilter(from_value("n"), unusable=Unusable.FORWARD), False),
    ],
)
def test_every_parameter_of_a_filter_but_its_name_is_part_of_the_definition(changed: Any, same: bool) -> None:
    def of(rule: Any) -> list[str]:
        return [*counted(rule).definitions.values()]

    assert (of(changed) == of(NUMBERS)) is same


def test_the_definitions_of_flows_with_filters_stay_the_same() -> None:
    assert counted(NUMBERS).definitions == {"sequence": SEQUENCE, "k": BEHIND}
    assert counted(ProducerFilter(), MESSAGES).definitions["producer"] == PRODUCER


SEQUENCE, BEHIND, PRODUCER = "3dc305fb2fe7c72a", "829922e2e67b96b7", "20abc9e79c08c6ec"


def test_states_of_another_filter_are_not_continued() -> None:
    store = url()
    with closing(runner(counted(NUMBERS), store)) as run:
        run.process([order(0, 1)])
    with pytest.raises((DefinitionChangedError, RunRefusedError)):
        runner(counted(EventIdFilter(from_value("n"), horizon=MINUTE), name="sequence"), store)


BAD: dict[str, tuple[Any, str]] = {
    "no filter": (lambda flow: flow.deduplicate("id"), "takes a filter"),
    "the class": (lambda flow: flow.deduplicate(SequenceFilter), "takes a filter"),
    "held back": (lambda flow: flow.deduplicate(ProducerFilter(gaps=Gaps.HOLD)), "Gaps.HOLD"),
    "no envelopes": (lambda flow: flow.deduplicate(ProducerFilter()), "topic legs has none"),
    "no such field": (
        lambda flow: Flow("f").source(MESSAGES).deduplicate(EventIdFilter(from_envelope("traceparent"), MINUTE)),
        "reads traceparent of envelopes",
    ),
    "no such column": (lambda flow: flow.deduplicate(SequenceFilter(from_value("m"))), "no column m"),
    "after flat_map": (lambda flow: flow.flat_map(pl.col("k").str.split("+")).deduplicate(NUMBERS), "flat_map"),
    "after a stage": (
        lambda flow: flow.aggregate("k", "k", Fields(n=count())).deduplicate(NUMBERS),
        "before aggregate",
    ),
    "in a branch": (lambda flow: flow.also_to("b", lambda side: side.deduplicate(NUMBERS).publish("x")), "branch 'b'"),
    "twice": (lambda flow: flow.deduplicate(NUMBERS).deduplicate(NUMBERS), "already has a stage 'sequence'"),
    "a name": (lambda flow: flow.deduplicate(NUMBERS, name="a b"), "not a valid stage name"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_filter_that_cannot_be_a_step_is_refused_when_the_flow_is_defined(case: str) -> None:
    step, text = BAD[case]
    with pytest.raises(FlowError, match=text):
        step(Flow("f").source(ORDERS))


def test_describe_shows_filters_and_their_path() -> None:
    flow = counted(NUMBERS).publish("out")
    assert "deduplicate    sequence: SequenceFilter by partition              vectorised" in flow.describe()
    own = counted(SequenceFilter(lambda element: element["n"]))
    assert "with Python for its filter" in own.describe()
    assert "deduplicate" in flow.describe_svg()


def test_the_step_passes_on_what_the_filter_alone_passes_on() -> None:
    numbers = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]
    run = runner(Flow("f").source(ORDERS).deduplicate(NUMBERS).publish("out"))
    run.process([order(offset, n) for offset, n in enumerate(numbers)])
    alone = FilterStates(NUMBERS)
    passed = [offset for offset, n in enumerate(numbers) if alone.passes(Arrival("legs", 0, offset, b"K", {"n": n}))]
    assert [decode(one.value).chain[-1].offset for one in run.outputs] == passed
