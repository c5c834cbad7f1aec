"""What needs the states of one moment sees none from before a mend beside others from after it."""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from aggregations.errors import RunRefusedError
from aggregations.run.begin import look
from aggregations.run.border import check_border, check_unchanged
from aggregations.run.run import Run
from jobs.backup import snapshot
from persistence.commit.faults import use
from persistence.manifest import Manifest
from tests.support.mends import Site, same_as_its_log
from tests.support.pure import batch
from tests.support.replays import Crash, CrashAt
from tests.unit.test_mend_crashes import KEYS, STAGES, dead, spoiled

T = TypeVar("T")
Seen = dict[bytes, bytes]


def reading(site: Site, stage: str) -> Iterator[None]:
    """Read the states of a stage as an audit and a snapshot do, key by key; return them."""
    found: Seen = {}
    with closing(look(site.flow, site.urls)) as run:
        check_border(run, "read")
        for key in (*KEYS, b"N2"):
            yield
            found |= {at: one.value for at, one in run.stores[stage].load(run.ref.stage(stage), [key]).items()}
        yield
        check_unchanged(run, "read")
    return found


class Readers:
    """At each effect another reader of each pace begins, and those that have begun read on."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.seen: list[Seen] = []
        self.refused: list[str] = []
        self._open: list[tuple[int, Iterator[None]]] = []

    def effect(self, _point: str, action: Callable[[], T]) -> T:
        self._open += [(pace, reading(self.site, "aircraft")) for pace in (1, 2, 3, 9)]
        self.go_on()
        return action()

    def go_on(self) -> None:
        self._open = [one for one in self._open if self._goes_on(*one)]

    def _goes_on(self, pace: int, reader: Iterator[None]) -> bool:
        try:
            for _ in range(pace):
                next(reader)
        except StopIteration as end:
            self.seen.append(end.value)
            return False
        except RunRefusedError as refused:
            self.refused.append(str(refused))
            return False
        return True

    def finish(self) -> None:
        while self._open:
            self.go_on()


def states(site: Site) -> Seen:
    with closing(look(site.flow, site.urls)) as run:
        return {key: one.value for key, one in run.stores["aircraft"].scan(run.ref.stage("aircraft"))}


def watched_mend(directory: Path, *, apart: bool) -> list[str]:
    """Mend while many read; return what those were told that were refused."""
    site = spoiled(directory, apart=apart)
    before = states(site)
    readers = Readers(site)
    with use(readers):
        site.mend("aircraft", *KEYS)
    readers.finish()
    after = states(site)
    assert before != after
    assert all(one in (before, after) for one in readers.seen)
    assert before in readers.seen
    return readers.refused


@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
def test_whoever_reads_while_states_are_mended_sees_all_or_none_of_the_mended_ones(tmp_path: Path, apart: bool) -> None:
    refused = watched_mend(tmp_path / "site", apart=apart)
    assert any("are being mended" in one for one in refused)
    assert any("a run began meanwhile, or a mend" in one for one in refused)


def test_a_mend_that_leaves_no_note_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = Run.save_everywhere

    def without_note(run: Run, manifest: Manifest, *point: str, **options: Any) -> None:
        save(run, msgspec.structs.replace(manifest, mending=False), *point, **options)

    monkeypatch.setattr(Run, "save_everywhere", without_note)
    with pytest.raises(AssertionError):
        watched_mend(tmp_path / "site", apart=False)


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
def test_after_a_mend_that_died_nothing_is_saved_before_it_is_repeated_or_a_run_ends(
    tmp_path: Path, apart: bool, applied: bool
) -> None:
    counts = {"saved": 0, "refused": 0}
    for number, site in enumerate(dead(lambda at: spoiled(at, apart=apart), KEYS, tmp_path, applied=applied)):
        file = site.directory / "file"
        try:
            snapshot(site.flow, file, stores=site.urls)
            counts["saved"] += 1
        except RunRefusedError:
            counts["refused"] += 1
        if number % 2:
            site.run(batch(20))
        site.mend("aircraft", *KEYS)
        snapshot(site.flow, file, stores=site.urls, replace=True)
        same_as_its_log(site, STAGES)
    assert min(counts.values()) > 0


def test_the_note_goes_with_a_repeated_mend_that_finds_nothing_to_do_and_with_a_run_that_reads_nothing(
    tmp_path: Path,
) -> None:
    for repeated in (False, True):
        site = spoiled(tmp_path / f"{repeated}", apart=False)
        trial = spoiled(tmp_path / f"trial {repeated}", apart=False)
        with use(CrashAt(0, applied=False)) as counted:
            trial.mend("aircraft", *KEYS)
        with pytest.raises(Crash), use(CrashAt(counted.reached, applied=False)):
            site.mend("aircraft", *KEYS)  # all but the last manifest
        with pytest.raises(RunRefusedError, match="states are being mended, or this was interrupted"):
            snapshot(site.flow, site.directory / "file", stores=site.urls)
        if repeated:
            assert site.mend("aircraft", *KEYS) == {}
        else:
            site.run()
        snapshot(site.flow, site.directory / "file", stores=site.urls)
        assert [one.what for one in site.pointer().changes] == ["mend"]
