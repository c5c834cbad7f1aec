"""Checks whether the transactions of a node are linearizable. Fencing and conditional writes depend on it.

With Paxos v1 they are not while ranges move (a node joins, leaves or is replaced): a transaction can be lost, or be
visible to some nodes only. Paxos v2 (Cassandra 4.1) repairs transactions when the ring changes. Serial reads complete
a transaction in progress. Before CASSANDRA-12126 (3.0.24, 3.11.10, 4.0) they were not linearizable with other
transactions, and settings for upgrades can restore that behaviour.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from persistence.findings import Finding

PAXOS_RISKS: Final = frozenset({"paxos-v1", "paxos-repair", "serial-reads"})
SERIAL_READS: Final = "cassandra.unsafe.disable-serial-reads-linearizability"
"""System property that undoes CASSANDRA-12126, in 3.0, 3.11 and 4.0. Since 4.1 it is a value of `paxos_variant`."""

_V2: Final = (4, 1)
_VERSION: Final = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?(-?)")


@dataclass(frozen=True, slots=True)
class PaxosNode:
    """What one node reports about itself.

    Attributes:
        version: Its `release_version`; empty if unknown.
        settings: Its configuration, as far as the node shows it.
        hidden: The node shows no configuration.
        serial_reads: Value of the property `SERIAL_READS`, empty if it is not set; None if the node does not show it.
    """

    version: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    hidden: bool = False
    serial_reads: str | None = ""

    @property
    def number(self) -> tuple[int, int, int] | None:
        """Version as numbers, a pre-release below its release; None if unknown."""
        found = _VERSION.match(self.version)
        if found is None:
            return None
        major, minor, patch, pre = found.groups()
        return int(major), int(minor), -1 if pre and not patch else int(patch or 0)


def of_paxos(name: str, node: PaxosNode, keyspace: str) -> Iterator[Finding]:
    """Findings about unsafe transactions of one node.

    Args:
        name: Its name, for the texts.
        node: What the node reports.
        keyspace: Keyspace of the store.
    """
    variant, number = node.settings.get("paxos_variant", ""), node.number
    if variant.startswith("v1") or (number and number[:2] < _V2):
        yield Finding(
            "paxos-v1",
            f"{name} (Cassandra {node.version or 'of an unknown version'}) uses Paxos v1, whose transactions are not "
            "linearizable while ranges move between nodes: a replaced run may then still write",
            "Set paxos_variant: v2 on all nodes (Cassandra 4.1 and newer); accept it only if no node joins, leaves or is "
            "replaced while flows run",
            unsafe=True,
        )
    if "without_linearizable_reads" in variant or node.serial_reads == "true" or (number and _lacks_12126(number)):
        yield Finding(
            "serial-reads",
            f"{name} (Cassandra {node.version or 'of an unknown version'}) does not make serial reads linearizable "
            "(CASSANDRA-12126): a write that is read back after a lost answer may be undone later",
            f"Upgrade to 4.1 or newer with paxos_variant: v2, and do not set {SERIAL_READS}",
            unsafe=True,
        )
    skipped = [one.strip(" []'") for one in node.settings.get(_SKIPPED_KEYSPACES, "").split(",")]
    if node.settings.get(_SKIPPED) == "true" or keyspace in skipped:
        yield Finding(
            "paxos-repair",
            f"{name} does not repair transactions when ranges move between nodes ({_SKIPPED})",
            f"Set {_SKIPPED}: false, and remove {keyspace} from {_SKIPPED_KEYSPACES}",
            unsafe=True,
        )


_SKIPPED: Final = "skip_paxos_repair_on_topology_change"
_SKIPPED_KEYSPACES: Final = "skip_paxos_repair_on_topology_change_keyspaces"


def unread(node: PaxosNode) -> list[str]:
    """Names of the relevant settings that a node does not show. Safety cannot rely on an unknown setting."""
    number = node.number
    names = [] if number else ["release_version"]
    if node.hidden or "commitlog_sync" not in node.settings:
        names.append("commitlog_sync")
    if (number is None or number[:2] >= _V2) and "paxos_variant" not in node.settings:
        names.append("paxos_variant")
    if (number is None or number[:2] < _V2) and node.serial_reads is None:
        names.append(SERIAL_READS)
    return names


def _lacks_12126(number: tuple[int, int, int]) -> bool:
    """Whether a version is older than the fix in 3.0.24, 3.11.10 and 4.0."""
    if number[:2] == (3, 0):
        return number[2] < 24
    if number[:2] == (3, 11):
        return number[2] < 10
    return number < (4, 0, 0)
