"""Live states are compared with a new fold of their history, on a real broker."""

import threading
import uuid
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from aggregations.definition.aggregates import count, total
from aggregations.definition.aggregates_sketches import approximate_distinct, quantiles
from aggregations.definition.element import Element
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.sessions import session
from aggregations.definition.source import Topic
from aggregations.definition.windows import tumbling
from aggregations.errors import DefinitionChangedError, RunRefusedError
from aggregations.local import run_local
from aggregations.report import Report
from jobs.backup import snapshot
from jobs.dead_letters.redrive import redrive
from jobs.environment import UsageError
from jobs.refolding.audit import audit
from jobs.refolding.ordered import OrderedCopy
from jobs.refolding.rehearse import rehearse
from persistence.commit import faults
from persistence.commit.faults import Fault, FaultOutcome, Injector
from tests.messages import Leg
from tests.support.flows import BROKEN, Totals, fleet, relay, served, spending, totals
from tests.support.options import called
from tests.support.refolding import at_times, audited, delete_before, history, tamper
from tests.support.world import Sent, World, alone, legs, republished

pytestmark = [pytest.mark.integration]


class Crash(BaseException):
    """The process dies."""


def crash() -> Any:
    raise Crash


class Moody(Totals):
    """Does not fold one carrier as long as a file exists."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def fold(self, state: dict[str, Any], element: Element[Any]) -> dict[str, Any]:
        if element["carrier"] == "AA" and Path(self.marker).exists():
            raise ValueError(element["carrier"])
        return super().fold(state, element)


def test_live_states_without_an_error_have_not_drifted(world: World) -> None:
    sent, flow = history(world), fleet(world.topic)
    world.run(flow, max_records=30)
    found = audited(world, flow)
    assert not found.drifted
    assert found.live == found.folded.states
    assert found.folded.records == len(world.records())
    assert found.comparison.stages["aircraft"].same == len(totals(sent, "tail"))
    world.send(republished(sent, range(150, 200)))
    assert audited(world, flow).folded.records == found.folded.records  # the flow has not read more
    world.run(flow)
    assert not audited(world, flow).drifted


def test_a_live_state_with_an_error_has_drifted(world: World) -> None:
    sent, flow = history(world), fleet(world.topic)
    world.run(flow)
    truth = totals(sent, "carrier")
    tamper(world, flow, "carrier", b"AA", minutes=truth[b"AA"]["minutes"] - 7)
    found = audited(world, flow)
    assert found.drifted
    carriers = found.comparison.stages["carrier"]
    assert (carriers.changed, carriers.fields["minutes"].total) == (1, 7)
    [one] = carriers.sample
    assert (one.key, one.new) == (b"AA", truth[b"AA"])
    assert found.comparison.stages["aircraft"].differences == 0
    assert not audited(world, flow, stages=["aircraft"]).drifted
    assert not audited(world, flow, keys=[b"DL"]).drifted
    with pytest.raises(RunRefusedError, match="no state of key N99"):
        audited(world, flow, keys=[b"N99"])


def test_an_audit_begins_with_a_snapshot_when_the_beginning_was_deleted(world: World, tmp_path: Path) -> None:
    sent, flow, file = legs(200), fleet(world.topic), tmp_path / "fleet.snapshot"
    world.send(republished(sent, range(120)))
    world.run(flow)
    snapshot(flow, file, stores=world.stores(flow))
    world.send(republished(sent, range(80, 200)))
    world.run(flow)
    ends = world.ends(flow)
    delete_before(world, (0, 1), (1, 1))
    with pytest.raises(RunRefusedError, match="--snapshot"):
        audited(world, flow)
    found = audited(world, flow, snapshot=file)
    assert not found.drifted
    assert found.folded.records < len(world.records())
    tamper(world, flow, "aircraft", sent[0].tail.encode(), legs=0)
    assert audited(world, flow, snapshot=file).comparison.differences == 1
    delete_before(world, *((partition, end) for partition, end in ends.items()))
    with pytest.raises(RunRefusedError, match="later snapshot"):
        audited(world, flow, snapshot=file)
    later = tmp_path / "later.snapshot"
    snapshot(flow, later, stores=world.stores(flow))
    assert audited(world, flow, snapshot=later).folded.records == 0


def test_states_that_cannot_be_compared_are_refused(world: World, tmp_path: Path) -> None:
    history(world)
    flow = fleet(world.topic)
    with pytest.raises(RunRefusedError, match="contain nothing of it"):
        called(audit, flow, kafka=world.settings, stores=world.stores(flow), work=tmp_path / "work")
    stop = threading.Event()
    told: list[str] = []

    def at_work(_: Report) -> None:
        with pytest.raises(RunRefusedError, match="a run is at work"):
            audited(world, flow)
        told.append("refused")
        stop.set()

    world.run(flow, max_records=50, until_caught_up=False, progress=at_work, stop=stop)
    assert told == ["refused"]
    assert not audited(world, flow).drifted
    with pytest.raises(DefinitionChangedError, match="with the code that made them"):
        audited(world, fleet(world.topic, "messages"))
    with pytest.raises(RunRefusedError, match="no stage 'ship'"):
        audited(world, flow, stages=["ship"])


def timed(topic: str) -> Flow[Any]:
    """Windows, sessions and states that expire, all of which leave the store while the flow runs."""
    fold = Fields(legs=count(), minutes=total("minutes"))
    return (
        Flow("timed")
        .source(Topic(topic, Leg))
        .aggregate("visit", "tail", fold, window=session("5m", retention="10m"))
        .aggregate("kept", "tail", fold, expire_after="1h")
        .aggregate("window", "carrier", fold, window=tumbling("10m", lateness="5m", retention="10m"))
        .aggregate("all", pl.lit("all"), Fields(tails=approximate_distinct("tail"), spread=quantiles("minutes", k=8)))
    )


def test_windows_sessions_and_states_that_have_left_are_no_drift(world: World, tmp_path: Path) -> None:
    flow, file = timed(world.topic), tmp_path / "timed.snapshot"
    sent = at_times(legs(400))
    world.send(sent[: len(sent) // 2])
    removed = world.run(flow, max_records=37).removed
    snapshot(flow, file, stores=world.stores(flow))
    world.send(sent[len(sent) // 2 :])
    removed += world.run(flow, max_records=53).removed
    assert removed["visit"] + removed["kept"] > 0
    assert removed["window"] > 20
    found = audited(world, flow)
    assert not found.drifted, found.as_json()
    assert found.comparison.stages["window"].same > 3
    assert found.comparison.stages["visit"].same > 3
    assert not audited(world, flow, snapshot=file).drifted
    [*_, last] = world.views(flow, "window")
    tamper(world, flow, "window", last, legs=1_000)
    assert [one.key for one in audited(world, flow).comparison.stages["window"].sample] == [last]


def test_several_sources_and_a_later_start_are_part_of_the_history(world: World, topic: Callable[..., str]) -> None:
    fuels = topic(partitions=2, name="fuels")
    flow = served(world.topic, fuels)
    world.send(alone(leg, partition=i % 2) for i, leg in enumerate(legs(60)))
    world.send(
        [Sent(b'{"tail": "N%d", "carrier": "AA", "litres": %d}' % (i % 8, i), b"N%d" % (i % 8)) for i in range(50)],
        fuels,
    )
    world.run(flow, start={world.topic: {0: 10, 1: 3}}, max_records=20)
    delete_before(world, (0, 10), (1, 2))
    found = audited(world, flow)
    assert not found.drifted
    assert found.folded.records == 60 - 13 + 50
    assert found.history.first[world.topic] == {0: 10, 1: 3}
    delete_before(world, (0, 11))
    with pytest.raises(RunRefusedError, match="began at 10, but the records before 11"):
        audited(world, flow)


def test_stages_behind_a_lookup_are_compared_only_if_they_are_named(world: World, topic: Callable[..., str]) -> None:
    table = topic(name="merchants", cleanup_policy="compact")
    flow = spending(world.topic, table)
    rows = [Sent(b'{"category": "%s"}' % (b"food" if i % 2 else b"toys"), b"m%d" % i) for i in range(4)]
    paid = [
        Sent(b'{"card": "c%d", "merchant": "m%d", "cents": 5}' % (i % 3, i % 5), b"c%d" % (i % 3)) for i in range(60)
    ]
    world.send(rows, table)
    world.send(paid)
    world.run(flow, max_records=16)
    assert not audited(world, flow, stages=["category"]).drifted
    world.send([Sent(b'{"category": "books"}', b"m1")], table)
    world.run(flow)
    found = audited(world, flow)
    assert (found.drifted, found.skipped, list(found.comparison.stages)) == (False, ("category",), ["merchant", "card"])
    assert audited(world, flow, stages=["category"]).drifted  # payments before the change find the new row
    again = called(rehearse, flow, flow, kafka=world.settings, work=tmp_of(world))
    assert not again.differs


def test_stages_behind_a_lookup_are_compared_in_the_turns_that_the_journal_shows(
    world: World, topic: Callable[..., str]
) -> None:
    table, journal = topic(name="merchants", cleanup_policy="compact"), topic(name="journal")
    flow = spending(world.topic, table)

    def rows(category: str, count: int = 4) -> list[Sent]:
        return [Sent(b'{"category": "%s"}' % category.encode(), b"m%d" % i) for i in range(count)]

    def paid(count: int) -> list[Sent]:
        return [
            Sent(b'{"card": "c%d", "merchant": "m%d", "cents": 5}' % (i % 3, i % 5), b"c%d" % (i % 3))
            for i in range(count)
        ]

    for category in ("food", "toys", "books"):
        world.send(rows(category), table)
        world.send(paid(20))
        world.run(flow, max_records=8, journal=journal)
    found = audited(world, flow, journal=journal)
    assert (found.drifted, found.skipped, found.unknown) == (False, (), "")
    assert found.comparison.stages["category"].same == 4
    without = audited(world, flow)
    assert (without.skipped, without.unknown) == (
        ("category",),
        ("it is not known which rows lookups found: the flow has no journal (--journal)"),
    )
    tamper(world, flow, "category", b"food", cents=0)
    assert audited(world, flow, journal=journal).comparison.stages["category"].changed == 1
    world.send(rows("none", 1), table)
    world.run(flow)
    world.send(paid(3))
    world.run(flow)  # these two have no entry, but one part after the other
    world.send(rows("garden", 1), table)
    world.run(flow, journal=journal)
    lacking = audited(world, flow, journal=journal)
    assert lacking.skipped == ("category",)
    assert "the journal lacks batches" in lacking.unknown
    assert "topic never-was" in audited(world, flow, journal="never-was").unknown


def tmp_of(world: World) -> Path:
    return world.directory / "work"


def test_runs_that_crashed_and_dead_letters_that_were_redriven_are_no_drift(world: World, tmp_path: Path) -> None:
    marker = tmp_path / "broken"
    flow = Flow("moody").source(Topic(world.topic, Leg)).aggregate("aircraft", "tail", Moody(str(marker)))
    flow = flow.aggregate("carrier", "carrier", Fields(legs=count()))
    sent = legs(120)
    marker.touch()
    world.send(republished(sent, range(60)))
    for point in ("persist:carrier", "persist:aircraft", "manifest", "publish", "fetch"):
        with suppress(Crash, RuntimeError), faults.use(Injector([Fault(point, FaultOutcome.AFTER)], crash)):
            world.run(flow, max_records=15)
    world.run(flow)
    marker.unlink()
    found = audited(world, flow)  # the exception was not one of the record's: the fold folds all of them
    broken = sum(one.carrier == "AA" for one in sent[:60])
    assert found.holes["aircraft"] == (broken, 0)
    assert found.drifted
    redrive(world.settings, world.dead, apply=True)
    world.send(republished(sent, range(40, 120)))
    world.run(flow)
    found = audited(world, flow)
    assert not found.drifted
    assert (found.holes["aircraft"], found.listed) == ((0, 0), (0, 0))


def test_dead_letters_with_a_hole_wait_on_both_sides(world: World) -> None:
    flow = fleet(world.topic, "messages")
    broken = alone(Leg(tail="N1", carrier=BROKEN, minutes=5))
    world.send([*republished(legs(40)), broken, alone(Leg(tail="NEW", carrier=BROKEN, minutes=5))])
    world.run(flow)
    redrive(world.settings, world.dead, apply=True)
    world.run(flow)
    found = audited(world, flow)
    assert not found.drifted
    assert found.holes == {"aircraft": (2, 2), "carrier": (0, 0)}
    assert found.listed == (2, 2)


def test_a_topic_that_was_created_again_needs_a_later_snapshot(world: World, tmp_path: Path) -> None:
    flow, file = fleet(world.topic), tmp_path / "fleet.snapshot"
    world.send(alone(leg) for leg in legs(30))
    world.run(flow)
    earlier = tmp_path / "earlier.snapshot"
    snapshot(flow, earlier, stores=world.stores(flow))
    world.topics.delete([world.topic])
    world.topics.create(world.topic, 2)
    with pytest.raises(RunRefusedError, match="created again"):
        audited(world, flow)
    world.send(alone(leg) for leg in legs(20, seed=9))
    world.run(flow, accept=["topic-recreated"])
    for options in ({}, {"snapshot": earlier}):
        with pytest.raises(RunRefusedError, match="created again"):
            audited(world, flow, **options)
    snapshot(flow, file, stores=world.stores(flow))
    world.send(alone(leg) for leg in legs(10, seed=3))
    world.run(flow)
    found = audited(world, flow, snapshot=file)
    assert (found.drifted, found.folded.records) == (False, 10)


def test_states_of_an_earlier_definition_and_other_snapshots_are_refused(world: World, tmp_path: Path) -> None:
    source = Flow("fleet").source(Topic(world.topic, Leg))
    before = source.aggregate("aircraft", "tail", Fields(legs=count()))
    after = source.aggregate("aircraft", "tail", Fields(legs=count(), minutes=total("minutes")).added(minutes=0))
    world.send(alone(leg) for leg in legs(30))
    world.run(before)
    earlier, file = tmp_path / "earlier.snapshot", tmp_path / "fleet.snapshot"
    snapshot(before, earlier, stores=world.stores(before))
    world.run(after, accept=["definition"])
    with pytest.raises(DefinitionChangedError, match="--snapshot"):
        audited(world, after)
    with pytest.raises(DefinitionChangedError, match="with the code that made it"):
        audited(world, after, snapshot=earlier)
    snapshot(after, file, stores=world.stores(after))
    world.send(alone(leg) for leg in legs(30, seed=2))
    world.run(after)
    assert not audited(world, after, snapshot=file).drifted
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(RunRefusedError, match="incomplete"):
        audited(world, after, snapshot=file)
    with pytest.raises(UsageError, match="No such file"):
        audited(world, after, snapshot=tmp_path / "none")


def test_a_topic_that_grew_in_the_middle_of_its_history_is_folded_again(world: World) -> None:
    sent, flow = legs(300), fleet(world.topic)
    world.send(republished(sent, range(100)))
    world.run(flow, max_records=40)
    world.send(republished(sent, range(60, 140)))
    world.topics.add_partitions(world.topic, 5)
    world.send(republished(sent, range(100, 300)))
    world.run(flow, max_records=40)
    world.send(republished(sent, range(250, 300)))
    world.run(flow, max_records=40)
    found = audited(world, flow)
    assert found.history.end[world.topic].keys() == set(range(5))
    assert not found.drifted


def test_states_in_redis_are_audited(kafka: str, topic: Callable[..., str], tmp_path: Path, redis_url: str) -> None:
    urls = {"aircraft": f"{redis_url}?prefix=audit-{uuid.uuid4().hex[:8]}", "carrier": f"lmdb://{tmp_path}/states"}
    source = topic(partitions=2, name="legs")
    with closing(World(kafka, source, topic(name="dead"), tmp_path, urls=urls, runner=run_local)) as world:
        flow = fleet(source)
        world.send(republished(legs(200, tails=60), [*range(150), *range(100, 200)]))
        world.run(flow, max_records=60)
        options: dict[str, Any] = {"kafka": world.settings, "stores": world.stores(flow), "work": tmp_path / "work"}
        found = called(audit, flow, **options)
        assert (found.drifted, found.live["aircraft"]) == (False, len(world.views(flow, "aircraft")))
        assert found.live["aircraft"] > 50
        tamper(world, flow, "aircraft", min(world.views(flow, "aircraft")), minutes=-1)
        assert called(audit, flow, **options).comparison.stages["aircraft"].changed == 1


def test_a_run_that_begins_while_the_live_states_are_copied_is_noticed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    history(world)
    flow, copied = fleet(world.topic), []

    class Disturbed(OrderedCopy):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            copied.append(self)
            if len(copied) == 1:
                world.send(republished(legs(210), range(200, 210)))
                world.run(flow)

    world.run(flow)
    monkeypatch.setattr("jobs.refolding.audit.OrderedCopy", Disturbed)
    with pytest.raises(RunRefusedError, match="a run began meanwhile"):
        called(audit, flow, kafka=world.settings, stores=world.stores(flow), work=world.directory / "work")
    monkeypatch.undo()
    assert not audited(world, flow).drifted


def test_a_flow_without_a_stage_has_no_states_to_audit(world: World) -> None:
    flow = relay(world.topic, "out")
    with pytest.raises(RunRefusedError, match="no stage"):
        called(audit, flow, kafka=world.settings, stores=world.stores(flow))
