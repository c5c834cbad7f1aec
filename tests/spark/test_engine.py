"""The Spark engine gives the results of the in-memory runner, for any replay and any division into batches."""

import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path as File

import pytest

from aggregations.definition.flow import Flow
from aggregations.definition.payloads import Json
from aggregations.definition.source import Topic
from aggregations.errors import RunRefusedError
from envelope import Verdict, decode
from tests.messages import Leg
from tests.support.flows import PATHS, Path, fleet, totals
from tests.support.world import Sent, World, alone, legs, republished, verdicts

pytestmark = [pytest.mark.spark, pytest.mark.integration]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stages", [1, 2])
def test_states_verdicts_and_dead_letters_are_those_of_the_oracle(world: World, path: Path, stages: int) -> None:
    sent = legs(200)
    world.send(alone(leg) for leg in [*sent, Leg(tail="N1", carrier="AA", minutes=-5), Leg(carrier="AA", minutes=5)])
    flow = fleet(world.topic, path, stages=stages)
    report = world.run(flow)
    oracle = world.check(flow)
    assert world.results(flow, "aircraft") == totals(sent, "tail")
    assert verdicts(report) == verdicts(oracle.report)
    assert (report.records, report.filtered) == (202, oracle.report.filtered)
    assert report.reasons == {"diverted": 1, "null_key": 1}


@pytest.mark.parametrize("path", PATHS)
def test_what_a_republisher_sends_again_is_folded_once(world: World, path: Path) -> None:
    sent = legs(180)
    world.send(republished(sent, range(120)))
    world.send(republished(sent, range(70, 150)))
    world.send(republished(sent, range(100, 180)))
    flow = fleet(world.topic, path)
    report = world.run(flow, max_records=90)
    assert report.batches > 2
    world.send(republished(sent))
    again = world.run(flow)
    assert world.results(flow, "aircraft") == totals(sent, "tail")
    assert world.results(flow, "carrier") == totals(sent, "carrier")
    assert set(verdicts(again)["aircraft"]) == {Verdict.DUPLICATE}
    assert "carrier" not in verdicts(again)
    world.check(flow)


@pytest.mark.parametrize("path", PATHS)
def test_batches_that_are_replayed_with_other_borders_change_nothing(world: World, path: Path) -> None:
    sent = legs(160)
    world.send(republished(sent, [*range(100), *range(60, 160)]))
    flow = fleet(world.topic, path)
    manifests: list[bytes] = []
    world.run(flow, max_records=45, progress=lambda _: manifests.append(world.manifest(flow)))
    before = world.untimed(flow)
    world.restore(flow, manifests[0])
    replay = world.run(flow, max_records=70)
    assert replay.records > 100
    assert set(verdicts(replay)["aircraft"]) == {Verdict.DUPLICATE}
    assert world.untimed(flow) == before
    world.check(flow)
    assert world.results(flow, "carrier") == totals(sent, "carrier")


@pytest.mark.parametrize("path", PATHS)
def test_one_run_goes_on_where_the_last_one_ended_though_nothing_is_left_of_it_but_its_states(
    world: World, path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: File
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    sent, flow = legs(150), fleet(world.topic, path)
    read = []
    for start, most in ((0, 40), (50, None), (100, 17)):
        world.send(alone(leg) for leg in sent[start : start + 50])
        read.append(world.run(flow, max_records=most).records)
        assert not list((tmp_path / "temporary").iterdir())
    assert read == [50, 50, 50]
    assert world.run(flow).records == 0
    world.check(flow)
    assert world.results(flow, "aircraft") == totals(sent, "tail")


@pytest.mark.parametrize("path", PATHS)
def test_a_store_that_was_restored_from_an_older_copy_is_filled_again(world: World, path: Path, tmp_path: File) -> None:
    world.apart = True
    sent, flow = legs(120), fleet(world.topic, path)
    world.send(republished(sent, range(60)))
    world.run(flow)
    with closing(sqlite3.connect(tmp_path / "aircraft.db")) as live, closing(sqlite3.connect(":memory:")) as copy:
        live.backup(copy)
        world.send(republished(sent, range(60, 120)))
        world.run(flow)
        copy.backup(live)
    report = world.run(flow)
    assert set(verdicts(report)["carrier"]) == {Verdict.DUPLICATE}
    world.check(flow)
    assert world.results(flow, "aircraft") == totals(sent, "tail")


def test_a_downstream_store_that_is_behind_is_refused_with_the_remedy(world: World) -> None:
    world.apart = True
    sent, flow = legs(60), fleet(world.topic)
    world.send(republished(sent, range(30)))
    world.run(flow)
    older = world.manifest(flow, "carrier")
    world.send(republished(sent, range(30, 60)))
    world.run(flow)
    world.restore(flow, older, "carrier")
    with pytest.raises(RunRefusedError, match=f"carrier is behind.*{world.topic}:0.*--accept downstream-behind"):
        world.run(flow)


@pytest.mark.parametrize("path", PATHS)
def test_a_topic_that_is_not_partitioned_by_the_stages_key_is_shuffled_first(world: World, path: Path) -> None:
    sent = legs(120)
    world.send(one for i in range(120) for one in republished(sent, [i], partition=i % 2))
    world.send(republished(sent, range(40, 90), partition=1))
    flow = fleet(world.topic, path, co_partitioned=False)
    world.run(flow, max_records=50)
    world.check(flow)
    assert world.results(flow, "aircraft") == totals(sent, "tail")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stages", [1, 2])
def test_tasks_that_share_a_key_conflict_and_resolve(world: World, path: Path, stages: int) -> None:
    sent = legs(80, tails=1)
    world.send(one for i in range(80) for one in republished(sent, [i], partition=i % 2))
    flow = fleet(world.topic, path, stages=stages)
    world.run(flow)
    world.check(flow)
    assert world.results(flow, "aircraft") == totals(sent, "tail")


@pytest.mark.parametrize("path", PATHS)
def test_a_failure_in_the_second_stage_leaves_the_first_as_it_is(world: World, path: Path) -> None:
    good = legs(40)
    most = Leg(tail="N100", carrier="AA", minutes=2**63 - 1)
    world.send(alone(leg) for leg in good[:20])
    world.send([alone(most)])
    world.send(alone(leg) for leg in good[20:])
    flow = fleet(world.topic, path)
    report = world.run(flow)
    world.check(flow)
    assert report.reasons == {"overflow": 1}
    assert world.results(flow, "carrier") == totals(good, "carrier")
    assert world.results(flow, "aircraft") == totals([*good, most], "tail")
    [(letter, _)] = world.dead_letters()
    assert letter.stage == "carrier"


@pytest.mark.parametrize("path", PATHS)
def test_a_topic_of_bare_json_is_its_own_root(world: World, path: Path) -> None:
    sent = legs(60)
    columns = {"tail": str, "carrier": str, "minutes": int}
    world.send(
        Sent(f'{{"tail": "{leg.tail}", "carrier": "{leg.carrier}", "minutes": {leg.minutes}}}'.encode(), b"k")
        for leg in sent
    )
    flow = fleet(Topic(world.topic, Json(columns), envelope=False), path, co_partitioned=False)
    world.run(flow, max_records=25)
    world.check(flow)
    assert world.results(flow, "carrier") == totals(sent, "carrier")


def test_what_a_flow_publishes_carries_its_chain_and_leaves_duplicates_out(
    world: World, topic: Callable[..., str]
) -> None:
    sent, out = legs(60), topic(name="out")
    world.send(republished(sent, [*range(40), *range(20, 60)]))
    flow: Flow = fleet(world.topic).publish(out, key="carrier")
    report = world.run(flow)
    oracle = world.check(flow)
    produced = [(out, record.key, record.value) for record in world.records(out)]
    assert sorted(produced) == sorted((one.topic, one.key, one.value) for one in oracle.outputs)
    assert report.outputs == len(produced) == sum(leg.minutes != 0 for leg in sent)
    chain = decode(world.records(out)[0].value).chain
    assert [(hop.topic, hop.via) for hop in chain] == [("raw", "kit"), (world.topic, "fleet")]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("seed", [1, 2])
def test_anything_at_once_is_exact(world: World, path: Path, seed: int) -> None:
    rng = random.Random(seed)
    sent, flow = legs(300, seed=seed, tails=5), fleet(world.topic, path)
    manifests: list[bytes] = []
    done = 0
    while done < len(sent):
        ahead = min(done + rng.randrange(30, 90), len(sent))
        for via in ("blue", "green") if seed == 2 else ("blue",):
            back = max(0, done - rng.randrange(25))
            world.send(republished(sent, range(back, ahead), via=via))
        done = ahead
        world.send([Sent(rng.randbytes(9), b"N1"), alone(Leg(tail="N1", carrier="AA", minutes=-1))])
        world.run(flow, max_records=rng.choice([None, 20, 60]))
        manifests.append(world.manifest(flow))
        if rng.random() < 0.5:
            world.restore(flow, rng.choice(manifests))
    world.run(flow)
    world.check(flow)
