"""Chosen keys are mended from a real topic."""

import sqlite3
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aggregations.definition.aggregates import count, total
from aggregations.definition.element import Element
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Topic
from aggregations.definition.windows import tumbling
from aggregations.engine.options import RunOptions
from aggregations.errors import DefinitionChangedError, RunRefusedError
from aggregations.local import fold_range, run_local
from aggregations.report import Report
from aggregations.run import growth
from aggregations.run.mend import Mending
from aggregations.run.snapshots import Latest, read_snapshot
from jobs.backup import snapshot
from jobs.dead_letters.discard import discard
from jobs.dead_letters.redrive import redrive
from jobs.mending import Mended, mend
from jobs.refolding import fold as folding
from jobs.replay import pointer_of, rebuild, rollback, swap
from tests.messages import Leg
from tests.support.flows import BROKEN, filtered, fleet, spending, totals
from tests.support.options import called
from tests.support.refolding import at_times, audited, delete_before, history, tamper
from tests.support.world import Sent, World, alone, legs, republished

pytestmark = [pytest.mark.integration]


def mended(world: World, flow: Flow[Any], stage: str, *keys: bytes, **options: Any) -> Mended:
    given = {"apply": True, "why": "a test", **options}
    work = world.directory / "work"
    return called(
        mend, flow, kafka=world.settings, stores=world.stores(flow), stage=stage, keys=keys, work=work, **given
    )


def lose(world: World, flow: Flow[Any], stage: str, key: bytes) -> None:
    """Remove a state from its file, as an error of the store would."""
    with closing(sqlite3.connect(world.stores(flow)[stage].removeprefix("sqlite://"))) as connection, connection:
        gone = connection.execute(
            "DELETE FROM state WHERE key = ? AND stage IN (SELECT id FROM stage WHERE name = ?)", (key, stage)
        )
        assert gone.rowcount == 1


@pytest.mark.parametrize("path", ["columns", "messages"])
def test_a_mended_key_drops_copies_and_folds_what_is_new(world: World, path: Any) -> None:
    sent, flow = history(world), fleet(world.topic, path)
    world.run(flow, max_records=30)
    tails = [one.tail.encode() for one in sent]
    wrong, lost = sorted({*tails})[:2]
    tamper(world, flow, "aircraft", wrong, minutes=-7)
    lose(world, flow, "aircraft", lost)
    before = world.views(flow, "aircraft")[wrong].version
    plan = mended(world, flow, "aircraft", wrong, lost, apply=False)
    assert (plan.applied, plan.later, plan.folded.records) == (False, ("carrier",), len(world.records()))
    assert plan.mends == {wrong: Mending.CHANGED, lost: Mending.PUT_BACK}
    stage = plan.comparison.stages["aircraft"]
    assert (stage.changed, stage.only_new) == (1, 1)
    assert world.views(flow, "aircraft")[wrong].version == before
    assert pointer_of(flow, world.stores(flow)).version == 0

    done = mended(world, flow, "aircraft", wrong, lost)
    assert (done.applied, done.mends) == (True, plan.mends)
    assert not audited(world, flow).drifted
    assert mended(world, flow, "aircraft", wrong, lost).mends == {}
    [change] = pointer_of(flow, world.stores(flow)).changes
    assert (change.what, change.why) == ("mend", "a test")

    more = legs(260)
    at = [number for number, one in enumerate(more) if one.minutes and one.tail.encode() in (wrong, lost)]
    copies = [number for number in at if number < 200][-3:]
    world.send(republished(more, [*copies, *range(200, 260)]))
    report = world.run(flow)
    assert report.verdicts["aircraft"]["duplicate"] == 3
    world.check(flow)
    assert world.results(flow, "aircraft") == totals(more, "tail")


def test_a_key_that_no_record_has_becomes_empty(world: World) -> None:
    sent, flow = legs(60), fleet(world.topic)
    world.send(republished(sent))
    world.run(flow)
    with closing(sqlite3.connect(world.stores(flow)["aircraft"].removeprefix("sqlite://"))) as connection, connection:
        connection.execute(
            "INSERT INTO state SELECT stage, ?, version, epoch, batch, value, due FROM state WHERE key = ?",
            (b"X", b"N1"),
        )
    assert audited(world, flow).comparison.stages["aircraft"].only_old == 1
    assert mended(world, flow, "aircraft", b"X").mends == {b"X": Mending.EMPTIED}
    assert b"X" not in world.results(flow, "aircraft")
    assert not audited(world, flow).drifted
    assert mended(world, flow, "aircraft", b"X").mends == {}
    world.send([alone(Leg(tail="X", carrier="AA", minutes=5))])
    world.run(flow)
    assert world.results(flow, "aircraft")[b"X"] == {"legs": 1, "minutes": 5, "worst": 5}
    assert not audited(world, flow).drifted


def test_a_mend_begins_with_a_snapshot_when_the_beginning_was_deleted(world: World, tmp_path: Path) -> None:
    sent, flow, file = legs(200), fleet(world.topic), tmp_path / "fleet.snapshot"
    world.send(republished(sent, range(120)))
    world.run(flow)
    snapshot(flow, file, stores=world.stores(flow))
    world.send(republished(sent, range(80, 200)))
    world.run(flow)
    delete_before(world, (0, 1), (1, 1))
    tamper(world, flow, "carrier", b"AA", legs=0)
    with pytest.raises(RunRefusedError, match="--snapshot"):
        mended(world, flow, "carrier", b"AA")
    done = mended(world, flow, "carrier", b"AA", snapshot=file)
    assert (done.mends, done.folded.records < len(world.records())) == ({b"AA": Mending.CHANGED}, True)
    assert world.results(flow, "carrier") == totals(sent, "carrier")


def test_dead_letters_wait_are_redriven_and_stay_discarded(world: World) -> None:
    flow = fleet(world.topic, "messages")
    bad = [alone(Leg(tail=tail, carrier=BROKEN, minutes=5)) for tail in ("N1", "NEW")]
    world.send([*republished(legs(40)), *bad])
    world.run(flow)
    tamper(world, flow, "aircraft", b"N1", legs=0)
    lose(world, flow, "aircraft", b"NEW")
    assert mended(world, flow, "aircraft", b"N1", b"NEW").mends == {b"N1": Mending.CHANGED, b"NEW": Mending.PUT_BACK}
    assert audited(world, flow).holes["aircraft"] == (2, 2)
    redrive(world.settings, world.dead, apply=True)
    report = world.run(flow)
    assert report.reasons == {"fold_failed": 2}  # the holes took them, and the fold failed again
    done = discard(world.settings, world.dead, flow, world.stores(flow), apply=True)
    assert done.no_hole == 0 or done.dead_letters > done.no_hole
    held = world.untimed(flow)
    tamper(world, flow, "aircraft", b"N1", legs=0)
    assert mended(world, flow, "aircraft", b"N1", b"NEW").mends == {b"N1": Mending.CHANGED}
    assert [{key: one.histories.holes for key, one in views.items()} for views in world.untimed(flow)] == [
        {key: one.histories.holes for key, one in views.items()} for views in held
    ]


def timed(topic: str, out: str) -> Flow[Any]:
    fold = Fields(legs=count(), minutes=total("minutes"))
    return (
        Flow("timed")
        .source(Topic(topic, Leg))
        .aggregate("aircraft", "tail", fold)
        .publish_states(out)
        .aggregate("window", "carrier", fold, window=tumbling("10m", lateness="5m", retention="1d"))
        .publish_states(out, on="close")
    )


def test_mended_states_are_published_again(world: World, topic: Callable[..., str]) -> None:
    out = topic(name="out")
    flow = timed(world.topic, out)
    world.send(at_times(legs(200)))
    world.run(flow, max_records=50)
    first = min(world.views(flow, "window"))
    carrier = first.partition(b"@")[0]
    for key in (first, max(key for key in world.views(flow, "window") if key.startswith(carrier))):
        tamper(world, flow, "window", key, legs=1_000)
    tamper(world, flow, "aircraft", b"N1", legs=1_000)
    before = len(world.records(out))
    done = mended(world, flow, "window", carrier)
    assert len(done.mends) == 2
    assert done.published == 1  # the last window is still open, and is published when it closes
    assert mended(world, flow, "aircraft", b"N1").published == 1
    assert len(world.records(out)) == before + 2
    latest = Latest()
    for one in world.records(out):
        latest.apply(one.key or b"", read_snapshot(one.value))
    assert latest.state(b"N1") == world.results(flow, "aircraft")[b"N1"]
    assert latest.state(first) == world.results(flow, "window")[first]
    lose(world, flow, "aircraft", b"N1")
    done = mended(world, flow, "aircraft", b"N1")
    assert (done.mends, done.published) == ({b"N1": Mending.PUT_BACK}, 2)
    assert [one.value is None for one in world.records(out) if one.key == b"N1"][-2:] == [True, False]
    assert not audited(world, flow).drifted


def test_the_states_of_a_filter_are_mended(world: World) -> None:
    flow = filtered(world.topic)
    numbers = [*range(30), *range(20, 40)]
    world.send(Sent(b'{"id": %d}' % number, b"i%d" % (number % 3)) for number in numbers)
    world.run(flow)
    key = min(world.views(flow, "filter"))
    lose(world, flow, "filter", key)
    assert mended(world, flow, "filter", key).mends == {key: Mending.PUT_BACK}
    assert not audited(world, flow).drifted
    world.send(Sent(b'{"id": %d}' % number, b"i%d" % (number % 3)) for number in range(35, 45))
    assert world.run(flow).verdicts["filter"]["accepted"] == 5
    assert sum(one["messages"] for one in world.results(flow, "incident").values()) == 45


def test_after_a_swap_the_live_generation_is_mended_and_not_the_former_one(world: World, tmp_path: Path) -> None:
    history(world)
    flow = fleet(world.topic)
    world.run(flow)
    options: dict[str, Any] = {"kafka": world.settings, "stores": world.stores(flow)}
    called(rebuild, flow, why="a test", dead_letters=world.dead, **options)
    with pytest.raises(RunRefusedError, match="rebuilds it"):
        mended(world, flow, "carrier", b"AA", generation=2)
    called(swap, flow, why="a test", work=tmp_path / "swap", dead_letters=world.dead, **options)
    lose_in_generation(world, flow, "carrier", b"AA", 2)
    with pytest.raises(RunRefusedError, match="generation 2 is live"):
        mended(world, flow, "carrier", b"AA", generation=1)
    assert mended(world, flow, "carrier", b"AA").mends == {b"AA": Mending.PUT_BACK}
    assert not audited(world, flow).drifted
    assert called(rollback, flow, why="a test", **options).live == 1
    assert Counter(one.what for one in pointer_of(flow, world.stores(flow)).changes)["mend"] == 1


def lose_in_generation(world: World, flow: Flow[Any], stage: str, key: bytes, generation: int) -> None:
    with closing(sqlite3.connect(world.stores(flow)[stage].removeprefix("sqlite://"))) as connection, connection:
        gone = connection.execute(
            "DELETE FROM state WHERE key = ? AND stage IN (SELECT stage.id FROM stage JOIN flow ON flow.id = stage.flow "
            "WHERE stage.name = ? AND generation = ?)",
            (key, stage, generation),
        )
        assert gone.rowcount == 1


def test_a_stage_behind_a_lookup_is_mended_with_the_journal(world: World, topic: Callable[..., str]) -> None:
    table, journal = topic(name="merchants", cleanup_policy="compact"), topic(name="journal")
    flow = spending(world.topic, table)
    for category in (b"food", b"toys"):
        world.send([Sent(b'{"category": "%s"}' % category, b"m0")], table)
        world.send([Sent(b'{"card": "c", "merchant": "m0", "cents": 5}', b"c")] * 3)
        world.run(flow, journal=journal)
    tamper(world, flow, "category", b"food", cents=0)
    with pytest.raises(RunRefusedError, match=r"is behind a lookup.*the flow has no journal"):
        mended(world, flow, "category", b"food")
    assert mended(world, flow, "category", b"food", b"toys", journal=journal).mends == {b"food": Mending.CHANGED}
    assert {key: one["cents"] for key, one in world.results(flow, "category").items()} == {b"food": 15, b"toys": 15}
    lose(world, flow, "merchant", b"m0")
    assert mended(world, flow, "merchant", b"m0").mends == {b"m0": Mending.PUT_BACK}
    assert not audited(world, flow, journal=journal).drifted


def test_what_cannot_be_mended_is_refused_and_nothing_is_written(world: World) -> None:
    history(world)
    flow = fleet(world.topic)
    with pytest.raises(RunRefusedError, match="contain nothing of it"):
        mended(world, flow, "carrier", b"AA")
    world.run(flow)
    before = world.untimed(flow), world.manifest(flow)
    with pytest.raises(RunRefusedError, match="no stage 'ship'"):
        mended(world, flow, "ship", b"AA")
    with pytest.raises(RunRefusedError, match="no state of key XX"):
        mended(world, flow, "carrier", b"AA", b"XX")
    with pytest.raises(DefinitionChangedError, match="with the code that made them"):
        mended(world, fleet(world.topic, "messages"), "carrier", b"AA")
    assert (world.untimed(flow), world.manifest(flow)) == before


def test_states_in_redis_are_mended_in_all_their_windows(
    kafka: str, topic: Callable[..., str], tmp_path: Path, redis_url: str
) -> None:
    source = topic(partitions=2, name="legs")
    flow = timed(source, topic(name="out"))
    urls = {"aircraft": f"lmdb://{tmp_path}/states", "window": f"{redis_url}?prefix=mend-{uuid.uuid4().hex[:8]}"}
    with closing(World(kafka, source, topic(name="dead"), tmp_path, urls=urls, runner=run_local)) as world:
        world.send(at_times(legs(120)))
        world.run(flow)
        first, *_, last = sorted(key for key in world.views(flow, "window") if key.startswith(b"AA@"))
        for key in (first, last):
            tamper(world, flow, "window", key, legs=1_000)
        assert mended(world, flow, "window", b"AA").mends == dict.fromkeys((first, last), Mending.CHANGED)
        assert not audited(world, flow).drifted


def test_a_topic_that_grows_has_to_be_read_first(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    flow = fleet(world.topic)
    world.send(republished(legs(60)))
    world.run(flow)
    world.topics.add_partitions(world.topic, 4)
    world.send(republished(legs(90), range(60, 90)))
    world.run(flow)
    tamper(world, flow, "carrier", b"AA", legs=0)
    with pytest.raises(RunRefusedError, match="partitions were added"):
        mended(world, flow, "carrier", b"AA")
    monkeypatch.setattr(growth, "METADATA_MAX_AGE_SECONDS", 0)  # as if that time was over, and nothing had arrived
    assert mended(world, flow, "carrier", b"AA").mends == {b"AA": Mending.CHANGED}


def test_what_the_fold_cannot_prove_is_left_in_the_states_and_an_audit_says_so(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(element: Element[Any]) -> Any:
        if element["minutes"] == 4 and not element.chain[-1].pass_through:
            raise ValueError
        return element.value

    flow = Flow("brief").source(Topic(world.topic, Leg)).map(damaged)
    flow = flow.aggregate("aircraft", "tail", Fields(minutes=total("minutes")), history=2)
    sent = [Leg(tail="N1", carrier="AA", minutes=minutes) for minutes in range(1, 22)]
    world.send(republished(sent, [0, 6, 3]))  # the last one may be a copy
    world.run(flow)
    world.send(republished(sent, [9, 12, 15, 18]))
    redrive(world.settings, world.dead, apply=True)
    world.run(flow)
    everything = {b"N1": {"minutes": sum(range(1, 22, 3))}}
    assert world.results(flow, "aircraft") == everything
    assert (audited(world, flow).drifted, audited(world, flow).unproven) == (False, 0)

    def one_by_one(flow: Flow[Any], options: RunOptions, **given: Any) -> Report:
        return fold_range(flow, replace(options, max_records=1), **given)

    monkeypatch.setattr(folding, "fold_range", one_by_one)
    found = audited(world, flow)
    assert (found.drifted, found.unproven, found.folded.dead_letters["unproven"]) == (True, 1, 1)
    with pytest.raises(RunRefusedError, match=r"finds 1 of the .* unproven"):
        mended(world, flow, "aircraft", b"N1")
    assert world.results(flow, "aircraft") == everything
