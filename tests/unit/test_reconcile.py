"""What a run's start is decided from, and what is refused."""

import pytest

from aggregations.errors import DefinitionChangedError, RunRefusedError
from aggregations.reconcile import Broker, Risk, check_durability, check_stores, plan, refuse
from persistence.findings import Finding
from persistence.manifest import Manifest, Progress
from persistence.protocol import Capabilities


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


def test_a_manifest_beyond_the_end_of_the_log_is_a_risk() -> None:
    found = planned(manifest(140))
    assert risks(found.findings) == ["beyond-end"]
    assert found.partitions[0].start == 100


def test_a_topic_that_was_created_again_is_a_risk_and_begins_anew() -> None:
    found = planned(manifest(40, topic_id="old"))
    assert risks(found.findings) == ["topic-recreated"]
    assert [one.start for one in found.partitions] == [None, None]


def test_a_downstream_store_behind_its_upstream_is_a_risk_and_the_other_way_round_is_what_a_crash_leaves() -> None:
    old, new = manifest(40), manifest(60)
    assert risks(check_stores("f", [("up", new), ("down", old)], {})) == ["downstream-behind"]
    assert check_stores("f", [("up", old), ("down", new)], {}) == []


def test_an_empty_downstream_store_is_a_risk_and_an_empty_upstream_one_is_refilled() -> None:
    assert risks(check_stores("f", [("up", manifest(1)), ("down", None)], {})) == ["store-empty"]
    assert check_stores("f", [("up", None), ("down", manifest(1))], {}) == []
    assert check_stores("f", [("up", None), ("down", None)], {}) == []


def test_states_of_another_definition_are_a_risk() -> None:
    assert risks(check_stores("f", [("s", manifest(1, s="old"))], {"s": "new"})) == ["definition"]
    assert check_stores("f", [("s", manifest(1, s="same"))], {"s": "same", "later": "x"}) == []


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
    loose, safe = Capabilities(), Capabilities(durable=True)
    assert risks(check_durability([("up", loose), ("down", loose)])) == ["not-durable"]
    assert check_durability([("up", loose), ("down", safe)]) == []
    assert check_durability([("only", loose)]) == []
