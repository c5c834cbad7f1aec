"""Compacted topics that are read."""

import pytest

from persistence.compaction import COMPACTED_SOURCE, compaction


@pytest.mark.parametrize("policy", ["delete", ""])
def test_a_topic_that_is_not_compacted_is_no_finding(policy: str) -> None:
    assert compaction({"orders": policy}) == []


@pytest.mark.parametrize("policy", ["compact", "compact,delete", "delete,compact"])
def test_a_compacted_topic_is_unsafe(policy: str) -> None:
    [found] = compaction({"orders": policy})
    assert (found.risk, found.unsafe) == (COMPACTED_SOURCE, True)
    assert f"orders is compacted (cleanup.policy={policy})" in found.what


def test_settings_that_may_not_be_read_are_said_and_not_refused() -> None:
    [found] = compaction({"orders": None})
    assert (found.risk, found.unsafe) == ("cleanup-policy-unknown", False)
    assert "DescribeConfigs" in found.remedy
