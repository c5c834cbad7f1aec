"""The in-memory runner: a flow run message by message with the real commit."""

import json
from collections import Counter

import polars as pl
import pytest

from aggregations.element import Record
from aggregations.fields import Fields, count, last, total
from aggregations.flow import Flow
from aggregations.memory import MemoryRunner
from aggregations.source import Topic
from envelope import Hop, Reason, Verdict, decode
from envelope.redrive import Redrive, redrive_hops
from persistence import faults
from persistence.errors import Transient
from persistence.faults import Fault, Injector
from tests.support.pure import COLUMNS, TOPIC, bare, chained, fresh_store, hop, leg, runner, states, wrapped

FLEET = Fields(n=count(), m=total("minutes"))


def fleet(topic=None):
    return (
        Flow("fleet")
        .source(topic or bare())
        .filter(pl.col("minutes") > 0)
        .aggregate("aircraft", "tail", FLEET)
        .aggregate("carrier", "carrier", FLEET)
    )


def batch(*offsets, **columns):
    return [
        leg(offset, f"N{offset % 3}", carrier="UA" if offset % 2 else "AA", minutes=offset, **columns)
        for offset in offsets
    ]


EXPECTED = {"AA": {"n": 4, "m": 20}, "UA": {"n": 5, "m": 25}}


def test_two_stages_fold_every_message_once():
    run = runner(fleet())
    report = run.process(batch(*range(10)))
    assert states(run, "aircraft") == {"N0": {"n": 3, "m": 18}, "N1": {"n": 3, "m": 12}, "N2": {"n": 3, "m": 15}}
    assert states(run, "carrier") == EXPECTED
    assert (report.records, report.filtered, report.batches) == (10, 1, 1)
    assert report.verdicts == {"aircraft": Counter(accepted=9), "carrier": Counter(accepted=9)}


def test_what_was_folded_is_dropped_by_the_first_stage_and_never_reaches_the_second():
    run = runner(fleet())
    run.process(batch(*range(10)))
    again = run.process(batch(*range(10)))
    assert again.verdicts == {"aircraft": Counter(duplicate=9), "carrier": Counter()}
    assert states(run, "carrier") == EXPECTED
    assert run.report.records == 20


@pytest.mark.parametrize("outcome", faults.Outcome)
@pytest.mark.parametrize(
    "point",
    [
        "fetch",
        "load:aircraft",
        "load:carrier",
        "fold",
        "publish",
        "persist:carrier",
        "persist:aircraft",
        "manifest",
        "term",
    ],
)
def test_after_a_crash_at_any_step_a_new_run_on_the_same_stores_is_exact(point, outcome):
    class Crash(Exception):
        pass

    def crash():
        raise Crash

    store = fresh_store()
    records = batch(*range(10))
    with faults.use(Injector([Fault(point, outcome, 2)], crash)), pytest.raises((Crash, Transient)):
        for n in range(0, 10, 2):
            run = runner(fleet(), store)
            run.process(records[run.run.start.get((TOPIC, 0), 0) :][: n + 2])
    run = runner(fleet(), store)
    run.process(records[run.run.start.get((TOPIC, 0), 0) :])
    assert states(run, "carrier") == EXPECTED


def test_downstream_states_are_written_before_upstream_ones_and_manifests_last():
    stores = {"aircraft": fresh_store(), "carrier": fresh_store()}
    run = MemoryRunner(fleet(), stores)
    reached = []

    class Watch:
        def effect(self, point, action):
            reached.append(str(point))
            return action()

    with faults.use(Watch()):
        run.process(batch(1))
    assert reached == [
        "fetch",
        "load:aircraft",
        "fold",
        "load:carrier",
        "fold",
        "publish",
        "persist:carrier",
        "persist:aircraft",
        "manifest:carrier",
        "manifest:aircraft",
    ]


def test_a_crash_before_the_upstream_state_is_written_leaves_the_event_downstream_only_and_is_finished_by_the_replay():
    store = fresh_store()
    with faults.use(Injector([Fault.parse("persist:aircraft.error")])), pytest.raises(Transient):
        runner(fleet(), store).process(batch(1, 2, 3))
    run = runner(fleet(), store)
    assert states(run, "aircraft") == {}
    assert states(run, "carrier") == {"AA": {"n": 1, "m": 2}, "UA": {"n": 2, "m": 4}}
    report = run.process(batch(1, 2, 3))
    assert report.verdicts["carrier"] == Counter(duplicate=3)
    assert states(run, "carrier") == {"AA": {"n": 1, "m": 2}, "UA": {"n": 2, "m": 4}}


def dead(run):
    return [(letter.record.offset, letter.stage, letter.reason) for letter in run.dead_letters]


def test_records_that_cannot_be_read_are_dead_letters_with_their_bytes_and_the_others_are_folded():
    run = runner(fleet())
    bad = Record(TOPIC, 0, 5, b"k", b"{", headers=(("h", b"v"),), topic_id="T1")
    empty = Record(TOPIC, 0, 6, None, None, topic_id="T1")
    run.process([*batch(1), bad, empty])
    assert dead(run) == [(5, "", Reason.BAD_PAYLOAD), (6, "", Reason.EMPTY)]
    assert run.dead_letters[0].record is bad
    assert run.dead_letters[0].detail
    assert run.report.reasons == Counter(bad_payload=1, empty=1)
    assert states(run, "carrier") == {"UA": {"n": 1, "m": 1}}


def test_a_null_key_of_the_second_stage_is_a_dead_letter_of_that_stage_and_the_first_has_the_event():
    run = runner(fleet())
    run.process([leg(1, "N1", minutes=7)])
    assert dead(run) == [(1, "carrier", Reason.NULL_KEY)]
    assert states(run, "aircraft") == {"N1": {"n": 1, "m": 7}}


def test_a_null_record_key_is_no_obstacle_for_a_stage_with_a_key_of_its_own():
    run = runner(fleet())
    run.process([leg(1, None, minutes=7, tail="N1", carrier="UA")])
    assert states(run, "aircraft") == {"N1": {"n": 1, "m": 7}}
    assert list(run.states("aircraft")[b"N1"].windows.lanes) == [f"{TOPIC}:0#T1"]


def test_diverted_messages_go_to_the_dead_letters_and_are_not_folded():
    run = runner(Flow("f").source(bare()).divert(pl.col("minutes") < 0).aggregate("a", "tail", FLEET))
    run.process([leg(1, minutes=-1), leg(2, minutes=3)])
    assert dead(run) == [(1, "a", Reason.DIVERTED)]
    assert states(run, "a") == {"N1": {"n": 1, "m": 3}}


class PerPart:
    """Counts parts; refuses the one called bad."""

    def zero(self):
        return {"parts": []}

    def fold(self, state, element):
        state["parts"].append(element.value["part"])
        if element.value["part"] == "bad":
            raise RuntimeError
        return state


def parts(names=None):
    return (
        Flow("f")
        .source(bare())
        .flat_map(lambda e: [{"tail": f"{e['tail']}{n}", "part": p} for n, p in enumerate(e["carrier"].split(","))])
        .aggregate("a", "tail", PerPart())
    )


def test_a_record_whose_third_part_of_five_fails_is_one_dead_letter_and_none_of_its_parts_is_folded():
    run = runner(parts())
    run.process([leg(0, carrier="a,b,c"), leg(1, carrier="v,w,bad,y,z"), leg(2, carrier="d")])
    assert dead(run) == [(1, "a", Reason.FOLD_FAILED)]
    assert states(run, "a") == {"N10": {"parts": ["a", "d"]}, "N11": {"parts": ["b"]}, "N12": {"parts": ["c"]}}
    assert run.report.verdicts["a"] == Counter(accepted=4, rejected=5)


def redriven(offset, original, **columns):
    """The copy of a dead letter, come back through the dead-letter topic."""
    hops = [
        Hop(TOPIC, original.partition, original.offset, via="dlq", transparent=True, topic_id="T1"),
        hop("dead", 0, original.offset, None, via="redrive", transparent=True),
    ]
    return chained(offset, *hops, **columns)


def test_a_redriven_record_fills_the_holes_of_all_its_parts_once():
    run = runner(
        Flow("f")
        .source(wrapped())
        .flat_map(lambda e: [{"tail": f"{e['tail']}{n}", "part": p} for n, p in enumerate(e["carrier"].split(","))])
        .aggregate("a", "tail", PerPart(), window=2)
    )
    bad = chained(1, carrier="v,bad,x")
    run.process([chained(0, carrier="a,b,c"), bad])
    run.process([chained(n, carrier="A,B,C") for n in range(2, 12)])
    first = run.process([redriven(20, bad, carrier="V,W,X")])
    second = run.process([redriven(21, bad, carrier="V,W,X")])
    assert first.verdicts["a"] == Counter(redriven=3)
    assert second.verdicts["a"] == Counter(unproven=3)
    assert states(run, "a")["N11"] == {"parts": ["b", *["B"] * 10, "W"]}
    assert dead(run)[1:] == [(21, "a", Reason.UNPROVEN)]


class Refuses:
    """Lists its values; refuses those that are negative."""

    def zero(self):
        return []

    def fold(self, state, element):
        if element["minutes"] < 0:
            raise ValueError
        return [*state, element["minutes"]]


def comes_back(offset, died, redrive, minutes, root):
    """A letter redriven by the library's own hops, with another payload."""
    at = Hop(TOPIC, died.partition, died.offset, topic_id="T1")
    letter = Hop("dead", 0, died.offset, topic_id="D")
    return chained(offset, root, *redrive_hops(at, letter, redrive), minutes=minutes)


@pytest.mark.parametrize("crash", [None, "persist:b", "persist:a", "manifest"])
def test_a_letter_of_the_first_stage_is_folded_once_by_the_second_however_far_that_has_gone_on(crash):
    """The second stage never met it: it has no hole there, and is below the floor."""
    flow = (
        Flow("f")
        .source(wrapped())
        .aggregate("a", "tail", Refuses(), window=1)
        .aggregate("b", "tail", Refuses(), window=1)
    )
    store = fresh_store()
    run = runner(flow, store)
    roots = [hop("raw", 0, n) for n in range(9)]
    dead = chained(2, roots[2], minutes=-2)
    run.process([chained(n, roots[n], minutes=n) if n != 2 else dead for n in range(9)])
    back = comes_back(20, dead, Redrive("a"), 2, roots[2])
    if crash:
        with faults.use(Injector([Fault(crash, faults.Outcome.UNANSWERED)])), pytest.raises(Transient):
            run.process([back])
    for _ in range(2):
        run = runner(flow, store)
        run.process([back])
    for stage in ("a", "b"):
        assert sorted(run.states(stage)[b"N1"].fold) == list(range(9))


def test_two_letters_of_one_event_are_folded_once():
    """A service sent it twice, and each copy died before its key was known."""
    mended = []

    def strict(element):
        if element["minutes"] < 0 and not mended:
            raise ValueError
        return element["late"] is None

    flow = Flow("f").source(wrapped()).filter(strict).aggregate("a", "tail", Refuses(), window=1)
    run = runner(flow)
    roots = [hop("raw", 0, n) for n in range(6)]
    first, second = chained(0, roots[0], minutes=-1), chained(1, roots[0], minutes=-1)
    run.process([first, second, *(chained(n + 1, roots[n], minutes=n) for n in range(1, 6))])
    assert [letter.hole for letter in run.dead_letters] == [False, False]
    mended.append(True)
    for offset, died in ((20, first), (21, second)):
        run.process([comes_back(offset, died, Redrive("a", hole=False), 7, roots[0])])
    assert run.results("a") == {b"N1": [1, 2, 3, 4, 5, 7]}


def test_a_retry_passage_reads_as_the_direct_one_and_its_message_is_late():
    direct = hop("raw", 0, 7)
    run = runner(Flow("f").source(wrapped()).aggregate("a", "tail", FLEET))
    later = [chained(n, hop("raw", 0, 8 + n), minutes=1) for n in range(3)]
    by_retry = chained(5, hop("raw", 0, 7, transparent=True), hop("retry", 2, 1), minutes=1)
    run.process(later)
    assert run.process([by_retry]).verdicts["a"] == Counter(late=1)
    assert run.process([chained(6, direct, minutes=1)]).verdicts["a"] == Counter(duplicate=1)


def test_a_resent_message_is_a_duplicate_by_its_root_though_its_own_offset_is_new():
    run = runner(Flow("f").source(wrapped()).aggregate("a", "tail", FLEET))
    run.process([chained(0, hop("raw", 0, 7), minutes=1)])
    assert run.process([chained(1, hop("raw", 0, 7), minutes=1)]).verdicts["a"] == Counter(duplicate=1)


def test_another_output_of_the_same_input_is_another_message():
    run = runner(Flow("f").source(wrapped()).aggregate("a", "tail", FLEET))
    run.process([chained(n, hop("raw", 0, 7, n), minutes=1) for n in range(3)])
    assert states(run, "a") == {"N1": {"n": 3, "m": 3}}


def test_a_root_topic_created_again_is_folded_beside_the_old_one():
    run = runner(Flow("f").source(wrapped()).aggregate("a", "tail", FLEET))
    run.topic_ids = {"raw": "old"}

    def root(offset, topic_id):
        return chained(offset, Hop("raw", 0, 3, via="wrap", index=0, topic_id=topic_id), minutes=1)

    assert run.process([root(0, "old")]).verdicts["a"] == Counter(accepted=1)
    run.topic_ids = {"raw": "new"}
    assert run.process([root(1, "new")]).verdicts["a"] == Counter(new_incarnation=1)
    assert run.process([root(2, "new"), root(3, "old")]).verdicts["a"] == Counter(duplicate=2)
    assert run.run.manifest.incarnations["raw"] == ("old", "new")


def test_a_message_from_before_the_topic_was_created_again_is_stale_and_folded_by_its_own_lane():
    run = runner(Flow("f").source(wrapped()).aggregate("a", "tail", FLEET))

    def root(offset, at, topic_id):
        return chained(offset, Hop("raw", 0, at, via="wrap", index=0, topic_id=topic_id), minutes=1)

    run.topic_ids = {"raw": "old"}
    run.process([root(0, 3, "old")])
    run.topic_ids = {"raw": "new"}
    run.process([root(1, 0, "new")])
    assert run.process([root(2, 4, "old"), root(3, 3, "old")]).verdicts["a"] == Counter(
        stale_incarnation=1, duplicate=1
    )


def test_ids_and_topics_that_only_messages_name_are_folded_by_their_lanes_and_never_remembered():
    run = runner(Flow("f").source(wrapped()).aggregate("a", "tail", FLEET))
    run.topic_ids = {"raw": "now"}
    named = [Hop("raw", 0, 3, via="wrap", index=0, topic_id=f"id-{n}") for n in range(50)]
    named += [Hop(f"raw-{n}", 0, 3, via="wrap", index=0, topic_id="now") for n in range(50)]
    report = run.process([chained(n, hop, minutes=1) for n, hop in enumerate(named)])
    assert states(run, "a") == {"N1": {"n": 100, "m": 100}}
    assert report.verdicts["a"][Verdict.STALE_INCARNATION] == 50
    assert run.run.manifest.incarnations == {"legs": ("T1",)}


def test_an_unknown_topic_id_of_a_root_is_taken_for_the_current_one():
    flow = Flow("f").source(wrapped()).aggregate("a", "tail", FLEET)
    run = MemoryRunner(flow, {"a": fresh_store()}, topic_ids={"raw": "now"})
    run.process([chained(0, Hop("raw", 0, 3, via="wrap", index=0), minutes=1)])
    again = run.process([chained(1, Hop("raw", 0, 3, via="wrap", index=0, topic_id="now"), minutes=1)])
    assert again.verdicts["a"] == Counter(duplicate=1)


def test_the_cluster_of_the_source_is_part_of_its_lineage():
    run = runner(Flow("f").source(bare(cluster="west")).aggregate("a", "tail", FLEET).publish("out"))
    run.process([leg(1, minutes=1)])
    assert list(run.states("a")[b"N1"].windows.lanes) == [f"west/{TOPIC}:0#T1"]
    assert decode(run.outputs[0].value).chain[0].cluster == "west"


def outputs(run):
    return [(out.topic, out.key, json.loads(decode(out.value).payload), decode(out.value).chain) for out in run.outputs]


def test_what_is_published_behind_the_stages_has_the_whole_chain_and_no_duplicate():
    run = runner(
        Flow("f").source(wrapped()).aggregate("a", "tail", FLEET).publish("out", key="carrier", name="passage")
    )
    first = hop("raw", 0, 7)
    run.process([chained(4, first, carrier="UA"), chained(5, first, carrier="UA")])
    [(topic, key, payload, chain)] = outputs(run)
    assert (topic, key) == ("out", b"UA")
    assert payload == {**dict.fromkeys(COLUMNS), "tail": "N1", "carrier": "UA"}
    assert chain == (first, Hop(TOPIC, 0, 4, via="passage", index=0, rekeyed=True, topic_id="T1"))


def test_what_was_published_can_be_folded_by_another_flow_exactly_once():
    first = runner(
        Flow("f")
        .source(bare())
        .flat_map(lambda e: [e.value, e.value])
        .aggregate("a", "tail", Fields(n=count()))
        .publish(TOPIC + "2")
    )
    first.process([leg(n, minutes=1) for n in range(3)])
    second = runner(Flow("g").source(Topic(TOPIC + "2", bare().payload)).aggregate("b", "tail", FLEET))
    records = [Record(TOPIC + "2", 0, n, out.key, out.value, topic_id="T2") for n, out in enumerate(first.outputs * 2)]
    second.process(records)
    assert states(second, "b") == {"N1": {"n": 6, "m": 6}}


class Running:
    def zero(self):
        return 0

    def fold(self, state, element):
        return state + element["minutes"]


def test_what_a_stage_emits_from_its_state_is_folded_once_by_the_next_one():
    flow = (
        Flow("f")
        .source(bare())
        .aggregate("sums", "tail", Running(), emit=lambda e, state: [{"carrier": e["carrier"], "sum": state}] * 2)
        .aggregate("last", "carrier", Fields(n=count(), top=last("sum")))
    )
    store, records = fresh_store(), [leg(n, carrier="UA", minutes=n) for n in range(5)]
    with faults.use(Injector([Fault.parse("persist:sums.error")])), pytest.raises(Transient):
        runner(flow, store).process(records[:3])
    run = runner(flow, store)
    run.process(records[:3])
    run.process(records)
    assert run.results("sums") == {b"N1": 10}
    assert states(run, "last") == {"UA": {"n": 10, "top": 10}}


def test_a_class_may_say_what_readers_see():
    class Half(Running):
        def result(self, state):
            return state / 2

    run = runner(Flow("f").source(bare()).aggregate("a", "tail", Half()))
    run.process([leg(1, minutes=3)])
    assert run.results("a") == {b"N1": 1.5}
    assert run.states("a")[b"N1"].fold == 3


def test_a_key_with_holes_alone_has_no_result():
    run = runner(parts())
    run.process([leg(1, carrier="bad")])
    assert run.results("a") == {}
    assert set(run.states("a")) == {b"N10"}


def test_expressions_and_callables_give_the_same_states():
    by_callables = (
        Flow("fleet")
        .source(bare())
        .filter(lambda e: e["minutes"] > 0)
        .aggregate("aircraft", lambda e: e["tail"], FLEET)
        .aggregate("carrier", lambda e: e["carrier"], FLEET)
    )
    run, other = runner(fleet()), runner(by_callables)
    for part in (batch(*range(4)), batch(*range(2, 9))):
        run.process(part)
        other.process(part)
    for stage in ("aircraft", "carrier"):
        assert run.states(stage) == other.states(stage)


def test_an_empty_batch_moves_nothing():
    run = runner(fleet())
    run.process(batch(1))
    run.process([])
    assert run.run.start == {(TOPIC, 0): 2}
