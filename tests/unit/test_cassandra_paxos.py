"""Which nodes' transactions are linearizable, by version and settings."""

import pytest

from persistence.cassandra.paxos import SERIAL_READS, PaxosNode, of_paxos, unread

GOOD = {"paxos_variant": "v2", "commitlog_sync": "group"}


def risks(version, serial_reads="", **settings):
    found = list(
        of_paxos("node", PaxosNode(version, settings, hidden=not settings, serial_reads=serial_reads), "fleet")
    )
    assert all(one.unsafe and one.remedy and "node" in one.what for one in found)
    return {one.risk for one in found}


@pytest.mark.parametrize("version", ["4.1.0", "4.1", "5.0.9", "5.1-SNAPSHOT", "10.0"])
def test_paxos_v2_is_safe_and_v1_is_not(version):
    assert risks(version, **GOOD) == set()
    assert risks(version, **{**GOOD, "paxos_variant": "v1"}) == {"paxos-v1"}


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("4.0.12", {"paxos-v1"}),
        ("4.0", {"paxos-v1"}),
        ("4.0.0", {"paxos-v1"}),
        ("4.0-beta3", {"paxos-v1", "serial-reads"}),
        ("3.11.10", {"paxos-v1"}),
        ("3.11.9", {"paxos-v1", "serial-reads"}),
        ("3.10", {"paxos-v1", "serial-reads"}),
        ("3.0.24", {"paxos-v1"}),
        ("3.0.23", {"paxos-v1", "serial-reads"}),
        ("2.2.19", {"paxos-v1", "serial-reads"}),
    ],
)
def test_a_version_without_paxos_v2_is_not_safe_and_one_without_linearizable_reads_even_less(version, expected):
    assert risks(version) == expected
    assert risks(version, commitlog_sync="group") == expected


def test_settings_for_upgrades_that_give_linearizability_up_are_named():
    for variant in ("v2_without_linearizable_reads", "v2_without_linearizable_reads_or_rejected_writes"):
        assert risks("5.0.9", **{**GOOD, "paxos_variant": variant}) == {"serial-reads"}
    first = "v1_without_linearizable_reads_or_rejected_writes"
    assert risks("5.0.9", **{**GOOD, "paxos_variant": first}) == {"paxos-v1", "serial-reads"}
    assert risks("4.0.12", serial_reads="true", commitlog_sync="group") == {"paxos-v1", "serial-reads"}
    assert risks("4.0.12", serial_reads="false", commitlog_sync="group") == {"paxos-v1"}


def test_repairs_of_transactions_that_are_left_out_are_named():
    assert risks("5.0.9", **GOOD, skip_paxos_repair_on_topology_change="true") == {"paxos-repair"}
    of_keyspaces = "skip_paxos_repair_on_topology_change_keyspaces"
    assert risks("5.0.9", **GOOD, **{of_keyspaces: "[other, fleet]"}) == {"paxos-repair"}
    assert risks("5.0.9", **GOOD, **{of_keyspaces: "[fleets]"}) == set()
    assert risks("5.0.9", **GOOD, skip_paxos_repair_on_topology_change="false") == set()


def test_what_a_node_does_not_show_is_named_and_only_that():
    assert unread(PaxosNode("5.0.9", GOOD)) == []
    assert unread(PaxosNode("5.0.9", GOOD, serial_reads=None)) == []  # these versions have no such property
    assert unread(PaxosNode("5.0.9", hidden=True)) == ["commitlog_sync", "paxos_variant"]
    assert unread(PaxosNode("4.0.12", {"commitlog_sync": "group"})) == []
    assert unread(PaxosNode("4.0.12", {"commitlog_sync": "group"}, serial_reads=None)) == [SERIAL_READS]
    assert unread(PaxosNode("3.11.19", hidden=True, serial_reads=None)) == ["commitlog_sync", SERIAL_READS]
    assert unread(PaxosNode("", GOOD)) == ["release_version"]
    assert unread(PaxosNode("who knows", hidden=True, serial_reads=None)) == [
        "release_version",
        "commitlog_sync",
        "paxos_variant",
        SERIAL_READS,
    ]
