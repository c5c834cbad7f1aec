"""Compacted topics: Kafka keeps the newest record of each key, and may delete the others before they are read."""

from collections.abc import Mapping
from typing import Final

from persistence.findings import Finding

COMPACTED_SOURCE: Final = "compacted-source"
"""Risk of reading a compacted topic."""
_UNKNOWN: Final = "cleanup-policy-unknown"


def compaction(policies: Mapping[str, str | None]) -> list[Finding]:
    """Return findings about the source topics.

    Args:
        policies: cleanup.policy by topic, None if this user may not read it: from `Topics.cleanup_policies`.
    """
    found = []
    for topic, policy in policies.items():
        if policy is None:
            what = f"this user may not read the settings of topic {topic}, so the topic may be compacted"
            remedy = "Grant DescribeConfigs on it (kafka-acls), or make sure that its cleanup.policy is delete"
            found.append(Finding(_UNKNOWN, what, remedy))
        elif "compact" in policy.split(","):
            what = f"topic {topic} is compacted (cleanup.policy={policy}): Kafka deletes a record once a newer record has its key, whether or not it was read"
            remedy = "Read a topic with cleanup.policy=delete, or accept the risk if every record is read before it is compacted"
            found.append(Finding(COMPACTED_SOURCE, what, remedy, unsafe=True))
    return found
