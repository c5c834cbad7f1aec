"""The parts of a comparison of states: their order, what is left out, and the directory of the work."""

import fcntl
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregations.definition.aggregates import count, first, last, maximum, mean, minimum, total
from aggregations.definition.aggregates_exact import collect, standard_deviation, variance
from aggregations.definition.aggregates_sketches import quantiles
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.sessions import session
from aggregations.definition.source import Json, Topic
from aggregations.definition.windows import tumbling
from aggregations.errors import RunRefusedError
from aggregations.run.memory import MemoryRunner
from jobs.comparing import Row, compare
from jobs.environment import UsageError
from jobs.refolding.ordered import OrderedCopy
from jobs.refolding.rows import Rows, check_met, chosen_stages, latest_removal
from jobs.refolding.workspace import workspace
from tests.support.pure import batch, fleet, leg, runner

PART = 2_000
"""Bytes of a part that is sorted in memory, in these tests."""


@settings(max_examples=40)
@given(st.dictionaries(st.binary(max_size=3), st.binary(max_size=200), max_size=60), st.randoms(use_true_random=False))
def test_a_copy_is_in_the_order_of_the_keys_however_many_parts_it_has(
    tmp_path_factory: pytest.TempPathFactory, states: dict[bytes, bytes], rng: random.Random
) -> None:
    shuffled = list(states.items())
    rng.shuffle(shuffled)
    copy = OrderedCopy(tmp_path_factory.mktemp("copy") / "states", shuffled, part_bytes=PART)
    assert list(copy) == list(copy) == sorted(states.items())


def test_what_a_killed_process_left_is_deleted_and_what_others_use_is_not(tmp_path: Path) -> None:
    parent = tmp_path / "some" / "work"
    with workspace(parent) as other:
        (parent / "fold-dead").mkdir()
        (parent / "fold-dead" / "states").write_text("states")
        (parent / "fold-new").mkdir()  # killed before it locked its directory
        with (parent / "fold-dead" / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with workspace(parent) as mine:
                assert {*parent.iterdir()} == {other, mine, parent / "fold-dead", parent / "lock"}
        with workspace(parent) as mine:
            assert {*parent.iterdir()} == {other, mine, parent / "lock"}
            assert [one.name for one in mine.iterdir()] == ["lock"]
    assert [*parent.iterdir()] == [parent / "lock"]


def test_a_directory_that_cannot_be_made_is_a_wrong_usage(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UsageError, match="--work"), workspace(tmp_path / "file" / "work"):
        pass


def test_the_workspace_is_deleted_whatever_ends_its_block(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), workspace(tmp_path):
        raise KeyboardInterrupt
    assert [one.name for one in tmp_path.iterdir()] == ["lock"]


def states_of(run: MemoryRunner) -> list[tuple[str, list[tuple[bytes, bytes]]]]:
    """The states of every stage of a run, in order."""
    return [
        (stage.name, [(key, one.value) for key, one in run.run.stores[stage.name].scan(run.run.stage_ref(stage))])
        for stage in run.flow.stages
    ]


def rows(run: MemoryRunner, other: Flow[Any] | None = None, **options: Any) -> tuple[Rows, list[Row]]:
    """The states of a run as rows."""
    made = Rows(run.flow, other or run.flow, 1, **{"gone": {}, **options})
    return made, list(made.read(states_of(run)))


def test_rows_are_what_readers_see_and_count_the_dead_letters_that_wait() -> None:
    run = runner(fleet())
    run.process([*batch(1, 2, 3), leg(4, "N9", carrier="AA", minutes=2**63 - 1), leg(5, "N8", minutes=1)])
    made, found = rows(run)
    assert made.states == {"aircraft": 5, "carrier": 2}
    shown = {(one.stage, key): seen.result for one in found for key, seen in one.seen.items()}
    assert shown["aircraft", b"N1"] == {"n": 1, "m": 1}
    assert shown["carrier", b"AA"] == {"n": 1, "m": 2}
    assert made.holes["carrier"] == sum(1 for one in run.dead_letters if one.hole and one.stage == "carrier") == 1


def test_only_the_chosen_keys_are_read() -> None:
    run = runner(fleet())
    run.process(batch(*range(1, 9)))
    made, found = rows(run, keys=frozenset({b"N1", b"UA", b"none"}))
    assert [(one.stage, one.key) for one in found] == [("aircraft", b"N1"), ("carrier", b"UA")]
    assert made.met == {b"N1", b"UA"}
    with pytest.raises(RunRefusedError, match="key none"):
        check_met([b"N1", b"none"], made.met)


def timed(window: Any = None, expire_after: str | None = None) -> Flow[Any]:
    source = Topic("legs", Json({"tail": str, "at": int}), envelope=False, time="at", ahead="3650d")
    fold = Fields(n=count())
    return Flow("timed").source(source).aggregate("kept", "tail", fold, window=window, expire_after=expire_after)


@pytest.mark.parametrize(
    ("flow", "gone", "left"),
    [
        (timed(tumbling("1m")), 59, {b"N1@1970-01-01T00:00:00Z", b"N1@1970-01-01T00:02:00Z", b"N2@1970-01-01T00:02:00Z"}),
        (timed(tumbling("1m")), 60, {b"N1@1970-01-01T00:02:00Z", b"N2@1970-01-01T00:02:00Z"}),
        (timed(tumbling("1m")), 180, set()),
        (timed(session("30s")), 120, {b"N1@1970-01-01T00:02:00Z/1970-01-01T00:02:00Z", b"N2@1970-01-01T00:02:30Z/1970-01-01T00:02:30Z"}),
        (timed(session("30s")), 121, {b"N2@1970-01-01T00:02:30Z/1970-01-01T00:02:30Z"}),
        (timed(expire_after="1m"), 119, {b"N1", b"N2"}),
        (timed(expire_after="1m"), 120, {b"N2"}),
    ],
)  # fmt: skip
def test_what_may_have_left_one_of_the_stores_is_left_out(flow: Flow[Any], gone: int, left: set[bytes]) -> None:
    run = runner(flow)
    minutes = [("N1", 0), ("N1", 2), ("N2", 2.5)]
    run.process([leg(i, tail, at=round(minute * 60_000)) for i, (tail, minute) in enumerate(minutes)])
    everything = rows(run)[1]
    assert sum(len(one.seen) for one in everything) == (2 if flow.stages[0].aggregate.expiry else 3)
    found = rows(run, gone={"kept": gone})[1]
    assert {key for one in found for key in one.seen} == left
    # Such rows are those of a store that the others have left.
    assert compare(found, everything, stages=["kept"]).differences == sum(len(one.seen) for one in everything) - len(
        left
    )


@pytest.mark.parametrize("window", [tumbling("1m"), session("30s")])
def test_a_key_is_read_in_all_its_windows(window: Any) -> None:
    run = runner(timed(window))
    run.process([leg(i, tail, at=i * 60_000) for i, tail in enumerate(["N1", "N2", "N1"])])
    made, found = rows(run, keys=frozenset({b"N1"}))
    assert sum(len(one.seen) for one in found) == 2
    assert made.met == {b"N1"}


def test_a_state_of_an_earlier_definition_is_read_as_the_current_one_continues_it() -> None:
    source = Flow("fleet").source(Topic("legs", Json({"tail": str, "minutes": int}), envelope=False))
    before = source.aggregate("aircraft", "tail", Fields(n=count()))
    after = source.aggregate("aircraft", "tail", Fields(n=count(), m=total("minutes")).added(m=0))
    run = runner(before)
    run.process(batch(1))
    [found] = Rows(after, after, 1, gone={}).read(states_of(run))
    assert found.seen[b"N1"].result == {"n": 1, "m": 0}


def test_removals_of_both_sides_count() -> None:
    assert latest_removal({"a": 3, "b": 9}, {"a": 5}, {}) == {"a": 5, "b": 9}


def test_fields_that_two_definitions_fold_alike_are_compared_by_what_is_determined() -> None:
    def quantile(at: float, k: int = 200) -> Flow[Any]:
        source = Topic("legs", Json({"tail": str, "minutes": int}), envelope=False)
        fold = Fields(q=quantiles("minutes", at=[at], k=k), m=total("minutes"))
        return Flow("fleet").source(source).aggregate("aircraft", "tail", fold)

    run = runner(quantile(0.5))
    run.process(batch(*range(1, 30)))
    _, [first, *_] = rows(run)
    assert first.seen[b"N0"].compared["q"] == [9, 3.0, 27.0]
    assert first.seen[b"N0"].result["q"] == [15.0]
    for other in (quantile(0.9), quantile(0.5, k=100)):  # readers see another value
        _, [first, *_] = rows(run, other)
        assert first.seen[b"N0"].compared == first.seen[b"N0"].result


def test_numbers_that_were_not_computed_are_compared_exactly() -> None:
    def kept(**fields: Any) -> Flow[Any]:
        source = Topic("legs", Json({"tail": str, "at": float}), envelope=False)
        return Flow("fleet").source(source).aggregate("aircraft", "tail", Fields(**fields))

    def differences(old: Flow[Any], new: Flow[Any], late: float) -> int:
        sides = []
        for flow, other, at in ((old, new, 1_764_000_000.0), (new, old, 1_764_000_000.0 + late)):
            run = runner(flow)
            run.process([leg(1, "N1", at=at)])
            sides.append(rows(run, other)[1])
        return compare(*sides, stages=["aircraft"]).differences

    for field in (minimum("at"), maximum("at"), first("at"), last("at"), collect("at", 3)):
        assert differences(kept(at=field), kept(at=field), 0.0) == 0
        assert differences(kept(at=field), kept(at=field), 1.5) == 1  # a second and a half, less than a billionth
    assert differences(kept(at=first("at")), kept(at=last("at")), 1.5) == 1
    assert differences(kept(at=total("at")), kept(at=total("at")), 1.5) == 0


@pytest.mark.parametrize("field", [mean("minutes"), variance("minutes"), standard_deviation("minutes")])
def test_a_lost_value_that_does_not_change_a_mean_or_a_variance_is_a_difference(field: Any) -> None:
    source = Topic("legs", Json({"tail": str, "minutes": int}), envelope=False)
    flow = Flow("fleet").source(source).aggregate("aircraft", "tail", Fields(m=field))
    sides = []
    for legs in (4, 3):
        run = runner(flow)
        run.process([leg(n, "N1", minutes=5) for n in range(legs)])
        sides.append(rows(run)[1])
    assert sides[0][0].seen[b"N1"].result == sides[1][0].seen[b"N1"].result
    assert compare(*sides, stages=["aircraft"]).differences == 1


def test_the_stages_of_both_definitions_are_compared_unless_some_are_named() -> None:
    one, other = fleet(), timed()
    assert chosen_stages([other, one], []) == ["aircraft", "carrier", "kept"]
    assert chosen_stages([other, one], ["kept", "aircraft"]) == ["aircraft", "kept"]
    with pytest.raises(RunRefusedError, match=r"no stage 'ship'.*aircraft, carrier, kept"):
        chosen_stages([other, one], ["ship"])
