"""What Kafka has deleted is folded from an archive in Parquet, on a real broker, and what is not there is refused."""

import random
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from aggregations.errors import RunRefusedError
from aggregations.local import run_local
from jobs.mending import mend
from jobs.refolding.rehearse import Rehearsal, rehearse
from jobs.replay import plan_replay, pointer_of, rebuild, swap
from persistence.pointer import Pointer
from tests.support.archives import rows_of, write
from tests.support.flows import fleet, spending, totals
from tests.support.options import called
from tests.support.refolding import audited, delete_before, history, tamper
from tests.support.world import Sent, World, legs, republished

pytestmark = [pytest.mark.integration]


class Lake:
    """A flow that has run, and an archive of what it has read; Kafka has deleted the beginning."""

    def __init__(self, world: World, directory: Path) -> None:
        self.world, self.flow, self.directory = world, fleet(world.topic), directory
        self.sent = history(world)
        world.run(self.flow, max_records=60)
        self.records = world.records()
        self.rows = rows_of(self.records)
        self.ends = {one: sum(row["partition"] == one for row in self.rows) for one in (0, 1)}
        self.lows = {one: end // 2 for one, end in self.ends.items()}

    def archive(self, keep: Callable[[dict[str, Any]], bool] = lambda _: True) -> str:
        """Write the rows that are to be kept, in any order, into several files."""
        rows = list(filter(keep, self.rows))
        random.Random(3).shuffle(rows)
        for part in range(3):
            write(self.directory / f"{part}.parquet", rows[part::3], group=40)
        return f"parquet:{self.directory}"

    def delete(self) -> None:
        delete_before(self.world, *self.lows.items())

    def options(self, **given: Any) -> dict[str, Any]:
        return {"kafka": self.world.settings, "stores": self.world.stores(self.flow), **given}

    def rehearsed(self, location: str, *ranges: str, **given: Any) -> Rehearsal:
        options = {"kafka": self.world.settings, "work": self.directory / "work", "ranges": ranges, **given}
        return called(rehearse, self.flow, self.flow, history=location, **options)


@pytest.fixture
def lake(world: World, tmp_path: Path) -> Lake:
    return Lake(world, tmp_path / "lake")


def test_an_audit_a_rehearsal_and_a_mend_read_what_kafka_has_deleted(lake: Lake) -> None:
    world, flow = lake.world, lake.flow
    location = lake.archive(lambda row: row["offset"] < lake.ends[row["partition"]] * 3 // 4)
    stored = sum(end * 3 // 4 for end in lake.ends.values())
    lake.delete()
    with pytest.raises(RunRefusedError, match="--history parquet:PATH"):
        audited(world, flow)
    found = audited(world, flow, history=location)
    assert (found.drifted, found.folded.records, found.history.archived) == (False, len(lake.rows), stored)
    assert found.comparison.stages["aircraft"].same == len(totals(lake.sent, "tail"))
    truth = totals(lake.sent, "carrier")[b"AA"]
    tamper(world, flow, "carrier", b"AA", minutes=-1)
    assert [one.new for one in audited(world, flow, history=location).comparison.stages["carrier"].sample] == [truth]
    done = called(
        *(mend, flow),
        **lake.options(
            history=location, stage="carrier", keys=[b"AA"], apply=True, why="a test", work=lake.directory / "w"
        ),
    )
    assert {**done.mends} == {b"AA": "changed"}
    assert world.views(flow, "carrier")[b"AA"].state == truth
    again = lake.rehearsed(location)
    assert (again.differs, again.new.records, again.history.archived) == (False, len(lake.rows), stored)
    some = lake.rehearsed(location, f"{world.topic}:0:2-{lake.ends[0] - 2}")
    assert some.history.as_json() == {world.topic: {"0": [2, lake.ends[0] - 1]}}
    now = datetime.now(UTC).isoformat()
    assert lake.rehearsed(location, f"2020-01-01T00:00:00Z/{now}").new.records == len(lake.rows)


def test_a_replay_reads_what_kafka_has_deleted(lake: Lake) -> None:
    world, flow = lake.world, lake.flow
    location, truth = lake.archive(), {name: world.views(flow, name) for name in flow.stage_names}
    world.send(republished(legs(230), range(200, 230)))  # read after the rebuild
    oracle = world.oracle(flow)
    lake.delete()
    for name in flow.stage_names:
        tamper(world, flow, name, min(truth[name]), minutes=-1)
    [*refused] = called(plan_replay, flow, **lake.options()).refused
    assert {one.risk for one in refused} == {"lost-records"}
    plan = called(plan_replay, flow, **lake.options(history=location))
    assert (plan.refused, plan.records) == ([], len(lake.rows))
    assert [one.archived for one in plan.ranges] == [lake.ends[0], lake.ends[1]]
    given = lake.options(why="a test", dead_letters=world.dead, history=location, max_records=50)
    done = called(rebuild, flow, **given)
    assert (done.report.records, done.behind) == (len(lake.rows), 0)
    assert done.report.batches > 3
    world.run(flow)
    assert called(swap, flow, work=lake.directory / "work", **given).done
    for name in flow.stage_names:
        assert world.results(flow, name) == oracle.results(name)
    assert len(world.records(world.dead)) == 4  # those of the first run, and of the rebuild
    letters = world.records(world.dead)
    assert sorted((one.key, one.value) for one in letters[:2]) == sorted((one.key, one.value) for one in letters[2:])
    assert not audited(world, flow, history=location, generation=2).drifted


def test_what_neither_the_archive_nor_kafka_has_is_refused(lake: Lake) -> None:
    world, flow = lake.world, lake.flow
    low = lake.lows[0]
    lake.delete()
    missing = (
        (
            lambda row: row["offset"] not in (3, 4),
            "lacks offsets 3 to 4 of .*:0, offsets 3 to 4 of .*:1, which Kafka no longer has.*--accept gap",
        ),
        (lambda row: row["partition"] == 1 or row["offset"] < low - 2, f"lacks offsets {low - 2} to {low - 1} of .*:0"),
        (lambda row: row["partition"] == 1 or row["offset"] >= 2, "records before 2 were deleted"),
    )
    for keep, text in missing:
        location = lake.archive(keep)
        with pytest.raises(RunRefusedError, match=text):
            audited(world, flow, history=location)
        plan = called(plan_replay, flow, **lake.options(history=location))
        assert plan.refused
        with pytest.raises(RunRefusedError, match="--accept"):
            called(rebuild, flow, **lake.options(why="a test", history=location, dead_letters=world.dead))
        assert pointer_of(flow, world.stores(flow)) == Pointer()
    location = lake.archive(missing[0][0])
    assert lake.rehearsed(location, f"{world.topic}:0:5-{low}").new.records == low - 4
    assert audited(world, flow, history=location, accept=["gap"]).folded.records == len(lake.rows) - 4


def test_a_hole_that_kafka_can_fill_is_none(lake: Lake) -> None:
    location = lake.archive(lambda row: row["offset"] not in (lake.ends[0] - 3, lake.ends[0] - 5))
    lake.delete()
    found = audited(lake.world, lake.flow, history=location)
    assert (found.drifted, found.folded.records) == (False, len(lake.rows))


def test_the_archive_of_another_topic_of_this_name_is_refused(lake: Lake) -> None:
    world, flow = lake.world, lake.flow
    rows = lake.rows
    lake.rows = [{**row, "value": b"other"} for row in rows]
    location = lake.archive()
    lake.delete()
    with pytest.raises(RunRefusedError, match=r"and Kafka have different records at .*two topics of that name"):
        audited(world, flow, history=location)
    lake.rows = [*rows, {**rows[0], "offset": lake.ends[rows[0]["partition"]]}]
    with pytest.raises(RunRefusedError, match=r"up to offset .* and Kafka's log ends at .*another cluster"):
        lake.rehearsed(lake.archive())
    again = fleet("never-was")
    with pytest.raises(RunRefusedError, match="never-was"):
        called(rehearse, again, again, kafka=world.settings, history=location, work=lake.directory / "work")
    lake.rows = [{**row, "partition": row["partition"] + 5} for row in rows]
    with pytest.raises(RunRefusedError, match="Kafka's log ends at 0"):
        called(plan_replay, flow, **lake.options(history=lake.archive()))
    assert pointer_of(flow, world.stores(flow)) == Pointer()


def test_lookups_find_the_rows_of_then_in_an_archive(world: World, topic: Callable[..., str], tmp_path: Path) -> None:
    table, journal = topic(name="merchants"), topic(name="journal")
    flow = spending(world.topic, table)
    for category in (b"food", b"toys"):
        world.send([Sent(b'{"category": "%s"}' % category, b"m%d" % i) for i in range(4)], table)
        paid = [b'{"card": "c%d", "merchant": "m%d", "cents": 5}' % (i % 3, i % 4) for i in range(20)]
        world.send([Sent(value, b"c%d" % (i % 3), partition=i % 2) for i, value in enumerate(paid)])
        world.run(flow, journal=journal)
    rows = rows_of([*world.records(), *world.records(table)])
    location = write(tmp_path / "lake" / "a.parquet", rows[::-1], group=7)
    delete_before(world, (0, 12), (1, 20))
    delete_before(world, (0, 8), topic=table)
    found = audited(world, flow, journal=journal, history=location)
    assert (found.drifted, found.skipped, found.history.archived) == (False, (), 48)
    assert found.comparison.stages["category"].same == 2
    lacking = write(
        tmp_path / "lake" / "a.parquet", (one for one in rows if one["topic"] != table or one["offset"] != 2)
    )
    with pytest.raises(RunRefusedError, match="lacks offsets 2 of merchants"):
        audited(world, flow, journal=journal, history=lacking)


def test_a_flow_begins_with_an_archive(lake: Lake) -> None:
    location = lake.archive()
    lake.delete()
    new = replace(lake.flow, name="new")
    stores = dict.fromkeys(new.stage_names, f"sqlite:///{lake.directory}/new.db")
    report = called(
        run_local, new, kafka=lake.world.settings, stores=stores, history=location, until_caught_up=True,
        dead_letters=lake.world.dead, group="new",
    )  # fmt: skip
    assert report.records == len(lake.rows)
