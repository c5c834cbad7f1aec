"""What a run's start is decided from, and what is refused."""

import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from aggregations.errors import DefinitionChangedError, RunRefusedError
from aggregations.run.common import common
from aggregations.run.consistency import check_durability, check_marks, check_stores
from aggregations.run.plan import Broker, PartitionPlan, Plan, plan
from aggregations.run.risks import Risk, refuse
from persistence.findings import Finding
from persistence.manifest import Growth, Manifest, Progress
from persistence.marks import Bucket, Mark
from persistence.protocol import Capabilities, FlowRef

NOTHING = Bucket()


def manifest(offset: int, topic_id: str = "one", **definitions: str) -> Manifest:
    return Manifest(1, 1, {"t": {0: Progress(offset)}}, {"t": topic_id}, {"t": (topic_id,)}, definitions)


def risks(findings: object) -> list[str]:
    return [finding.risk for finding in findings]  # type: ignore[attr-defined]


def planned(stored: Manifest | None, low: int = 0, high: int = 100, topic_id: str = "one", **group: int):
    broker = Broker("t", topic_id, {0: (low, high), 1: (0, 5)}, {0: group["group"]} if group else {})
    return plan("flow", stored, [("s", stored)], broker)


def test_a_partition_starts_at_the_manifest_and_one_that_it_does_not_know_at_its_beginning() -> None:
    found = planned(manifest(40), group=7)
    assert [one.start for one in found.partitions] == [40, None]
    assert [one.lag for one in found.partitions] == [60, 5]
    assert not found.findings
    assert "partition 0: starts at 40; manifests: s 40; group 7; log 0 to 100; 60 to read" in found.lines()[1]


def test_the_group_s_offset_is_shown_and_never_followed() -> None:
    assert planned(manifest(40), group=99).partitions[0].start == 40
    assert planned(None, group=99).partitions[0].start is None


def test_retention_that_has_passed_the_manifest_is_a_risk_and_the_start_is_where_the_log_begins() -> None:
    found = planned(manifest(40), low=50)
    assert risks(found.findings) == ["lost-records"]
    assert "10 offsets were deleted unread" in found.findings[0].what
    assert found.partitions[0].start == 50


@pytest.mark.parametrize(("stored", "lost"), [(manifest(40), ["lost-records"]), (None, [])])
def test_what_an_added_partition_lost_before_it_was_read_is_a_risk(stored: Manifest | None, lost: list[str]) -> None:
    """SPARK-17346: nobody has read it, so it begins at offset 0. A flow that never ran begins where each log does."""
    found = plan("flow", stored, [("s", stored)], Broker("t", "one", {0: (0, 100), 1: (4, 10)}))
    assert risks(found.findings) == lost
    assert all("t:1 was added since the flow began and was never read" in one.what for one in found.findings)
    assert all("4 offsets were deleted unread" in one.what for one in found.findings)
    assert found.starts[1] == 4


def test_a_manifest_beyond_the_end_of_the_log_is_a_risk() -> None:
    found = planned(manifest(140))
    assert risks(found.findings) == ["beyond-end"]
    assert found.partitions[0].start == 100


def cut(
    next_offset: int, end: int | None, *, crashed: bool = False, high: int = 100, low: int = 0, **known: Any
) -> tuple[list[str], Progress]:
    """The risks and the progress of a partition whose records of leader epoch 3 end there; its leader has epoch 5."""
    progress = Progress(next_offset, leader_epoch=3, **known)
    stored = Manifest(1, 1, {"t": {0: progress}}, {"t": "one"}, {"t": ("one",)})
    ends = {} if end is None else {0: end}
    broker = Broker("t", "one", {0: (low, high)}, leader_epochs={0: 5}, epoch_ends=ends)
    found = plan("flow", stored, [("s", stored)], broker, crashed=crashed)
    return risks(found.findings), found.logs[0]


def test_a_log_that_was_cut_and_written_past_the_position_is_a_risk_and_resumes_at_the_cut_in_a_branch() -> None:
    assert cut(40, 30) == (["beyond-end"], Progress(30, leader_epoch=5, branches=((30, 5),)))
    assert cut(40, 30, high=30) == (["beyond-end"], Progress(30, leader_epoch=5, branches=((30, 5),)))
    assert cut(40, 30, branches=((20, 2), (35, 3))) == (
        ["beyond-end"],
        Progress(30, leader_epoch=5, branches=((20, 2), (30, 5))),
    )


def test_a_new_leader_that_has_all_records_is_noted_and_nothing_else() -> None:
    assert cut(40, 40) == cut(40, 50) == ([], Progress(40, leader_epoch=5))


def test_after_a_crash_and_a_new_leader_records_from_the_end_of_the_old_epoch_on_are_others() -> None:
    """The crashed run may have folded records beyond the manifest, and those may be lost."""
    assert cut(40, 50, crashed=True) == ([], Progress(40, leader_epoch=5, branches=((50, 5),)))
    assert cut(40, None, crashed=True) == ([], Progress(40, leader_epoch=5))


def test_a_log_that_ends_below_the_position_resumes_at_its_end_in_a_branch_also_without_a_new_leader() -> None:
    assert cut(40, None, high=20, branches=((10, 5),)) == (
        ["beyond-end"],
        Progress(20, leader_epoch=5, branches=((10, 5), (20, 6))),
    )


def test_a_leader_that_knows_no_record_of_the_epoch_is_a_risk_and_nothing_is_read_twice() -> None:
    assert cut(40, -1) == (["beyond-end"], Progress(40, leader_epoch=5, branches=((40, 5),)))


def test_branches_below_the_beginning_of_the_log_are_forgotten_but_for_the_last() -> None:
    assert cut(40, 40, low=25, branches=((10, 2), (20, 3), (30, 4)))[1].branches == ((20, 3), (30, 4))


def test_a_generation_that_begins_names_records_as_another_one_does() -> None:
    found = plan("f", None, [("s", None)], Broker("t", "one", {0: (0, 100), 1: (0, 9)}), branches={0: ((20, 2),)})
    assert {partition: log.branches for partition, log in found.logs.items()} == {0: ((20, 2),), 1: ()}


def test_the_store_that_is_furthest_decides_whether_records_were_lost() -> None:
    """Downstream was written before the crash; upstream reads on below the cut."""
    up, down = (
        Manifest(1, 1, {"t": {0: Progress(at, leader_epoch=3)}}, {"t": "one"}, {"t": ("one",)}) for at in (20, 40)
    )
    broker = Broker("t", "one", {0: (0, 100)}, leader_epochs={0: 5}, epoch_ends={0: 30})
    found = plan("flow", common([up, down], FlowRef("flow")), [("up", up), ("down", down)], broker)
    assert (risks(found.findings), found.logs[0]) == (
        ["beyond-end"],
        Progress(20, leader_epoch=5, branches=((30, 5),)),
    )


def test_a_branch_that_one_store_has_noted_holds_for_all_and_their_positions_beyond_it_go_back() -> None:
    """A run that died while it noted an accepted loss has written it downstream only."""
    up = Manifest(1, 1, {"t": {0: Progress(40, leader_epoch=3)}}, {"t": "one"}, {"t": ("one",)})
    noted = Progress(30, leader_epoch=5, branches=((30, 5),))
    down = Manifest(2, 1, {"t": {0: noted}}, {"t": "one"}, {"t": ("one",)})
    assert check_stores("f", [("up", up), ("down", down)], {}) == []
    found = common([up, down], FlowRef("flow"))
    assert found is not None
    assert found.positions == {"t": {0: noted}}


def test_a_topic_that_was_created_again_is_a_risk_and_begins_anew() -> None:
    found = planned(manifest(40, topic_id="old"))
    assert risks(found.findings) == ["topic-recreated"]
    assert [one.start for one in found.partitions] == [None, None]


def test_a_downstream_store_behind_its_upstream_is_a_risk_and_the_other_way_round_is_what_a_crash_leaves() -> None:
    old, new = manifest(40), manifest(60)
    assert risks(check_stores("f", [("up", new), ("down", old)], {})) == ["downstream-behind"]
    assert check_stores("f", [("up", old), ("down", new)], {}) == []


def test_a_store_without_a_manifest_is_a_risk_if_one_upstream_has_one_or_one_downstream_has_begun() -> None:
    assert risks(check_stores("f", [("up", manifest(1)), ("down", None)], {})) == ["store-empty"]
    assert risks(check_stores("f", [("up", Manifest(1, 0)), ("down", None)], {})) == ["store-empty"]
    assert risks(check_stores("f", [("up", None), ("down", manifest(1))], {})) == ["store-empty"]
    assert risks(check_stores("f", [("up", None), ("down", Manifest(1, 1))], {})) == ["store-empty"]
    assert check_stores("f", [("up", None), ("down", Manifest(1, 0))], {}) == []
    assert check_stores("f", [("up", None), ("down", None)], {}) == []
    assert risks(check_stores("f", [("a", None), ("b", Manifest(1, 1)), ("c", Manifest(1, 0))], {})) == ["store-empty"]


def test_stores_behind_an_empty_one_are_compared_as_well() -> None:
    stores = [("a", manifest(40)), ("b", None), ("c", manifest(60)), ("d", manifest(50))]
    assert risks(check_stores("f", stores, {})) == ["store-empty", "downstream-behind"]


def lost(acknowledged: Manifest, held: dict[str, Bucket], *, since: int = 0, upstream: Bucket = NOTHING) -> list[str]:
    """What is found lost of stage `s`, whose store has this manifest; a stage upstream has one bucket."""
    buckets = {"up": {"0": upstream}, "s": held}
    stores = [("up", Manifest(1, 1)), ("s", acknowledged)]
    return [str(one) for one in check_marks("f", stores, buckets, {"up": "up", "s": "s"}, since)]


def test_marks_count_from_the_epoch_on_at_which_a_loss_was_last_accepted() -> None:
    acknowledged, behind = Manifest(3, 1, marks={"s": {"0": "7"}}), {"0": Bucket(Mark(6))}
    assert lost(acknowledged, {"0": Bucket(Mark(7))}) == []
    for since, found in ((3, 1), (4, 0)):
        assert len(lost(acknowledged, behind, since=since)) == found
        assert len(lost(Manifest(9, 1), behind, since=since, upstream=Bucket(Mark(1), 3, {"s": {"0": "7"}}))) == found
    assert lost(acknowledged, behind, upstream=Bucket(Mark(1), 3, {"s": {"0": "6"}})) != []


def test_at_most_five_buckets_that_lost_states_are_named_each_with_what_was_acknowledged_and_what_is_there() -> None:
    marks = {"s": {str(bucket): "7 life" for bucket in range(6)}}
    [finding] = lost(Manifest(3, 1, marks=marks), {"1": Bucket(Mark(6, (("life", 0),)))})
    assert "flow f: 6 buckets of its stores lost acknowledged states" in finding
    places = finding.partition("(")[2].partition(")")[0].split("; ")
    assert places == [
        f"stage s, bucket {bucket}: save 7 life was acknowledged but the newest is {'6 life' if bucket == 1 else 0}"
        for bucket in range(5)
    ]


def test_states_of_another_definition_are_a_risk() -> None:
    assert risks(check_stores("f", [("s", manifest(1, s="old"))], {"s": "new"})) == ["definition"]
    assert check_stores("f", [("s", manifest(1, s="same", gone="x"))], {"s": "same"}) == []
    assert risks(check_stores("f", [("s", manifest(1, a="x", b="y"))], {"b": "y", "a": "x"})) == ["definition"]


def test_a_stage_that_a_manifest_does_not_name_or_that_its_store_does_not_keep_is_a_risk() -> None:
    known = {"s": "x", "t": "y"}
    moved = msgspec.structs.replace(manifest(1, **known), kept=("s",))
    homes = {"s": "up", "t": "up"}
    assert risks(check_stores("f", [("s", manifest(1, s="x"))], known)) == ["stage-added"]
    assert risks(check_stores("f", [("up", manifest(1, **known)), ("down", manifest(1, t="y"))], known)) == [
        "stage-added"
    ]
    assert risks(check_stores("f", [("up", moved)], known, homes)) == ["stage-added"]
    assert check_stores("f", [("up", moved)], known, {"s": "up", "t": "down"}) == []
    assert check_stores("f", [("up", manifest(1, **known))], known, homes) == []


def test_every_finding_is_refused_unless_its_risk_is_accepted_by_name() -> None:
    findings = [
        Finding(Risk.LOST_RECORDS, "gone", "bring it", unsafe=True),
        Finding(Risk.BEYOND_END, "short", "correct it", unsafe=True),
        Finding("slow", "slow", "buy a disk"),
    ]
    with pytest.raises(RunRefusedError, match=r"^short. correct it \(--accept beyond-end\)$"):
        refuse(findings, ["lost-records"])
    refuse(findings, ["lost-records", "beyond-end"])


def test_a_changed_definition_has_an_error_of_its_own() -> None:
    with pytest.raises(DefinitionChangedError):
        refuse([Finding(Risk.DEFINITION, "other", "rebuild", unsafe=True)], [])


def test_a_store_that_is_written_before_another_one_must_be_durable() -> None:
    ordered, safe = Capabilities(ordered_durability=True), Capabilities(durable=True)
    assert risks(check_durability([("up", ordered), ("down", ordered)])) == ["not-durable"]
    assert check_durability([("up", ordered), ("down", safe)]) == []
    assert check_durability([("only", ordered)]) == []


def test_a_store_whose_parts_lose_different_amounts_is_refused_even_alone() -> None:
    loose, safe = Capabilities(), Capabilities(durable=True)
    assert risks(check_durability([("only", loose)])) == ["not-durable"]
    assert risks(check_durability([("up", loose), ("down", safe)])) == ["not-durable"]
    assert risks(check_durability([("up", loose), ("down", loose)])) == ["not-durable", "not-durable"]


def test_an_offset_at_either_end_of_the_log_is_within_it() -> None:
    for offset in (10, 100):
        found = planned(manifest(offset), low=10)
        assert (found.findings, found.partitions[0].start) == ([], offset)


def test_a_topic_whose_id_is_not_known_on_one_of_both_sides_is_the_same() -> None:
    stored = Manifest(1, 1, {"t": {0: Progress(40)}})
    assert [planned(one, topic_id=now).findings for one, now in [(stored, "one"), (manifest(40), "")]] == [[], []]


def test_what_a_manifest_says_of_other_topics_is_not_asked() -> None:
    other = Manifest(1, 1, {"u": {0: Progress(40)}}, {"u": "id"})
    assert [(one.start, one.stores) for one in planned(other).partitions] == [(None, {"s": None})] * 2


def test_the_plan_is_of_the_topic_as_it_is_now() -> None:
    assert planned(manifest(40, topic_id="old")).lines()[0] == "topic t (id one)"
    assert (planned(None).starts, planned(None).findings) == ({0: 0, 1: 0}, [])
    assert planned(manifest(40), low=50).starts == {0: 50, 1: 0}


def test_what_is_not_known_is_shown_as_such() -> None:
    unknown = PartitionPlan(0, None, {"a": None, "b": 7}, None, 2, 5)
    assert Plan("t", "", [unknown, PartitionPlan(1, 3, {}, None, 0, 2)]).lines() == [
        "topic t (id unknown)",
        "  partition 0: starts at its beginning; manifests: a -, b 7; group -; log 2 to 5; 3 to read",
        "  partition 1: starts at 3; manifests: -; group -; log 0 to 2; 0 to read",
    ]


def test_at_most_five_partitions_that_are_behind_are_named() -> None:
    old, new = (Manifest(1, 1, {"t": {p: Progress(offset) for p in range(9)}}) for offset in (4, 6))
    [found] = check_stores("f", [("up", new), ("down", old)], {})
    assert "at t:0, t:1, t:2, t:3, t:4: it lost data" in found.what


@pytest.mark.parametrize(
    ("findings", "text"),
    [
        (
            lambda: planned(manifest(40), low=50).findings,
            r"flow flow: t:0 is folded up to 40, .* begins at 50.*\. Restore them",
        ),
        (
            lambda: planned(manifest(140)).findings,
            r"flow flow: t:0 is folded up to 140, .* ends at 100.*\. Correct the address",
        ),
        (
            lambda: planned(manifest(4, "old")).findings,
            r"flow flow: topic t was created again: its id is one, the flow read id old\. If that is intended",
        ),
        (
            lambda: check_stores("f", [("up", manifest(60)), ("down", manifest(40))], {}),
            r"flow f: the store of stage down is behind that of stage up at t:0.*\. Restore the store, or rebuild",
        ),
        (
            lambda: check_stores("f", [("a", manifest(1)), ("b", None), ("c", None)], {}),
            r"flow f: the store of stage b, c contains nothing of the flow.*\. Correct the URL, restore the store, or rebuild",
        ),
        (
            lambda: check_stores("f", [("s", manifest(1, s="old"))], {"s": "new"}),
            r"flow f: stage s has definition new; the flow last ran with old\. Rebuild the flow",
        ),
        (
            lambda: check_stores("f", [("s", manifest(1, s="old", t="old"))], {"s": "new", "t": "newer"}),
            r"with old, stage t has definition newer; the flow last ran with old\. Rebuild the flow",
        ),
        (
            lambda: check_stores("f", [("s", manifest(1, a="x", b="y"))], {"b": "y", "a": "x"}),
            r"flow f: its stages were in a different order before\. Rebuild the flow",
        ),
        (
            lambda: check_stores("f", [("s", manifest(1, s="x"))], {"s": "x", "t": "y"}),
            r"flow f first ran without stage t in its store.*\. Rebuild the flow",
        ),
        (
            lambda: check_durability([("up", Capabilities(durable=True)), ("down", Capabilities())]),
            r"the store of stage down may lose .* that of stage up, written after it.*\. Configure it to sync before",
        ),
        (
            lambda: check_durability([("only", Capabilities())]),
            r"the store of stage only may lose acknowledged states .*keep later writes\. Configure it to sync before",
        ),
    ],
)
def test_a_finding_says_what_and_where_and_what_to_do_and_is_unsafe(
    findings: Callable[[], list[Finding]], text: str
) -> None:
    [finding] = findings()
    assert finding.unsafe
    assert re.search(text, str(finding))


def test_everything_that_is_refused_is_said_at_once_with_the_flags_that_accept_it() -> None:
    findings = [
        Finding("b", "one.", "x.", unsafe=True),
        Finding("a", "two", "y", unsafe=True),
        Finding("b", "2", "z", unsafe=True),
    ]
    with pytest.raises(RunRefusedError, match=r"^one\. x; two\. y; 2\. z \(--accept b --accept a\)$"):
        refuse(findings, [])
    with pytest.raises(RunRefusedError) as caught:
        refuse([Finding(Risk.DEFINITION, "other", "rebuild", unsafe=True), *findings], [])
    assert not isinstance(caught.value, DefinitionChangedError)


def grown(stored: Manifest, *ends: int, publishes: bool = True) -> Plan:
    marks = {partition: (0, end) for partition, end in enumerate(ends)}
    return plan("flow", stored, [("s", stored)], Broker("t", "one", marks, clock_ms=7), publishes=publishes)


def test_partitions_that_were_added_meanwhile_are_a_growth_and_no_risk_where_nothing_is_published() -> None:
    found = grown(manifest(40), 90, 5, publishes=False)
    assert found.growth == Growth(1, 2, 7)
    assert not found.findings
    assert found.starts == {0: 40, 1: 0}
    assert found.lines()[-1].strip().startswith("growth of topic t from 1 to 2 partitions")


def test_a_flow_that_publishes_is_refused_when_they_were_added_before_everything_was_read() -> None:
    [finding] = grown(manifest(40), 90, 0).findings
    assert (finding.risk, finding.unsafe) == ("grown-undrained", True)
    assert finding.what.startswith("flow flow: topic t grew from 1 to 2 partitions before it was read to its end")
    assert finding.remedy.startswith("Accept the risk if consumers of the published messages need no order")
    assert risks(grown(manifest(40), 40, 1).findings) == ["grown-undrained"]
    drained = grown(manifest(40), 40, 0)
    assert not drained.findings
    assert drained.starts == {0: 40, 1: 0}


def test_it_goes_on_with_the_old_partitions_when_a_run_before_it_had_seen_the_growth() -> None:
    seen = msgspec.structs.replace(manifest(40), growth={"t": Growth(1, 2, 3)})
    found = grown(seen, 90, 9)
    assert not found.findings
    assert found.growth == Growth(1, 2, 3)
    assert found.starts == {0: 40}
    assert "partition 1: starts at its beginning, once the others are drained" in found.lines()[2]
    assert risks(grown(seen, 90, 9, 4).findings) == ["grown-undrained"], "it grew again meanwhile"


def test_a_topic_that_was_created_again_has_no_growth() -> None:
    seen = msgspec.structs.replace(manifest(40, topic_id="old"), growth={"t": Growth(1, 2, 3)})
    assert grown(seen, 90, 9).growth is None
