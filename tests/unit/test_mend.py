"""Chosen keys of a stage are mended in place, from a log in memory."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from aggregations.definition.aggregates import count, total
from aggregations.definition.element import Element, Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.sessions import session
from aggregations.definition.windows import tumbling
from aggregations.errors import RunRefusedError
from aggregations.run.begin import begin
from aggregations.run.discard import fill_holes
from aggregations.run.mend import Mending
from aggregations.run.snapshots import MendedSnapshot, read_snapshot
from persistence.commit.faults import use
from tests.support.both import redriven_record
from tests.support.mends import Site, same_as_its_log, seen_by_readers
from tests.support.pure import FLEET, bare, batch, chained, fleet, hop, leg, wrapped
from tests.support.replays import Crash, CrashAt

STAGES = ("aircraft", "carrier")


@pytest.fixture(params=[False, True], ids=["together", "apart"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Site:
    made = Site(fleet(), tmp_path, apart=request.param)
    made.run(batch(*range(1, 20)))
    return made


def test_a_result_that_is_wrong_is_mended(site: Site) -> None:
    site.spoil("aircraft", b"N1", m=-7)
    before = site.results("carrier")
    assert site.mend("aircraft", b"N1", b"N2", apply=False) == {b"N1": Mending.CHANGED}
    assert site.results("aircraft")[b"N1"]["m"] == -7
    assert site.mend("aircraft", b"N1", b"N2") == {b"N1": Mending.CHANGED}
    same_as_its_log(site, STAGES)
    assert site.results("carrier") == before
    assert site.mend("aircraft", b"N1", b"N2") == {}


def chains(first: int, last: int) -> list[Record]:
    return [
        chained(at, hop("raw", 0, at), key=f"N{at % 3}", carrier="AA", minutes=at, event_id=f"e{at}")
        for at in range(first, last)
    ]


def again(offset: int, of: int) -> Record:
    """A copy of an event, sent again."""
    return chained(offset, hop("raw", 0, of), key=f"N{of % 3}", carrier="AA", minutes=of, event_id=f"e{of}")


def enveloped() -> Flow[Any]:
    """The two stages of `fleet`, of records in envelopes."""
    return Flow("fleet").source(wrapped()).aggregate("aircraft", "tail", FLEET).aggregate("carrier", "carrier", FLEET)


@pytest.fixture
def chained_site(tmp_path: Path) -> Site:
    made = Site(enveloped(), tmp_path)
    made.run(chains(0, 30))
    return made


@pytest.mark.parametrize("how", ["changed", "lost", "forgotten"])
def test_after_a_mend_a_copy_is_dropped_and_the_next_record_is_folded(how: str, chained_site: Site) -> None:
    site = chained_site
    if how == "lost":
        site.lose("aircraft", b"N1")
    elif how == "changed":
        site.spoil("aircraft", b"N1", n=1_000)
    else:  # a state from before the last records, with its positions
        with_fewer = Site(site.flow, site.directory / "other")
        with_fewer.directory.mkdir()
        with_fewer.run(chains(0, 12))
        site.spoil("aircraft", b"N1", with_fewer.held("aircraft")[b"N1"], **with_fewer.results("aircraft")[b"N1"])
    done = site.mend("aircraft", b"N1")
    assert done == {b"N1": Mending.PUT_BACK if how == "lost" else Mending.CHANGED}
    same_as_its_log(site, STAGES)
    run = site.run([again(30, 28), again(31, 1), *chains(32, 40)])
    assert run.report.verdicts["aircraft"]["duplicate"] == 2
    same_as_its_log(site, STAGES)
    assert site.results("carrier")[b"AA"]["n"] == 38


def test_positions_are_mended_although_the_result_is_right(chained_site: Site) -> None:
    site = chained_site
    other = Site(site.flow, site.directory / "other")
    other.directory.mkdir()
    other.run(chains(0, 6))
    site.spoil("aircraft", b"N2", other.held("aircraft")[b"N2"])
    assert site.mend("aircraft", b"N2") == {b"N2": Mending.POSITIONS}
    same_as_its_log(site, STAGES)


def test_a_key_that_the_history_does_not_have_becomes_empty_until_its_first_record(site: Site) -> None:
    site.spoil("aircraft", b"N9", site.held("aircraft")[b"N1"], n=7, m=7)
    assert site.mend("aircraft", b"N9") == {b"N9": Mending.EMPTIED}
    assert b"N9" not in site.results("aircraft")
    assert site.mend("aircraft", b"N9") == {}
    site.run([leg(20, "N9", carrier="AA", minutes=3)])
    assert site.results("aircraft")[b"N9"] == {"n": 1, "m": 3}
    same_as_its_log(site, STAGES)


def test_a_mend_is_noted_with_who_and_why(site: Site) -> None:
    for number in range(7):
        site.spoil("aircraft", b"X%d" % number, site.held("aircraft")[b"N1"], n=1, m=1)
    site.spoil("aircraft", b"N1", n=0)
    site.mend("aircraft", *(b"X%d" % number for number in range(7)), why="a bad disk")
    site.mend("aircraft", b"N1")
    pointer = site.pointer()
    assert (pointer.live, pointer.newest, pointer.rebuild, pointer.closing) == (1, 1, None, 0)
    first, second = pointer.changes
    assert (first.what, first.generation, first.why) == ("mend", 1, "a bad disk")
    assert first.states == "stage aircraft, key X0, X1, X2, X3, X4 and 2 more"
    assert f"mend of generation 1, stage aircraft, key N1, by {second.by}: a test" in str(second)


def publishing(fold: Any = FLEET) -> Flow[Any]:
    return Flow("fleet").source(bare()).aggregate("aircraft", "tail", fold).publish_states("aircraft.states")


def test_a_mended_state_is_published_with_a_higher_version(tmp_path: Path) -> None:
    site = Site(publishing(), tmp_path)
    site.run(batch(*range(1, 12)))
    site.spoil("aircraft", b"N1", n=0)
    site.spoil("aircraft", b"N9", site.held("aircraft")[b"N1"], n=7, m=7)
    last = max(read_snapshot(one.value).order for one in site.outputs if one.key == b"N1")
    site.outputs.clear()
    site.mend("aircraft", b"N1", b"N9")
    assert [one.key for one in site.outputs if one.value is None] == [b"N9"]
    sent = {one.key: read_snapshot(one.value) for one in site.outputs if one.value is not None}
    assert sent[b"N1"].state == {"n": 4, "m": 1 + 4 + 7 + 10}
    assert sent[b"N1"].order > last
    assert sent.keys() == {b"N1"}
    site.outputs.clear()
    site.run([leg(12, "N1", minutes=1)])
    assert read_snapshot(site.outputs[0].value).order > sent[b"N1"].order
    site.lose("aircraft", b"N1")
    site.outputs.clear()
    site.mend("aircraft", b"N1")
    tombstone, snapshot = site.outputs  # its versions begin anew
    assert (tombstone.key, tombstone.value, snapshot.key) == (b"N1", None, b"N1")
    assert read_snapshot(snapshot.value).version == 1


class Moody:
    """Does not fold some minutes as long as it is told so."""

    broken = True

    def zero(self) -> dict[str, Any]:
        return {"n": 0}

    def fold(self, state: dict[str, Any], element: Element[Any]) -> dict[str, Any]:
        if element["minutes"] < 0 or (element["minutes"] == 4 and Moody.broken):
            raise ValueError
        return {"n": state["n"] + 1}


def moody() -> Flow[Any]:
    return Flow("moody").source(bare()).aggregate("aircraft", "tail", Moody()).publish("legs.out")


def test_dead_letters_that_wait_still_wait_after_a_mend(tmp_path: Path) -> None:
    site = Site(moody(), tmp_path)
    site.run([*batch(1, 2, 3, 5, 6, 7), leg(10, "N1", minutes=-1), leg(11, "N7", minutes=-1)])
    holes = {key: one.holes for key, one in site.held("aircraft").items() if one.holes}
    assert holes.keys() == {b"N1", b"N7"}
    site.spoil("aircraft", b"N1", n=0)
    site.lose("aircraft", b"N7")
    assert site.mend("aircraft", b"N1", b"N7") == {b"N1": Mending.CHANGED, b"N7": Mending.PUT_BACK}
    assert {key: one.holes for key, one in site.held("aircraft").items() if one.holes} == holes


def test_discarded_dead_letters_are_not_accepted_again_after_a_mend(tmp_path: Path) -> None:
    site = Site(moody(), tmp_path)
    site.run([*batch(1, 2, 3, 5, 6, 7), leg(10, "N1", minutes=-1), leg(11, "N7", minutes=-1)])
    run = begin(site.flow, site.urls)
    found = fill_holes(run, [redriven_record(site.flow, one, one.record.offset) for one in site.dead], apply=True)
    run.finish()
    run.close()
    assert [*found.values()] == [2, 2]
    before = site.held("aircraft")
    site.spoil("aircraft", b"N1", n=0)
    site.spoil("aircraft", b"N7", n=5)
    assert site.mend("aircraft", b"N1", b"N7") == {b"N1": Mending.CHANGED, b"N7": Mending.CHANGED}
    assert site.held("aircraft") == before
    assert site.results("aircraft")[b"N7"] == {"n": 0}
    assert site.mend("aircraft", b"N1", b"N7") == {}


def test_a_dead_letter_that_the_fold_takes_now_has_to_be_redriven_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(moody(), tmp_path)
    site.run(batch(*range(1, 10)))
    assert len(site.dead) == 1
    site.spoil("aircraft", b"N1", n=0)
    monkeypatch.setattr(Moody, "broken", False)
    with pytest.raises(RunRefusedError, match=r"key b'N1': 1 of its dead letters .* Redrive them first"):
        site.mend("aircraft", b"N1")
    assert site.pointer().version == 0


def timed() -> Flow[Any]:
    fold = Fields(n=count(), m=total("minutes"))
    source = bare(time=pl.col("minutes") * 60_000)
    return (
        Flow("timed")
        .source(source)
        .aggregate("window", "tail", fold, window=tumbling("10m", retention="30m"))
        .aggregate("visit", "tail", fold, window=session("2m", retention="30m"))
        .aggregate("kept", "tail", fold, expire_after="1h")
    )


def minutes(first: int, last: int) -> list[Record]:
    """Records of an aircraft each, one every minute."""
    return [replace(one, timestamp_ms=10**10) for one in batch(*range(first, last))]


def test_a_key_means_all_its_windows(tmp_path: Path) -> None:
    site = Site(timed(), tmp_path)
    site.run(minutes(1, 120))
    windows = sorted(key for key in site.results("window") if key.startswith(b"N1@"))
    assert 3 < len(windows) < 12  # earlier ones have left the store
    site.spoil("window", windows[1], n=0)
    site.lose("window", windows[3])
    assert site.mend("window", b"N1") == {windows[1]: Mending.CHANGED, windows[3]: Mending.PUT_BACK}
    site.lose("visit", b"N1")
    site.lose("kept", b"N1")
    assert site.mend("visit", b"N1") == {b"N1": Mending.PUT_BACK}
    assert site.mend("kept", b"N1", b"N2") == {b"N1": Mending.PUT_BACK}
    same_as_its_log(site, ["window", "kept"])
    site.run(minutes(120, 200))
    same_as_its_log(site, ["window", "kept"])
    with closing(site.fold()) as truth:
        mine, visits = site.results("visit"), truth.results("visit")
    both = mine.keys() & visits.keys()  # a session leaves when its key is written after its time
    assert len(both) > 10
    assert {key: mine[key] for key in both} == {key: visits[key] for key in both}


def test_closed_sessions_that_were_published_are_published_as_they_are_after_a_mend(tmp_path: Path) -> None:
    fold = Fields(n=count(), m=total("minutes"))
    source = Flow("timed").source(bare(time=pl.col("minutes") * 60_000))
    flow = source.aggregate("visit", "tail", fold, window=session("2m", retention="1d")).publish_states(
        "out", on="close"
    )
    site = Site(flow, tmp_path)
    site.run(minutes(1, 60))
    right, seen = site.results("visit"), seen_by_readers(site.outputs)
    closed = [key for key in sorted(seen) if key.startswith(b"N1")]
    assert len(closed) > 5
    assert seen == {key: right[key] for key in seen}
    with closing(site.runner()) as run:
        state = run.states("visit")[b"N1"].fold
    merged = [[state[0][0], state[1][1], {"n": 9, "m": 9}], *state[2:]]  # as if two sessions were one
    site.spoil("visit", b"N1", fold=merged)
    wrong, *rest = sorted(key for key in site.results("visit") if key.startswith(b"N1"))
    site.outputs.append(MendedSnapshot("out", wrong, site.outputs[0].value))  # a reader has seen it
    site.outputs += [MendedSnapshot("out", key, None) for key in closed[:2]]
    assert seen_by_readers(site.outputs).keys() != seen.keys()
    site.mend("visit", b"N1")
    assert site.results("visit") == right
    assert seen_by_readers(site.outputs) == seen
    assert set(rest) < right.keys()
    site.lose("visit", b"N1")
    site.mend("visit", b"N1")
    assert seen_by_readers(site.outputs) == seen


def test_states_that_cannot_be_mended_are_refused(site: Site) -> None:
    with pytest.raises(RunRefusedError, match="no state of key N77"):
        site.mend("aircraft", b"N1", b"N77")
    with pytest.raises(Crash), use(CrashAt(6, applied=True)):
        site.run(batch(20, 21, 22))
    with pytest.raises(RunRefusedError, match="did not end cleanly"):
        site.mend("aircraft", b"N1")


def test_a_run_at_work_is_refused_and_not_fenced(site: Site) -> None:
    run = site.runner()
    with pytest.raises(RunRefusedError, match="a run is at work"):
        site.mend("aircraft", b"N1")
    run.process(batch(20))
    run.close()


class Touchy:
    """A step that rejects some minutes as long as it is told so."""

    broken = True

    def __call__(self, element: Element[Any]) -> Any:
        if element["minutes"] in (4, 7) and Touchy.broken:
            raise ValueError
        return element.value


def touchy() -> Flow[Any]:
    """The letters of both steps leave no hole: their keys are not known yet."""
    flow = Flow("touchy").source(wrapped()).map(Touchy()).aggregate("aircraft", "tail", FLEET)
    return flow.map(Touchy()).aggregate("carrier", "carrier", FLEET)


def crashed(site: Site, records: list[Record]) -> None:
    """A run that dies in the middle of a batch, and another one that reads all."""
    with pytest.raises(Crash), use(CrashAt(9, applied=True)):
        site.run(records)
    site.run(records)
    site.log[:] = records


@pytest.mark.parametrize("read", [Site.run, crashed], ids=["cleanly", "crashed"])
def test_a_dead_letter_without_a_hole_that_the_fold_takes_now_has_to_be_redriven_first(
    tmp_path: Path, read: Callable[[Site, list[Record]], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(touchy(), tmp_path)
    read(site, chains(1, 12))
    assert site.dead
    site.spoil("aircraft", b"N1", n=0)
    site.spoil("carrier", b"AA", n=0)
    assert site.mend("aircraft", b"N1", apply=False) == {b"N1": Mending.CHANGED}
    monkeypatch.setattr(Touchy, "broken", False)
    for stage, key in (("aircraft", b"N1"), ("carrier", b"AA")):
        with pytest.raises(RunRefusedError, match=r"folds [12] of the dead letters that wait .* Redrive them first"):
            site.mend(stage, key)
    assert site.pointer().version == 0
    letters = [redriven_record(site.flow, one, 20 + at) for at, one in enumerate(site.dead)]
    site.run(letters)
    assert site.mend("aircraft", b"N1") == {b"N1": Mending.CHANGED}
    assert site.mend("carrier", b"AA") == {b"AA": Mending.CHANGED}
    assert [site.results(stage) for stage in ("aircraft", "carrier")] == [
        {b"N%d" % n: {"n": len(range(n or 3, 12, 3)), "m": sum(range(n or 3, 12, 3))} for n in range(3)},
        {b"AA": {"n": 11, "m": sum(range(1, 12))}},
    ]


def damaged(element: Element[Any]) -> Any:
    """Rejects the record at one offset; what is redriven was corrected."""
    if element.offset == 3:
        raise ValueError
    return element.value


def brief() -> Flow[Any]:
    """The letter leaves no hole, and the first stage holds two positions of a lane."""
    flow = Flow("brief").source(wrapped()).map(damaged).aggregate("aircraft", "tail", FLEET, history=2)
    return flow.aggregate("carrier", "carrier", FLEET)


def redriven_late(site: Site, *, size: int) -> None:
    """Reject an event that may be a copy, then read later ones and its letter."""
    first, late, third, *later = (chained_to(at) for at in range(1, 10))
    site.run([first, replace(third, offset=2), replace(late, offset=3)])
    [letter] = site.dead
    assert not letter.hole
    site.run([*later, redriven_record(site.flow, letter, 30)], size=size)


def chained_to(at: int) -> Record:
    return chained(at, hop("raw", 0, at), key="N1", carrier="AA", minutes=at, event_id=f"e{at}")


def test_a_letter_that_was_folded_in_a_larger_batch_is_not_taken_out_of_a_state(tmp_path: Path) -> None:
    site = Site(brief(), tmp_path)
    redriven_late(site, size=100)
    assert site.results("aircraft") == {b"N1": {"n": 9, "m": 45}}
    site.spoil("aircraft", b"N1", n=0)
    for stage, key in (("aircraft", b"N1"), ("carrier", b"AA")):
        with pytest.raises(
            RunRefusedError, match=r"finds 1 of the .* messages of stage .* unproven.* .--snapshot FILE"
        ):
            site.mend(stage, key, size=1)
    assert site.pointer().version == 0
    assert site.mend("aircraft", b"N1", size=100) == {b"N1": Mending.CHANGED}
    assert site.results("aircraft") == {b"N1": {"n": 9, "m": 45}}


def test_a_letter_that_waits_because_it_is_unproven_is_no_obstacle(tmp_path: Path) -> None:
    site = Site(brief(), tmp_path)
    redriven_late(site, size=1)
    assert [one.reason.value for one in site.dead][1:] == ["unproven"]
    site.spoil("aircraft", b"N1", n=0)
    assert site.mend("aircraft", b"N1", size=1) == {b"N1": Mending.CHANGED}
    assert site.results("aircraft") == {b"N1": {"n": 8, "m": 43}}
    with pytest.raises(RunRefusedError, match=r"folds 1 of the dead letters that wait"):
        site.mend("aircraft", b"N1", size=100)


def test_a_message_that_is_later_than_a_history_allows_is_lost_if_batches_end_elsewhere(tmp_path: Path) -> None:
    site = Site(brief(), tmp_path)
    late = [replace(chained_to(root), offset=at) for at, root in enumerate((1, 5, 6, 7, 8, 2), 4)]
    site.run(late, size=100)
    assert site.results("aircraft") == {b"N1": {"n": 6, "m": 29}}
    assert site.mend("aircraft", b"N1", size=1) == {b"N1": Mending.CHANGED}
    assert site.results("aircraft") == {b"N1": {"n": 5, "m": 27}}
