"""Which messages the in-memory runner takes for one: by chain, root, topic id and cluster."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from aggregations.definition.flow import Flow
from aggregations.run.memory import MemoryRunner
from envelope import Hop, Siblings, Verdict, decode
from tests.support.both import Both
from tests.support.pure import FLEET, TOPIC, bare, chained, fresh_store, hop, leg, runner, states, wrapped


def test_a_retry_processor_reads_as_the_direct_one_and_its_message_is_late():
    direct = hop("raw", 0, 7)
    run = runner(Flow("f").source(wrapped()).aggregate("a", "tail", FLEET))
    later = [chained(n, hop("raw", 0, 8 + n), minutes=1) for n in range(3)]
    by_retry = chained(5, hop("raw", 0, 7, pass_through=True), hop("retry", 2, 1), minutes=1)
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


@pytest.mark.parametrize(
    ("siblings", "folded"), [(Siblings.EVENT_ID, [2, 1]), (Siblings.GROUP, [2, 0]), (Siblings.DROP, [1, 0])]
)
def test_messages_of_one_root_that_no_index_tells_apart_are_folded_as_the_source_says(siblings, folded):
    """By their ids; all that come in one batch; or the first alone."""
    run = runner(Flow("f").source(wrapped(siblings=siblings)).aggregate("a", "tail", FLEET))
    first, second, third = (chained(n, hop("raw", 0, 7, None), event_id=f"e{n}", minutes=1) for n in range(3))
    total = 0
    for records, new in zip(([first, second], [third]), folded, strict=True):
        run.process(records)
        total += new
        assert states(run, "a") == {"N1": {"n": total, "m": total}}


def test_an_offset_that_a_truncated_log_gave_twice_is_two_events_behind_a_republisher():
    """KIP-320: the republisher's consumer is reset and sends the log again, with other records from offset 5 on."""
    flow = Flow("f").source(wrapped()).aggregate("a", "tail", FLEET)

    def sent(number, offset, epoch):
        return chained(number, Hop("raw", 0, offset, "wrap", 0, topic_id="R", leader_epoch=epoch), minutes=1)

    first = [sent(n, n, 3) for n in range(10)]
    again = [sent(10 + n, n, 3 if n < 5 else 4) for n in range(13)]
    run = runner(flow)
    run.process(first)
    run.process(again)
    assert run.process([sent(30, 7, 3), sent(31, 7, 4)]).verdicts["a"] == Counter(duplicate=2)
    assert states(run, "a") == {"N1": {"n": 18, "m": 18}}
    both = Both(flow)
    both.process(first)
    both.process(again)
    assert both.results("a") == {b"N1": {"n": 18, "m": 18}}


def test_positions_up_to_the_highest_leader_epoch_are_judged_and_stored_alike_on_both_paths():
    rng, both, number = Random(5), Both(Flow("f").source(wrapped()).aggregate("a", "tail", FLEET)), 0
    for epochs in ([None, 1], [1, 7], [7, 2**18 - 1], [2**18 - 1]):
        roots = [(rng.choice(epochs), rng.choice([rng.randrange(90), 2**45 - 1 - rng.randrange(9)])) for _ in range(90)]
        both.process(
            [
                chained(
                    number + n,
                    Hop("raw", offset % 2, offset, "wrap", 0, topic_id="R", leader_epoch=epoch),
                    key=f"N{offset % 3}",
                    minutes=1,
                )
                for n, (epoch, offset) in enumerate(sorted(roots, key=lambda one: (one[0] or 0, one[1])))
            ]
        )
        number += len(roots)
    assert sum(state["n"] for state in both.results("a").values()) > 150


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


@pytest.mark.parametrize(
    ("named", "given", "known"),
    [
        ("T1", {}, {"legs": "T1"}),
        ("", {"legs": "T2", "raw": "R"}, {"legs": "T2"}),
        ("T1", {"legs": "T2"}, {"legs": "T1"}),
        ("", {"raw": "R"}, {}),
    ],
)
def test_the_manifest_has_the_topic_id_that_the_records_name_or_else_the_one_that_was_given(named, given, known):
    flow = Flow("f").source(bare()).aggregate("a", "tail", FLEET)
    run = MemoryRunner(flow, {"a": fresh_store()}, topic_ids=given)
    run.process([replace(leg(0), topic_id=named)])
    assert run.run.manifest.topic_ids == known


def test_the_cluster_of_the_source_is_part_of_its_lineage():
    run = runner(Flow("f").source(bare(cluster="west")).aggregate("a", "tail", FLEET).publish("out"))
    run.process([leg(1, minutes=1)])
    assert list(run.states("a")[b"N1"].histories.lanes) == [f"west/{TOPIC}:0#T1"]
    assert decode(run.outputs[0].value).chain[0].cluster == "west"


@pytest.mark.parametrize("keys_behind", [False, True])
def test_a_topic_without_keys_is_exact_when_a_thousand_records_are_sent_again_over_other_partitions(keys_behind):
    """The record that is read has no key, or the hop says that the one before it had none."""
    choose, ends = Random(7), [0] * 4
    run = runner(Flow("f").source(wrapped()).aggregate("a", "tail", FLEET, co_partitioned=False))

    def sent(root):
        partition = choose.randrange(4)
        ends[partition] += 1
        if keys_behind:
            middle = hop("middle", partition, ends[partition], rekeyed=True)
            return chained(sum(ends), hop("raw", 0, root, keyless=True), middle, minutes=1)
        record = chained(ends[partition], hop("raw", 0, root, keyless=True), partition=partition, minutes=1)
        return replace(record, key=None, partition=partition)

    records = [sent(root) for root in [*range(3000), *range(2000, 3000)]]
    for start in range(0, len(records), 500):
        run.process(records[start : start + 500])
    assert states(run, "a") == {"N1": {"n": 3000, "m": 3000}}
    assert run.report.keyless == {"a": 4000}
