"""What programs that are not flows keep in a store, on every store: filters, readers and snapshots of sequence maps."""

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from envelope.filters import Arrival, SequenceFilter, Snapshot
from persistence import Fenced, Filtered, Reader, SequenceSnapshots, StoredFilter, filter_states
from persistence.commit.faults import Fault, FaultOutcome, Injector, use
from persistence.commit.steps import CommitStep
from persistence.errors import Conflict, Terminal, Transient

pytestmark = pytest.mark.integration

OUTCOMES = [FaultOutcome.ERROR, FaultOutcome.UNANSWERED]


@pytest.fixture(params=["sqlite", "lmdb", "redis_store_url", "cassandra_store_url"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    kind: str = request.param
    return request.getfixturevalue(kind) if kind.endswith("_url") else f"{kind}://{tmp_path}/states"


@pytest.fixture
def rule() -> SequenceFilter:
    return SequenceFilter(lambda one: one.value, name=f"numbers-{uuid.uuid4().hex[:8]}")


@pytest.fixture
def closing() -> Iterator[Callable[[Any], Any]]:
    made: list[Any] = []
    yield lambda one: made.append(one) or one
    for one in made:
        one.close()


def records(*numbers: int, start: int = 0) -> list[Arrival]:
    return [Arrival("t", n % 2, n // 2, b"k", number) for n, number in enumerate(numbers, start)]


@pytest.mark.parametrize("outcome", OUTCOMES)
@pytest.mark.parametrize("step", [CommitStep.PUBLISH, CommitStep.PERSIST, CommitStep.MANIFEST])
def test_a_filter_whose_commit_fails_at_any_step_passes_on_each_number_once(
    url: str, rule: SequenceFilter, step: CommitStep, outcome: FaultOutcome, closing: Callable[[Any], Any]
) -> None:
    sent: list[tuple[int, int | None]] = []

    def publish(made: Filtered) -> None:
        sent.extend((one.partition, one.offset) for one, _ in made.passed)

    first = closing(StoredFilter(rule, url))
    first.process(records(1, 1, 2, 2), publish)
    point = step if step is CommitStep.PUBLISH else step.of(rule.name)
    with use(Injector([Fault(point, outcome)])), pytest.raises(Transient):
        first.process(records(2, 3, 3, 4, start=4), publish)
    again = closing(StoredFilter(rule, url))
    begin = again.start
    again.process([one for one in records(1, 1, 2, 2, 2, 3, 3, 4) if one.offset >= begin["t", one.partition]], publish)
    assert set(sent) == {(0, 0), (1, 0), (0, 1), (1, 1), (1, 2), (0, 3), (1, 3)}
    if step is not CommitStep.PUBLISH or outcome is FaultOutcome.ERROR:
        assert len(sent) - len(set(sent)) == (3 if step is CommitStep.PERSIST and outcome is FaultOutcome.ERROR else 0)
    assert dict(filter_states(rule, url)) == {b"t:0": {"seen": 3}, b"t:1": {"seen": 4}}
    with pytest.raises((Fenced, Conflict)):
        first.process(records(9, start=8), publish)


def test_a_reader_applies_each_record_once_although_its_write_was_not_answered(
    url: str, closing: Callable[[Any], Any]
) -> None:
    name = f"reader-{uuid.uuid4().hex[:8]}"

    def add(total: int, record: Arrival) -> int:
        return total + record.value

    first = closing(Reader(url, name, 0))
    assert first.process(records(1, 2, 3), add) == 3
    second = closing(Reader(url, name, 0))
    assert (second.value, second.start) == (6, {("t", 0): 2, ("t", 1): 1})
    assert second.process(records(1, 2, 3, 4), add) == 1
    assert closing(Reader(url, name, 0)).value == 10
    with pytest.raises((Fenced, Conflict)):
        first.process(records(7, start=10), add)


def test_a_snapshot_is_replaced_read_by_the_next_writer_and_no_longer_written_by_the_older_one(
    url: str, closing: Callable[[Any], Any]
) -> None:
    name = f"maps-{uuid.uuid4().hex[:8]}"
    older = closing(SequenceSnapshots(url, name))
    assert older.load("t", 0) is None
    for end in (2, 4):
        older.save("t", 0, Snapshot(end, {"till": end, "desk": 1}), "id")
    newer = closing(SequenceSnapshots(url, name))
    found = newer.load("t", 0, "id")
    assert found == Snapshot(4, {"till": 4, "desk": 1})
    assert list(found.sequences) == ["till", "desk"], "the producer whose last entry is the oldest first"
    assert (newer.load("t", 1, "id"), newer.load("t", 0, "other")) == (None, None)
    with pytest.raises(Fenced):
        older.save("t", 0, Snapshot(5, {}), "id")


def test_the_states_of_another_type_of_filter_are_not_read(
    url: str, rule: SequenceFilter, closing: Callable[[Any], Any]
) -> None:
    closing(SequenceSnapshots(url, rule.name)).save("t", 0, Snapshot(1, {"till": 1}))
    with pytest.raises(Terminal, match="of kind Snapshot, not SequenceFilter"):
        list(filter_states(rule, url))
