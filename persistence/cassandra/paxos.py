"""Whether transactions of a node are linearizable. Fencing and conditional writes rest on it.

With Paxos v1 they are not while ranges move (a node joins, leaves or is replaced): a transaction can be forgotten or seen
by some only. Paxos v2 (Cassandra 4.1) repairs them over a change of the ring. Serial reads, which end a transaction
that is under way, were not linearizable with other transactions before CASSANDRA-12126 (3.0.24, 3.11.10, 4.0), and can
be made so again by settings for upgrades.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from persistence.findings import Finding

PAXOS_RISKS: Final = frozenset({"paxos-v1", "paxos-repair", "serial-reads"})
SERIAL_READS: Final = "cassandra.unsafe.disable-serial-reads-linearizability"
"""System property that undoes CASSANDRA-12126, in 3.0, 3.11 and 4.0. From 4.1 on it is a variant of `paxos_variant`."""

_V2: Final = (4, 1)
_VERSION: Final = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?(-?)")


@dataclass(frozen=True, slots=True)
class PaxosNode:
    """What one node says of itself.

    Attributes:
        version: Its `release_version`; empty when it does not say.
        settings: Its configuration, as far as it is shown.
        hidden: It shows none of it.
        serial_reads: Value of the property `SERIAL_READS`, empty when it is not set; None when it is not shown.
    """

    version: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    hidden: bool = False
    serial_reads: str | None = ""

    @property
    def number(self) -> tuple[int, int, int] | None:
        """Version as numbers, a pre-release below its release; None when it is not known."""
        found = _VERSION.match(self.version)
        if found is None:
            return None
        major, minor, patch, pre = found.groups()
        return int(major), int(minor), -1 if pre and not patch else int(patch or 0)


def of_paxos(name: str, node: PaxosNode, keyspace: str) -> Iterator[Finding]:
    """What makes transactions of one node unsafe.

    Args:
        name: Its name, for the texts.
        node: What it says.
        keyspace: Where the store is.
    """
    variant, number = node.settings.get("paxos_variant", ""), node.number
    if variant.startswith("v1") or (number and number[:2] < _V2):
        yield Finding(
            "paxos-v1",
            f"{name} (Cassandra {node.version or 'of an unknown version'}) uses Paxos v1, whose transactions are not "
            "linearizable while ranges move between nodes: a run that was replaced may then still write",
            "Set paxos_variant: v2 on all nodes (Cassandra 4.1 and newer); accept it only if no node joins, leaves or is "
            "replaced while flows run",
            unsafe=True,
        )
    if "without_linearizable_reads" in variant or node.serial_reads == "true" or (number and _lacks_12126(number)):
        yield Finding(
            "serial-reads",
            f"{name} (Cassandra {node.version or 'of an unknown version'}) does not make serial reads linearizable "
            "(CASSANDRA-12126): what is read back after a lost answer may be undone later",
            f"Upgrade to 4.1 or newer with paxos_variant: v2, and do not set {SERIAL_READS}",
            unsafe=True,
        )
    skipped = [one.strip(" []'") for one in node.settings.get(_SKIPPED_KEYSPACES, "").split(",")]
    if node.settings.get(_SKIPPED) == "true" or keyspace in skipped:
        yield Finding(
            "paxos-repair",
            f"{name} does not repair transactions when ranges move between nodes ({_SKIPPED})",
            f"Set {_SKIPPED}: false, and take {keyspace} out of {_SKIPPED_KEYSPACES}",
            unsafe=True,
        )


_SKIPPED: Final = "skip_paxos_repair_on_topology_change"
_SKIPPED_KEYSPACES: Final = "skip_paxos_repair_on_topology_change_keyspaces"


def unread(node: PaxosNode) -> list[str]:
    """Names of what a node does not show and what decides here: an unknown setting is none that can be relied on."""
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
    """Whether a version is older than the correction: 3.0.24, 3.11.10, 4.0."""
    if number[:2] == (3, 0):
        return number[2] < 24
    if number[:2] == (3, 11):
        return number[2] < 10
    return number < (4, 0, 0)
