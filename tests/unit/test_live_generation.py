"""Commands and runs follow the pointer to the live generation, and no run begins on a generation that is not live."""

from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aggregations.errors import RunRefusedError
from aggregations.run.begin import begin, look
from aggregations.run.binding import bind
from aggregations.run.live import live_generation
from aggregations.run.memory import MemoryRunner
from envelope import TopicPartition
from jobs.backup import restore, snapshot
from jobs.views import states
from persistence.commit.faults import EPOCH, use
from persistence.contract.pointer import At
from persistence.epochs import take_epoch
from persistence.errors import Fenced
from persistence.manifest import Rebuilt
from persistence.names import FlowRef
from persistence.pointer import Pointer, Rebuild, change_pointer, load_pointer
from persistence.registry import open_store
from tests.support.pure import batch, fleet, fresh_store
from tests.support.replays import dies

FLOW = fleet()
NOTE = Rebuilt(1, 7, "ann@host", "a corrected fold")


@pytest.fixture
def urls(tmp_path: Path) -> dict[str, str]:
    """Two stores, so that each has a copy of the pointer."""
    return bind(FLOW, {"aircraft": f"sqlite://{tmp_path}/a.db", "carrier": f"lmdb://{tmp_path}/c"})


def point(urls: dict[str, str], **changed: Any) -> Pointer:
    """Change the pointer in the stores."""
    stores = [open_store(url) for url in dict.fromkeys(urls.values())]
    try:
        before = load_pointer(stores, FLOW.name)
        return change_pointer(stores, FLOW.name, before, msgspec.structs.replace(before, **changed))
    finally:
        for store in stores:
            store.close()


def run(urls: dict[str, str], *offsets: int, generation: int | None = None) -> None:
    with closing(MemoryRunner(FLOW, urls, ends={}, generation=generation)) as one:
        one.process(batch(*offsets))


def aircraft(urls: dict[str, str], generation: int | None = None) -> dict[bytes, Any]:
    return {view.key: view.state["n"] for view in states(FLOW, "aircraft", urls, generation=generation)}


def test_without_a_pointer_generation_1_is_live_and_any_other_may_be_run_by_hand(urls: dict[str, str]) -> None:
    run(urls, 1, 2)
    run(urls, 1, generation=2)
    assert live_generation(FLOW, urls) == 1
    assert aircraft(urls) == aircraft(urls, 1) == {b"N1": 1, b"N2": 1}
    assert aircraft(urls, 2) == {b"N1": 1}


def test_runs_readers_and_snapshots_follow_the_pointer(urls: dict[str, str], tmp_path: Path) -> None:
    run(urls, 1, 2)
    run(urls, 1, generation=2)
    point(urls, live=2, previous=1, newest=2)
    assert live_generation(FLOW, urls) == 2
    assert aircraft(urls) == {b"N1": 1}
    run(urls, 4)
    assert aircraft(urls) == {b"N1": 2}
    assert aircraft(urls, 1) == {b"N1": 1, b"N2": 1}
    with closing(look(FLOW, urls)) as found:
        assert found.ref == FlowRef("fleet", 2)
    assert snapshot(FLOW, tmp_path / "s", stores=urls).generation == 2


@pytest.mark.parametrize(
    ("pointer", "generation", "why"),
    [
        ({"live": 2, "previous": 1, "newest": 2}, 1, "generation 2 is live.*--rollback"),
        ({"live": 2, "newest": 3}, 3, "generation 2 is live"),
        ({"newest": 2, "rebuild": Rebuild(2, 1)}, 2, "rebuilds it.*--apply"),
        (
            {"newest": 2, "rebuild": Rebuild(2, 1), "closing": 1},
            1,
            "--swap` is replacing it.*repeat `headwater replay --swap`",
        ),
        ({"newest": 2, "rebuild": Rebuild(2, 1), "closing": 1}, None, "or keep .* with `headwater replay --rollback`"),
        ({"live": 2, "previous": 1, "newest": 2, "closing": 2}, None, "repeat `headwater replay --rollback`$"),
    ],
)
def test_no_run_begins_on_a_generation_that_is_not_live_and_none_is_fenced(
    urls: dict[str, str], pointer: dict[str, Any], generation: int | None, why: str
) -> None:
    run(urls, 1, 2)
    point(urls, **pointer)
    with closing(open_store(urls["aircraft"])) as store:
        before = [store.installed_epoch(FlowRef("fleet", number)) for number in (1, 2, 3)]
        with pytest.raises(RunRefusedError, match=f"^flow fleet, generation [123]: .*{why}"):
            begin(FLOW, urls, generation=generation)
        assert [store.installed_epoch(FlowRef("fleet", number)) for number in (1, 2, 3)] == before


def test_a_snapshot_beside_an_unfinished_swap_names_the_command_to_repeat(urls: dict[str, str], tmp_path: Path) -> None:
    run(urls, 1, 2)
    begin(FLOW, urls).close()  # does not end cleanly
    point(urls, newest=2, rebuild=Rebuild(2, 1), closing=1)
    with pytest.raises(RunRefusedError, match="repeat `headwater replay --swap`"):
        snapshot(FLOW, tmp_path / "s", stores=urls)


def test_a_generation_above_all_that_the_pointer_knows_may_be_run_by_hand(urls: dict[str, str]) -> None:
    point(urls, live=2, previous=1, newest=2)
    run(urls, 1, generation=3)
    assert aircraft(urls, 3) == {b"N1": 1}


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_swap_between_the_look_at_the_pointer_and_the_epoch_leaves_the_old_generation_as_it_was(
    urls: dict[str, str], nth: int
) -> None:
    run(urls, 1, 2)
    refs = FlowRef("fleet", 1)

    def swap() -> None:
        point(urls, live=2, previous=1, newest=2)
        stores = [open_store(url) for url in dict.fromkeys(urls.values())]
        take_epoch(refs, stores, point=EPOCH)
        for store in stores:
            store.close()

    before = aircraft(urls, 1)
    with use(At(nth, swap)), pytest.raises((RunRefusedError, Fenced)):
        run(urls, 4, 5)
    assert aircraft(urls, 1) == before
    with closing(open_store(urls["carrier"])) as store:
        manifest = store.load_manifest(refs)
    assert manifest is not None
    assert manifest.positions["legs"][0].next_offset == 3


def test_a_rebuild_leaves_a_note_in_its_manifests_and_ends_when_the_pointer_no_longer_names_it(
    urls: dict[str, str],
) -> None:
    run(urls, 1, 2)
    with pytest.raises(RunRefusedError, match="not being rebuilt"):
        MemoryRunner(FLOW, urls, ends={}, generation=2, rebuilt=NOTE)
    point(urls, newest=2, rebuild=Rebuild(2, 1))
    with closing(MemoryRunner(FLOW, urls, ends={}, generation=2, rebuilt=NOTE)) as rebuild:
        rebuild.process(batch(1))
    later = msgspec.structs.replace(NOTE, by="bob@host")
    with closing(MemoryRunner(FLOW, urls, ends={}, generation=2, rebuilt=later)) as rebuild:
        rebuild.process(batch(2))
        assert rebuild.run.rebuilt == NOTE
    for url in urls.values():
        with closing(open_store(url)) as store:
            found = [store.load_manifest(FlowRef("fleet", number)) for number in (1, 2)]
        assert [one.rebuilt for one in found if one] == [None, NOTE]
    assert aircraft(urls) == aircraft(urls, 2)


def test_the_next_run_completes_a_pointer_that_one_store_does_not_have(urls: dict[str, str]) -> None:
    with closing(open_store(urls["aircraft"])) as first, closing(open_store(urls["carrier"])) as second:
        change_pointer([first], "fleet", Pointer(), Pointer(live=2, newest=2))
        assert load_pointer([second], "fleet") == Pointer()
        assert live_generation(FLOW, urls) == 2
        run(urls, 1)
        assert load_pointer([second], "fleet") == load_pointer([first], "fleet")


def test_a_snapshot_is_not_restored_into_a_generation_that_is_not_live(urls: dict[str, str], tmp_path: Path) -> None:
    run(urls, 1, 2)
    snapshot(FLOW, tmp_path / "s", stores=urls)
    target = bind(FLOW, {}, fresh_store())
    point(target, live=2, previous=1, newest=2)
    with pytest.raises(RunRefusedError, match="generation 2 is live"):
        restore(FLOW, tmp_path / "s", stores=target)


def test_a_snapshot_of_another_generation_is_live_where_it_is_restored(urls: dict[str, str], tmp_path: Path) -> None:
    run(urls, 1, 2, generation=3)
    point(urls, live=3, previous=1, newest=3)
    snapshot(FLOW, tmp_path / "s", stores=urls)
    for nth in range(1, 30):
        target = bind(FLOW, {"aircraft": fresh_store(), "carrier": fresh_store()})
        if not dies(lambda target=target: restore(FLOW, tmp_path / "s", stores=target), nth, applied=True):
            break
        with suppress(RunRefusedError):  # it was complete
            restore(FLOW, tmp_path / "s", stores=target)
        assert live_generation(FLOW, target) == 3
    assert nth > 8
    run(target, 4)
    with closing(look(FLOW, target)) as found:
        assert (found.ref.generation, found.start[TopicPartition("legs", 0)]) == (3, 5)


def test_a_snapshot_that_is_restored_beside_another_generation_does_not_replace_it(
    urls: dict[str, str], tmp_path: Path
) -> None:
    run(urls, 1, 2, generation=2)
    snapshot(FLOW, tmp_path / "s", stores=urls, generation=2)
    target = bind(FLOW, {}, f"sqlite://{tmp_path}/target.db")
    run(target, 1)
    restore(FLOW, tmp_path / "s", stores=target)
    assert live_generation(FLOW, target) == 1
    run(target, 4)
    assert aircraft(target) == {b"N1": 2}
    assert aircraft(target, 2) == {b"N1": 1, b"N2": 1}


def test_a_generation_that_is_run_by_hand_goes_on_beside_a_restored_snapshot(
    urls: dict[str, str], tmp_path: Path
) -> None:
    run(urls, 1, 2, generation=3)
    snapshot(FLOW, tmp_path / "s", stores=urls, generation=3)
    target = bind(FLOW, {}, f"sqlite://{tmp_path}/target.db")
    run(target, 1, generation=2)
    restore(FLOW, tmp_path / "s", stores=target)
    run(target, 4, generation=2)
    assert aircraft(target, 2) == {b"N1": 2}
    assert live_generation(FLOW, target) == 3


def test_a_generation_below_1_is_refused(urls: dict[str, str]) -> None:
    for number in (0, -1):
        with pytest.raises(ValueError, match="count from 1"):
            look(FLOW, urls, generation=number)
        with pytest.raises(ValueError, match="count from 1"):
            states(FLOW, "aircraft", urls, generation=number)
