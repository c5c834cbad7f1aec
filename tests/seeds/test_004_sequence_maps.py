"""Pulsar PIP-6: the maps pushed and persisted, their snapshots, recovery, where it is enabled, and the Reader."""

import json
import random

import pytest

from envelope import Verdict
from envelope.filters import Arrival, DedupPolicy, Entry, SequenceMaps, Snapshot
from envelope.filters.sequence_maps import SNAPSHOT_EVERY
from persistence import Fenced, Reader, SequenceSnapshots


def test_the_pushed_map_is_updated_before_the_write_and_the_persisted_map_by_its_acknowledgement() -> None:
    maps = SequenceMaps()
    assert maps.push("p", 3) is Verdict.ACCEPTED
    assert (maps.pushed, maps.persisted) == ({"p": 3}, {})
    maps.acknowledged(0)
    assert (maps.pushed, maps.persisted) == ({"p": 3}, {"p": 3})


def test_a_message_that_was_stored_is_a_duplicate_and_one_that_was_only_sent_is_not_yet() -> None:
    maps = SequenceMaps()
    for sequence in (1, 2):
        maps.push("p", sequence)
    maps.acknowledged(0)
    assert [maps.push("p", sequence) for sequence in (1, 2, 3)] == [
        Verdict.DUPLICATE,
        Verdict.IN_FLIGHT,
        Verdict.ACCEPTED,
    ]


def test_what_failed_is_accepted_again_in_order() -> None:
    maps = SequenceMaps()
    for sequence in (1, 2, 3):
        maps.push("p", sequence)
    maps.acknowledged(0)
    assert maps.failed() == [("p", 2), ("p", 3)]
    assert maps.pushed == {"p": 1}
    assert [maps.push("p", sequence) for sequence in (1, 2, 3)] == [Verdict.DUPLICATE, *[Verdict.ACCEPTED] * 2]


def test_a_custom_sequence_may_have_holes() -> None:
    maps = SequenceMaps()
    assert [maps.push("p", sequence) for sequence in (0, 1024, 4096)] == [Verdict.ACCEPTED] * 3


def test_messages_without_a_producer_are_stored_and_take_no_part() -> None:
    maps = SequenceMaps()
    assert [maps.push(None) for _ in range(3)] == [Verdict.ACCEPTED] * 3
    for offset in range(3):
        maps.acknowledged(offset)
    assert (maps.persisted, maps.snapshot().next_offset) == ({}, 3)


def test_a_snapshot_is_due_every_1000_entries_and_names_the_position_that_it_covers() -> None:
    assert SNAPSHOT_EVERY == 1000
    maps, due = SequenceMaps(), {}
    for offset in range(2500):
        maps.push("p" if offset % 2 else None, offset)
        if snapshot := maps.acknowledged(offset):
            due[offset] = snapshot
    assert due == {999: Snapshot(1000, {"p": 999}), 1999: Snapshot(2000, {"p": 1999})}
    assert maps.covered == 2000


def test_a_snapshot_is_a_readable_map_of_names_and_numbers() -> None:
    snapshot = Snapshot(1000, {"till-1": 7, "till-2": 999})
    text = json.dumps(snapshot.dump())
    assert text == '{"next_offset": 1000, "sequences": {"till-1": 7, "till-2": 999}}'
    assert Snapshot.load(json.loads(text)) == snapshot


def test_acknowledgements_come_in_the_order_of_the_log() -> None:
    maps = SequenceMaps()
    with pytest.raises(ValueError, match="nothing is in flight"):
        maps.acknowledged(0)
    for sequence in (1, 2):
        maps.push("p", sequence)
    maps.acknowledged(5)
    with pytest.raises(ValueError, match="read in order"):
        maps.acknowledged(5)


class Crash(Exception):
    """The writer ends here."""


class Writer:
    """A writer of a log that may crash at any of its steps: before or after push, write, acknowledgement, snapshot."""

    def __init__(self, log: list[Entry], stored: list[Snapshot], steps: int, *, every: int, limit: int) -> None:
        self.log, self.stored, self.steps = log, stored, steps
        snapshot = stored[-1] if stored else None
        tail = log[snapshot.next_offset if snapshot else 0 :]
        self.maps = SequenceMaps(snapshot, tail, every=every, limit=limit)

    def step(self) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise Crash

    def send(self, producer: str | None, sequence: int) -> Verdict:
        self.step()
        verdict = self.maps.push(producer, sequence)
        self.step()
        if verdict is Verdict.ACCEPTED:
            self.log.append(Entry(len(self.log), producer, sequence))
            self.step()
            due = self.maps.acknowledged(len(self.log) - 1)
            self.step()
            if due:
                self.stored.append(due)
                self.step()
        return verdict


def sends(seed: int) -> list[tuple[str | None, int]]:
    """Producers that each send 0, 1, 2, ... with holes, and again what they are not sure of."""
    random.seed(seed)
    following, made = dict.fromkeys("abc", 0), []
    for _ in range(25):
        producer = random.choice(["a", "b", "c", None])
        if producer is None:
            made.append((None, 0))
            continue
        if random.random() < 0.3:
            following[producer] = max(0, following[producer] - random.randrange(4))
        made.append((producer, following[producer]))
        following[producer] += random.choice([1, 1, 2])
    return made


def highest(log: list[Entry]) -> dict[str, int]:
    found: dict[str, int] = {}
    for _, producer, sequence in log:
        if producer is not None:
            found[producer] = max(found.get(producer, sequence), sequence)
    return found


@pytest.mark.parametrize("limit", [100, 2], ids=["", "two producers are remembered"])
@pytest.mark.parametrize("seed", range(4))
def test_after_a_crash_at_every_point_the_map_is_the_one_before_the_crash(seed: int, limit: int) -> None:
    messages = sends(seed)
    for crash_at in range(130):
        log: list[Entry] = []
        stored: list[Snapshot] = []
        writer = Writer(log, stored, crash_at, every=4, limit=limit)
        crashed = False
        try:
            for producer, sequence in messages:
                writer.send(producer, sequence)
        except Crash:
            crashed = True
        recovered = Writer(log, stored, 0, every=4, limit=limit).maps
        never_snapshotted = SequenceMaps(None, log, limit=limit)
        assert list(recovered.persisted.items()) == list(never_snapshotted.persisted.items())
        if limit == 100:
            assert recovered.persisted == highest(log)
        before = writer.maps.persisted
        if writer.maps.pushed == before:  # nothing was in flight
            assert list(recovered.persisted.items()) == list(before.items())
        if not crashed:
            break
    assert not crashed


@pytest.mark.parametrize("seed", range(4))
def test_a_producer_that_resumes_after_its_last_sequence_id_leaves_no_duplicate_at_any_crash_point(seed: int) -> None:
    for crash_at in range(200):
        log: list[Entry] = []
        stored: list[Snapshot] = []
        writer, crashes, sequence = Writer(log, stored, crash_at, every=5, limit=100), 0, 0
        while sequence < 12:
            try:
                writer.send("copy", sequence)
                sequence += 1
            except Crash:
                crashes += 1
                writer = Writer(log, stored, 10**6, every=5, limit=100)
                last = writer.maps.last_sequence_id("copy")
                sequence = 0 if last is None else last + 1
        assert [entry.sequence for entry in log] == list(range(12))
        if not crashes:
            return
    raise AssertionError


@pytest.mark.parametrize("missing", range(6, 10))
def test_a_recovery_that_replays_less_than_the_tail_would_accept_a_duplicate(missing: int) -> None:
    log = [Entry(n, f"p{n}", n) for n in range(10)]
    snapshot = Snapshot(6, {f"p{n}": n for n in range(6)})
    wrong = SequenceMaps(snapshot, [one for one in log[6:] if one.offset != missing])
    assert wrong.push(f"p{missing}", missing) is Verdict.ACCEPTED
    right = SequenceMaps(snapshot, log[6:])
    assert [right.push(f"p{n}", n) for n in range(10)] == [Verdict.DUPLICATE] * 10


def test_the_map_has_the_highest_number_also_of_a_log_in_which_a_lower_one_follows() -> None:
    """It was written before deduplication was turned on."""
    maps = SequenceMaps(None, [Entry(0, "p", 7), Entry(1, "p", 3)])
    assert maps.persisted == {"p": 7}
    assert [maps.push("p", sequence) for sequence in (5, 8)] == [Verdict.DUPLICATE, Verdict.ACCEPTED]


def test_beyond_the_limit_the_producer_whose_last_entry_is_the_oldest_is_forgotten() -> None:
    maps = SequenceMaps(None, [Entry(n, producer, n) for n, producer in enumerate("abac")], limit=2)
    assert maps.persisted == {"a": 2, "c": 3}
    assert maps.push("b", 1) is Verdict.ACCEPTED


def test_a_tail_that_overlaps_the_snapshot_is_refused() -> None:
    with pytest.raises(ValueError, match="read in order"):
        SequenceMaps(Snapshot(6, {"p": 5}), [Entry(5, "p", 5)])


@pytest.mark.parametrize(
    ("topic", "expected"),
    [
        ("orders", True),  # the default of all topics
        ("logs.web", False),  # its namespace
        ("logs.audit.eu", True),  # the longest prefix wins
        ("logs.audit.test", False),  # the topic itself wins
        ("logs.audit.", True),
        ("log", True),
    ],
)
def test_deduplication_is_on_for_all_for_a_namespace_or_for_a_topic_and_the_most_specific_wins(
    topic: str, expected: bool
) -> None:
    policy = DedupPolicy(True, {"logs.": False, "logs.audit.": True}, {"logs.audit.test": False})
    assert policy.enabled(topic) is expected


def test_deduplication_is_off_by_default() -> None:
    assert not DedupPolicy().enabled("orders")
    assert DedupPolicy(namespaces={"": True}).enabled("orders")


@pytest.mark.parametrize("url", ["memory://maps", "sqlite"])
def test_snapshots_are_kept_in_a_store_and_an_older_writer_is_fenced(url: str, tmp_path) -> None:
    url = f"sqlite://{tmp_path}/states.db" if url == "sqlite" else url
    first = SequenceSnapshots(url, "gateway")
    assert first.load("orders", 0) is None
    for next_offset in (1000, 2000):
        first.save("orders", 0, Snapshot(next_offset, {"p": next_offset - 1}))
    first.save("orders", 1, Snapshot(5, {}))
    second = SequenceSnapshots(url, "gateway")
    assert second.load("orders", 0) == Snapshot(2000, {"p": 1999})
    with pytest.raises(Fenced):
        first.save("orders", 0, Snapshot(3000, {"p": 2999}))
    assert second.load("orders", 0) == Snapshot(2000, {"p": 1999})
    second.close()


def add(total, record):
    return total + record.value


def test_a_reader_stores_its_positions_beside_the_data_so_that_each_message_is_applied_once(tmp_path) -> None:
    url = f"sqlite://{tmp_path}/states.db"
    log = [Arrival("orders", n % 2, n // 2, b"k", 2**n) for n in range(8)]
    reader = Reader(url, "totals", 0)
    assert reader.process(log[:5], add) == 5
    reader = Reader(url, "totals", 0)  # the first one died before it told anybody
    assert reader.start == {("orders", 0): 3, ("orders", 1): 2}
    assert reader.process(log, add) == 3
    assert (reader.value, Reader(url, "totals", 0).value) == (255, 255)


def test_a_reader_of_which_a_newer_one_exists_is_fenced_and_changes_nothing() -> None:
    old = Reader("memory://readers", "totals", 0)
    new = Reader("memory://readers", "totals", 0)
    with pytest.raises(Fenced):
        old.process([Arrival("orders", 0, 0, b"k", 1)], add)
    assert new.process([Arrival("orders", 0, 0, b"k", 1)], add) == 1


def test_a_generation_begins_anew() -> None:
    Reader("memory://generations", "totals", 0).process([Arrival("orders", 0, 0, b"k", 1)], add)
    assert Reader("memory://generations", "totals", 0).value == 1
    assert Reader("memory://generations", "totals", 0, generation=2).value == 0
