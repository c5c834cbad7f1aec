"""A flow whose generations are rebuilt and swapped, on a log in memory, with runs and commands that die at any effect."""

import socket
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

import polars as pl

from aggregations.definition.aggregates import count as number_of
from aggregations.definition.aggregates import total
from aggregations.definition.element import Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.engine.held import forget_held
from aggregations.errors import RunRefusedError
from aggregations.report import Report
from aggregations.run.binding import bind
from aggregations.run.held_outputs import HELD_OUTPUTS, held_outputs
from aggregations.run.memory import MemoryRunner
from aggregations.run.results import results_of
from aggregations.run.states import state_of
from envelope import TopicPartition, decode
from jobs.backup import snapshot
from jobs.comparing import Comparison
from jobs.replaying.author import Author
from jobs.replaying.beginning import beginning_of, fill_from_snapshot
from jobs.replaying.dropping import drop_generation
from jobs.replaying.generations import Generations, begin_rebuild, generations_of, reopen, roll_back
from jobs.replaying.leaving import drop_letters
from jobs.replaying.results import Differences, Swapped
from jobs.replaying.swapping import at_work, swap_rebuild
from jobs.snapshot_places import Place
from persistence.commit.faults import HELD, effect, use
from persistence.errors import Fenced, Terminal
from persistence.manifest import Rebuilt
from persistence.pointer import Pointer
from tests.support.pure import bare, batch, fresh_store

T = TypeVar("T")
_pids = count(4_194_305)
"""Process ids above the highest that Linux gives: these processes have ended."""


class Crash(BaseException):
    """The process dies."""


class CrashAt:
    """Lets the process die at the `nth` effect, before or after it."""

    def __init__(self, nth: int, *, applied: bool) -> None:
        self._nth = nth
        self._applied = applied
        self.reached = 0
        self.points: list[str] = []

    def effect(self, point: str, action: Callable[[], T]) -> T:
        self.reached += 1
        self.points.append(point)
        if self.reached != self._nth:
            return action()
        if self._applied:
            action()
        raise Crash


def fleet_of(*, out: str = "legs.out", **fields: Any) -> Flow[Any]:
    """Two stages; `fields` are added to what the first one keeps. Each element is published at the end."""
    return (
        Flow("fleet")
        .source(bare())
        .filter(pl.col("minutes") > 0)
        .aggregate("aircraft", "tail", Fields(n=number_of(), m=total("minutes"), **fields))
        .aggregate("carrier", "carrier", Fields(n=number_of(), m=total("minutes")))
        .publish(out)
    )


OLD, NEW = fleet_of(), fleet_of(late=number_of("late"), out="legs.late")


@dataclass(slots=True)
class Land:
    """A log, stores, and the runs and commands on them.

    Attributes:
        urls: URL of the store by stage name.
        code: Definition of the flow by generation.
        length: Records in the log: offsets 0 to this.
        published: Offset of each output that left, in order.
        sent: Offset of each output that a swap sent, in order, by generation.
        holds: Rebuilds hold their outputs.
        begins: The offset after each snapshot, by its checksum.
        run: The open run of the live generation; None if there is none.
        stale: Runs that were not closed: frozen processes that may wake up at any time.
    """

    urls: dict[str, str]
    code: dict[int, Flow[Any]] = field(default_factory=lambda: {1: OLD})
    length: int = 0
    published: list[int] = field(default_factory=list)
    sent: dict[int, list[int]] = field(default_factory=dict)
    holds: bool = False
    begins: dict[str, int] = field(default_factory=dict)
    run: MemoryRunner | None = None
    stale: list[MemoryRunner] = field(default_factory=list)

    @classmethod
    def on(cls, *, apart: bool, length: int = 0) -> "Land":
        """On memory stores, one for each stage or one for both."""
        one = fresh_store()
        return cls({"aircraft": one, "carrier": fresh_store() if apart else one}, length=length)

    def records(self, first: int, last: int) -> list[Record]:
        return batch(*range(first, last))

    def pointer(self) -> Pointer:
        with generations_of(OLD, self.urls) as found:
            return found.pointer()

    def know(self) -> None:
        """Learn the code of a rebuild whose command died."""
        rebuild = self.pointer().rebuild
        if rebuild is not None:
            self.code.setdefault(rebuild.generation, NEW if rebuild.redefined else OLD)

    def position(self, generation: int) -> int:
        with generations_of(OLD, self.urls) as found:
            return found.positions(generation).get(TopicPartition("legs", 0), 0)

    def start(self) -> None:
        """Start a run of the live generation; one that is open becomes a frozen process."""
        if self.run is not None:
            self.stale.append(self.run)
            self.run = None
        self.run = MemoryRunner(
            self.code[self.pointer().live], self.urls, ends={TopicPartition("legs", 0): self.length}
        )

    def go_on(self, records: int) -> None:
        """Let the run of the live generation fold the next records. If it is refused or fenced, there is no run."""
        try:
            if self.run is None:
                self.start()
            assert self.run is not None
            if self.fold(self.run, records):
                assert self.run.run.ref.generation == self.pointer().live, (
                    "a run wrote into a generation that is not live"
                )
        except (Fenced, RunRefusedError):
            self.run = None

    def fold(self, run: MemoryRunner, records: int) -> bool:
        """Fold the next records, and note what leaves, also if the batch fails afterwards; return whether there were any."""
        first = run.run.start.get(TopicPartition("legs", 0), 0)
        last = min(first + records, self.length)
        if first < last:
            before = len(run.outputs)
            try:
                run.process(self.records(first, last))
            finally:
                self.published += [one.own.offset for one in run.outputs[before:] if one.own is not None]
        return first < last

    def wake(self, number: int, records: int) -> bool:
        """Let a frozen run go on; return whether it could still write."""
        run = self.stale[number % len(self.stale)]
        try:
            self.fold(run, records)
        except (Fenced, Terminal):  # the generation may have been dropped
            return False
        return True

    def results(self, generation: int) -> dict[str, dict[bytes, Any]]:
        """The results of a generation, by stage and key."""
        flow = self.code[generation]
        with generations_of(flow, self.urls) as found:
            return {
                stage.name: {
                    key: results_of(stage.aggregate, key, state_of(stored, ref, key).fold)[0].state
                    for key, stored in found.run.stores[stage.name].scan(ref)
                }
                for stage in flow.stages
                for ref in [found.ref(generation).stage(stage.name)]
            }

    def expected(self, generation: int, length: int) -> dict[str, dict[bytes, Any]]:
        """The same from a fold of the beginning of the log into empty stores."""
        with closing(MemoryRunner(self.code[generation], bind(OLD, {}, fresh_store()), ends={})) as oracle:
            oracle.process(self.records(0, length))
            return {stage: oracle.results(stage) for stage in ("aircraft", "carrier")}

    def save(self, file: Place) -> None:
        """Save the states of the live generation in a file, after the end of its run."""
        if self.run is not None:
            self.run.close()
            self.run = None
        saved = snapshot(self.code[self.pointer().live], file, stores=self.urls, replace=True)
        self.begins[saved.checksum] = saved.positions.get("legs", {}).get(0, 0)

    def rebuild(
        self,
        code: Flow[Any],
        *,
        size: int = 2,
        meanwhile: Callable[[], object] = lambda: None,
        file: Place | None = None,
    ) -> int:
        """Rebuild with this code, as `jobs.replay.rebuild` does, in a new process; return the generation."""
        author = author_of("rebuild")
        with generations_of(code, self.urls) as found:
            begins = beginning_of(found, found.pointer(), found.pointer().live, file)
            pointer, note = begin_rebuild(
                *(found, author),
                live=1,
                redefined=code is NEW,
                origin=begins.origin if begins else None,
                outputs=self.holds or None,
            )
            assert pointer.rebuild is not None
            self.code[pointer.rebuild.generation] = code
            with at_work(found, author):
                MemoryFolding(self, size, meanwhile, file).fold(found, pointer, note)
            return pointer.rebuild.generation

    def swap(self, *, size: int = 2, agreed: bool = True, meanwhile: Callable[[], object] = lambda: None) -> Swapped:
        """Swap, as `jobs.replay.swap` does, in a new process."""
        author, outside = author_of("swap"), MemoryFolding(self, size, meanwhile)
        rebuild = self.pointer().rebuild
        if rebuild is None:
            raise RunRefusedError("no generation is being rebuilt")
        with generations_of(self.code[rebuild.generation], self.urls) as found:
            pointer, note = begin_rebuild(found, author, live=1, redefined=False)
            with at_work(found, author):
                done = swap_rebuild(
                    found, author, pointer, note, outside, compare=self.compare, agreed=lambda _: agreed
                )
            if done.done and rebuild.outputs:
                first = 1 if rebuild.origin is None else self.begins[rebuild.origin.checksum]
                assert {*self.sent[done.live]} == {*range(max(first, 1), self.position(done.live))}
            return done

    def compare(self, old: int, new: int) -> Differences:
        """Check that both have folded the same records, all of those that the old one has committed."""
        assert self.position(old) == self.position(new)
        assert self.results(new) == self.expected(new, self.position(new))
        return Differences(Comparison({}))

    def drop(self, generation: int) -> Pointer:
        """Drop a generation, as `jobs.replay.drop` does, in a new process."""
        with generations_of(OLD, self.urls) as found:
            return drop_generation(found, author_of("drop"), generation, live=1, accept=["no-rollback"], take_over=True)

    def roll_back(self) -> Pointer:
        """Roll back, or keep the live generation after an interrupted swap, as `jobs.replay.rollback` does."""
        author = author_of("rollback")
        with generations_of(OLD, self.urls) as found:
            pointer = found.settled()
            if pointer.rebuild is not None:
                return reopen(found, author, pointer) if pointer.closing else pointer
            return roll_back(found, author)


@dataclass(frozen=True, slots=True)
class MemoryFolding:
    """Folds a rebuild in memory; `meanwhile` is called between any two of its batches."""

    land: Land
    size: int
    meanwhile: Callable[[], object]
    snapshot: Place | None = None

    def fold(self, found: Generations, pointer: Pointer, note: Rebuilt) -> Report:
        assert pointer.rebuild is not None
        generation, place = pointer.rebuild.generation, TopicPartition("legs", 0)
        fill_from_snapshot(found, pointer.rebuild, note, self.snapshot)
        run = MemoryRunner(
            *(found.flow, self.land.urls),
            ends={place: self.land.length},
            generation=generation,
            rebuilt=note,
            holds=pointer.rebuild.outputs,
        )
        until = self.until(found, pointer)
        while (first := run.run.start.get(place, 0)) < until:
            run.process(self.land.records(first, min(first + self.size, until)))
            self.meanwhile()
        run.close()
        return run.report

    def until(self, found: Generations, pointer: Pointer) -> int:
        """The offset up to which the rebuild reads: where the live generation is."""
        return found.positions(pointer.live).get(TopicPartition("legs", 0), 0)

    def send_letters(self, found: Generations, generation: int) -> int:
        self.meanwhile()
        return 0

    def drop_letters(self, found: Generations, generation: int, note: Rebuilt) -> int:
        return drop_letters(found, generation, note)

    def send_outputs(self, found: Generations, generation: int) -> int:
        """Note the outputs that were held, as `send_outputs` sends them."""
        ref, store = found.ref(generation), found.stores[0]
        outputs = effect(HELD, lambda: [*held_outputs(store, ref)])
        self.land.sent.setdefault(generation, []).extend(decode(one.value).chain[-1].offset for one in outputs)
        self.meanwhile()
        effect(HELD, lambda: forget_held(store, ref.stage(HELD_OUTPUTS), epoch=store.installed_epoch(ref)))
        return len(outputs)

    def send_states(self, found: Generations, generation: int, before: int) -> int:
        self.meanwhile()
        return 0

    def unread_growths(self, found: Generations, generation: int) -> list[str]:
        return []

    def stopped(self) -> bool:
        return False


def author_of(why: str) -> Author:
    """A process that does not exist any more when another one asks."""
    host = socket.gethostname()
    return Author(f"ann@{host}", why, f"{host}/{next(_pids)}")


def dies(action: Callable[[], object], nth: int, *, applied: bool) -> bool:
    """Run a command that dies at its `nth` effect; return whether it did."""
    with use(CrashAt(nth, applied=applied)):
        try:
            action()
        except Crash:
            return True
    return False
