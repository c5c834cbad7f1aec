"""A flow whose states are spoiled and mended, on a log in memory, with runs and commands that die at any effect."""

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from aggregations.definition.element import Record
from aggregations.definition.flow import Flow
from aggregations.report import DeadLetter
from aggregations.run.begin import look
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from aggregations.run.mend import Mending, check_can_mend
from aggregations.run.snapshots import Latest, MendedSnapshot, read_snapshot
from envelope import Histories, TopicPartition
from jobs.mending import MENDS, Sides, apply_mends
from persistence.commit.faults import MEND, NoFaults, effect, use
from persistence.pointer import Pointer, load_pointer
from persistence.protocol import FlowRef, Write
from persistence.record import StateRecord, decode_record, encode_record
from persistence.registry import open_store
from tests.support.pure import fresh_store


@dataclass(slots=True)
class Site:
    """A flow with its states in files, and the log that it has read.

    Attributes:
        flow: The flow.
        directory: Where the files are.
        apart: Each stage has a file of its own.
        stores: URL of the store by stage name, where states are not in files.
        log: The records that were read, in order.
        outputs: What left, in order.
        dead: The dead letters, in order.
    """

    flow: Flow[Any]
    directory: Path
    apart: bool = False
    log: list[Record] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    dead: list[DeadLetter] = field(default_factory=list)
    stores: Mapping[str, str] = field(default_factory=dict)

    @property
    def urls(self) -> dict[str, str]:
        if self.stores:
            return bind(self.flow, self.stores)
        names = {stage: stage if self.apart else "states" for stage in self.flow.stage_names}
        return bind(
            self.flow,
            {stage: f"sqlite:///{self.directory}/{name}.db?synchronous=off" for stage, name in names.items()},
        )

    def runner(self, urls: Mapping[str, str] | None = None) -> MemoryRunner:
        ends = {TopicPartition(one.topic, one.partition): one.offset + 1 for one in self.log}
        return MemoryRunner(self.flow, urls or self.urls, ends=ends)

    def run(self, records: Iterable[Record] = (), size: int = 5) -> MemoryRunner:
        """Read further records in a run that ends cleanly; return it."""
        new = list(records)
        with closing(self.runner()) as run:
            self.log += new
            for first in range(0, len(new), size):
                run.process(new[first : first + size])
            self.outputs += run.outputs
            self.dead += run.dead_letters
        return run

    def spoil(
        self, stage: str, key: bytes, histories: Histories | None = None, *, fold: Any = None, **changed: Any
    ) -> None:
        """Replace a state, or fields of it, as an error would."""
        ref = FlowRef(self.flow.name, 1).stage(stage)
        with closing(open_store(self.urls[stage])) as store:
            stored = store.load(ref, [key]).get(key)
            if stored is None:
                record, version = StateRecord(self.flow.stage(stage).definition, {}, histories or Histories()), 0
            else:
                record, version = decode_record(stored.value, ref, key), stored.version
            state = {**(record.state or {}), **changed} if isinstance(record.state, dict | None) else fold
            new = msgspec.structs.replace(record, state=state, histories=histories or record.histories)
            epoch = store.installed_epoch(ref.flow_ref)
            store.save(ref, [Write(key, version, encode_record(new))], epoch=epoch, batch=1_000_000)

    def lose(self, stage: str, key: bytes) -> None:
        """Remove a state from its file."""
        path = self.urls[stage].removeprefix("sqlite://").partition("?")[0]
        with closing(sqlite3.connect(path)) as connection, connection:
            gone = connection.execute(
                "DELETE FROM state WHERE key = ? AND stage IN (SELECT id FROM stage WHERE name = ?)", (key, stage)
            )
            assert gone.rowcount == 1

    def mend(
        self, stage: str, *keys: bytes, apply: bool = True, why: str = "a test", size: int = 7
    ) -> dict[bytes, Mending]:
        """Mend, as `jobs.mending.mend` does, with the log instead of Kafka."""
        chosen = self.flow.stage(stage)
        with closing(look(self.flow, self.urls)) as run:
            check_can_mend(run, MENDS)
            with use(NoFaults()), closing(self.fold(size)) as folded:
                found = Sides.of(run, folded.run, folded.report, chosen, keys)
            mends = found.mends(run.batch)
            if apply:
                apply_mends(run, chosen, mends, why=why, publish=self._publish)
            return {one.key: one.mending for one in mends}

    def _publish(self, messages: Sequence[MendedSnapshot]) -> None:
        effect(MEND, lambda: self.outputs.extend(messages))

    def fold(self, size: int = 7) -> MemoryRunner:
        """A fold of the whole log into stores of its own."""
        urls = bind(self.flow, {}, fresh_store())
        run = self.runner(urls)
        for first in range(0, len(self.log), size):
            run.process(self.log[first : first + size])
        return run

    def results(self, stage: str) -> dict[bytes, Any]:
        with closing(self.runner()) as run:
            return run.results(stage)

    def held(self, stage: str) -> dict[bytes, Histories]:
        """The positions of each key, without the batches that last used them, and without keys that have none."""
        with closing(self.runner()) as run:
            return held(run, stage)

    def pointer(self) -> Pointer:
        stores = [open_store(url) for url in dict.fromkeys(self.urls.values())]
        try:
            return load_pointer(stores, self.flow.name)
        finally:
            for store in stores:
                store.close()


def held(run: MemoryRunner, stage: str) -> dict[bytes, Histories]:
    """The positions of each key of a run, as `Site.held`."""
    return {
        key: Histories(
            {lane: replace(one, used=0) for lane, one in state.histories.lanes.items()}, state.histories.holes
        )
        for key, state in run.states(stage).items()
        if state.histories.lanes or state.histories.holes
    }


def same_as_its_log(site: Site, stages: Sequence[str]) -> None:
    """Assert that the states are those of a fold of the log, results and positions."""
    with closing(site.fold()) as truth:
        for stage in stages:
            assert site.results(stage) == truth.results(stage)
            assert site.held(stage) == held(truth, stage)


def seen_by_readers(outputs: Iterable[Any]) -> dict[bytes, Any]:
    """The states that a reader of published states has in the end."""
    latest = Latest()
    for one in outputs:
        if one.value is None:
            latest.forget(one.key)
        else:
            latest.apply(one.key, read_snapshot(one.value))
    return {key: one.state for key, one in latest}
