"""The plan of a run as one line of JSON."""

import json

import pytest

from aggregations.run.plan import PartitionPlan, Plan
from aggregations.run.risks import Risk
from jobs.cli.run import show_plan
from persistence.findings import Finding
from persistence.manifest import Growth


@pytest.mark.parametrize("until", [None, {0: 70, 1: 50}])
def test_a_plan_with_all_that_it_can_have_is_one_line_of_json(until, capsys):
    finding = Finding(Risk.GROWN_UNDRAINED, "the topic grew", "read it to its end")
    partitions = [PartitionPlan(0, 40, {"aircraft": 40}, None, 30, 70), PartitionPlan(1, None, {}, 5, 0, 50)]
    plan = Plan("legs", "an-id", partitions, [finding], Growth(1, 2, 99, until), [1])
    show_plan(plan, json=True)
    told = json.loads(capsys.readouterr().out)["plan"]
    assert told["topic"] == "legs"
    assert told["growth"] == {
        "partitions_before": 1,
        "partitions_now": 2,
        "seen_at_ms": 99,
        "until": None if until is None else {"0": 70, "1": 50},
    }
    assert told["waiting"] == [1]
    assert told["lag"] == [30, 50]
    assert told["partitions"][0]["stores"] == {"aircraft": 40}
    assert [one["risk"] for one in told["findings"]] == ["grown-undrained"]
