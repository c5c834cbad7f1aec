"""Stores with one planted bug each: the contract suite must find every one of them."""

import os
import subprocess
import sys
import time
import uuid
from collections import Counter
from itertools import islice
from xml.etree import ElementTree as ET

import pytest

from persistence.cas import check_epoch, resolve
from persistence.errors import Conflict, StoreWentBack
from persistence.marks import NONE, Bucket, Mark, check_held
from persistence.memory import MemoryStore
from persistence.protocol import Stored, Write


class IgnoresEpochs(MemoryStore):
    def save(self, stage, writes, *, epoch, batch, **options):
        return super().save(stage, writes, epoch=max(self.installed_epoch(stage.flow_ref), 1), batch=batch, **options)


class TrustsUnknownEpochs(MemoryStore):
    def save(self, stage, writes, *, epoch, batch, **options):
        self._epochs[stage.flow_ref] = max(epoch, self.installed_epoch(stage.flow_ref))
        return super().save(stage, writes, epoch=epoch, batch=batch, **options)


class RefusesRetries(MemoryStore):
    def save(self, stage, writes, *, epoch, batch, **options):
        held = self.load(stage, [write.key for write in writes])
        if changed := tuple(w.key for w in writes if w.expected != (held[w.key].version if w.key in held else 0)):
            raise Conflict(changed, stage)
        return super().save(stage, writes, epoch=epoch, batch=batch, **options)


class TakesAnyValueForARetry(MemoryStore):
    def save(self, stage, writes, *, epoch, batch, **options):
        held = self.load(stage, [write.key for write in writes])
        todo = [w for w in writes if not (w.key in held and held[w.key].version == w.expected + 1)]
        return super().save(stage, todo, epoch=epoch, batch=batch, **options)


class AppliesPartOfACall(MemoryStore):
    def save(self, stage, writes, *, epoch, batch, **options):
        if len(writes) == len({write.key for write in writes}):
            for write in writes[:-1]:
                super().save(stage, [write], epoch=epoch, batch=batch, **options)
            writes = writes[-1:]
        return super().save(stage, writes, epoch=epoch, batch=batch, **options)


class NamesOnlyTheFirstConflict(MemoryStore):
    def save(self, stage, writes, *, epoch, batch, **options):
        try:
            return super().save(stage, writes, epoch=epoch, batch=batch, **options)
        except Conflict as error:
            raise Conflict(error.keys[:1], stage) from None


class TakesMissingForVersionZero(MemoryStore):
    def save(self, stage, writes, *, epoch, batch, **options):
        held = self.load(stage, [write.key for write in writes])
        return super().save(
            stage,
            [w if w.key in held else Write(w.key, 0, w.value) for w in writes],
            epoch=epoch,
            batch=batch,
            **options,
        )


class MixesGenerations(MemoryStore):
    def load(self, stage, keys):
        return super().load(stage.flow_ref.stage(stage.stage) if stage.generation == 1 else _first(stage), keys)

    def save(self, stage, writes, *, epoch, batch, **options):
        self._epochs.setdefault(_first(stage).flow_ref, epoch)
        return super().save(_first(stage), writes, epoch=epoch, batch=batch, **options)


class LetsManifestsGoBack(MemoryStore):
    def save_manifest(self, flow, manifest, *, after=(0, 0)):
        held = self._manifests.pop(flow, None)
        if held and (held.epoch, held.batch) < after:
            self._manifests[flow] = held
        super().save_manifest(flow, manifest, after=after if flow in self._manifests or not held else (0, 0))


class HandsOutAEpochTwice(MemoryStore):
    def acquire_epoch(self, flow, *, above=0):
        if above or self.installed_epoch(flow) < 2:
            return super().acquire_epoch(flow, above=above)
        return self.installed_epoch(flow)


class ChecksThenWrites(MemoryStore):
    def save(self, stage, writes, *, epoch, batch, **options):
        for write in resolve(stage, writes, self._stages.get(stage, {}), epoch=epoch, batch=batch):
            time.sleep(0)
            self._stages.setdefault(stage, {})[write.key] = Stored(write.expected + 1, epoch, batch, write.value)
        mark = super().marks(stage)["0"].mark
        self._buckets.setdefault(stage, {})["0"] = self._saved(mark, epoch, options.get("downstream", {}))
        return {"0": self._buckets[stage]["0"].mark} if writes else {}


class ForgetsEpochsOnItsWay(MemoryStore):
    def save(self, stage, writes, *, epoch, batch, **options):
        check_epoch(stage, epoch, self.installed_epoch(stage.flow_ref))
        time.sleep(0.001)
        return super().save(stage, writes, epoch=self.installed_epoch(stage.flow_ref), batch=batch, **options)


class ScansWhatItSawFirst(MemoryStore):
    def scan(self, stage, **part):
        yield from sorted(self._stages.get(stage, {}).items())[:4000]


class ScansBeyondTheRange(MemoryStore):
    def scan(self, stage, *, begin=b"", end=None, **part):
        return super().scan(stage, begin=begin, end=end and end + b"\0", **part)


class LeavesMarks(MemoryStore):
    def _saved(self, mark, epoch, downstream):
        return Bucket(mark if mark.count else mark.next(), epoch, downstream)


class CountsRetries(MemoryStore):
    def save(self, stage, writes, *, epoch, batch, **options):
        marks = super().save(stage, writes, epoch=epoch, batch=batch, **options)
        for name in marks:
            held = self._buckets[stage][name]
            self._buckets[stage][name] = Bucket(held.mark.next(), held.epoch, held.downstream)
        return {name: self._buckets[stage][name].mark for name in marks}


class MarksOnce(MemoryStore):
    """One mark per batch, although it declares one for each save."""

    def save(self, stage, writes, *, epoch, batch, **options):
        before = self.marks(stage)["0"]
        marks = super().save(stage, writes, epoch=epoch, batch=batch, **options)
        if marks and before.mark.count and self._batches.get(stage) == (epoch, batch):
            self._buckets[stage]["0"] = Bucket(before.mark, epoch, options.get("downstream", {}))
            marks = {"0": before.mark}
        self._batches[stage] = (epoch, batch)
        return marks

    def __init__(self):
        super().__init__()
        self._batches = {}


class IgnoresKnownMarks(MemoryStore):
    def save(self, stage, writes, *, epoch, batch, **options):
        return super().save(stage, writes, epoch=epoch, batch=batch, **{**options, "known": {}})


class ComparesMarksAfterwards(MemoryStore):
    def save(self, stage, writes, *, epoch, batch, known=NONE, **options):
        before = {name: one.mark for name, one in self.marks(stage).items()}
        marks = super().save(stage, writes, epoch=epoch, batch=batch, **options)
        for name in known:
            check_held(stage, name, before.get(name, Mark()), known)
        return marks


class RefusesToBeAhead(MemoryStore):
    def save(self, stage, writes, *, epoch, batch, known=NONE, **options):
        held = self.marks(stage)
        if any(held[name].mark.count > mark.count for name, mark in known.items() if name in held):
            raise StoreWentBack("ahead", ref=stage)
        return super().save(stage, writes, epoch=epoch, batch=batch, known=known, **options)


class ForgetsWhatIsDownstream(MemoryStore):
    def save(self, stage, writes, *, epoch, batch, **options):
        return super().save(stage, writes, epoch=epoch, batch=batch, **{**options, "downstream": {}})


class OverwritesWhatIsDownstreamByRetries(MemoryStore):
    def save(self, stage, writes, *, epoch, batch, **options):
        marks = super().save(stage, writes, epoch=epoch, batch=batch, **options)
        for name, mark in marks.items():
            self._buckets[stage][name] = Bucket(mark, epoch, options.get("downstream", {}))
        return marks


class RemovesOneTooMany(MemoryStore):
    def remove(self, stage, until, **options):
        return super().remove(stage, until + 1, **options)


class LetsRemovedStatesReturn(MemoryStore):
    def save(self, stage, writes, **options):
        return super().save(stage, [Write(one.key, one.expected, one.value) for one in writes], **options)

    def remove(self, stage, until, **options):
        self._dues[stage] = dict.fromkeys(self._stages.get(stage, {}), until)
        return super().remove(stage, until, **options)


class ForgetsHowFarItRemoved(MemoryStore):
    def _remove_from(self, stage, name, until, epoch, known):
        gone = super()._remove_from(stage, name, until, epoch, known)
        self._removed.pop(stage, None)
        return gone


class LowersHowFarItRemoved(MemoryStore):
    def _remove_from(self, stage, name, until, epoch, known):
        gone = super()._remove_from(stage, name, until, epoch, known)
        self._removed[stage][name] = until
        return gone


class RemovesForAnyRun(MemoryStore):
    def _remove_from(self, stage, name, until, epoch, known):
        return super()._remove_from(stage, name, until, max(self.installed_epoch(stage.flow_ref), 1), known)


class RemovesWithoutAMark(MemoryStore):
    def _remove_from(self, stage, name, until, epoch, known):
        before = self._buckets.get(stage, {}).get(name)
        gone = super()._remove_from(stage, name, until, epoch, known)
        if before is not None:
            self._buckets[stage][name] = before
        return gone


class RemovesFromBucketsThatWentBack(MemoryStore):
    def remove(self, stage, until, **options):
        return super().remove(stage, until, **{**options, "known": NONE})


class FindsStatesDueOneTooLate(MemoryStore):
    def due(self, stage, until, **options):
        return super().due(stage, until + 1, **options)


class FindsStatesAgainThatWereDue(MemoryStore):
    def due(self, stage, until, *, after=None):
        return super().due(stage, until, after=None if after is None else after - 1)


class FindsTheFirstStatesThatAreDue(MemoryStore):
    def due(self, stage, until, **options):
        return islice(super().due(stage, until, **options), 1_000)


class FindsStatesByTheirFirstTime(MemoryStore):
    def save(self, stage, writes, **options):
        first = self.__dict__.setdefault("first", {}).setdefault(stage, {})
        for one in writes:
            if one.due is not None:
                first.setdefault(one.key, one.due)
        return super().save(stage, writes, **options)

    def due(self, stage, until, *, after=None):
        held = self._stages.get(stage, {})
        first = self.__dict__.get("first", {}).get(stage, {})
        return (key for key, due in first.items() if key in held and due <= until and (after is None or due > after))


class DropsEveryGeneration(MemoryStore):
    def _drop(self, flow):
        for one in [ref for ref in self._epochs if ref.flow == flow.flow]:
            super()._drop(one)


class DropsTheEpochFirst(MemoryStore):
    def drop(self, flow):
        self._epochs.pop(flow, None)
        super().drop(flow)


class KeepsDueTimesOfWhatItDrops(MemoryStore):
    def _drop(self, flow):
        dues = {stage: held for stage, held in self._dues.items() if stage.flow_ref == flow}
        super()._drop(flow)
        self._dues |= dues


class KeepsTheEpochOfWhatItDrops(MemoryStore):
    def _drop(self, flow):
        epoch = self.installed_epoch(flow)
        super()._drop(flow)
        self._epochs[flow] = epoch


class TrustsAnOlderManifest(MemoryStore):
    def save_manifest(self, flow, manifest, *, after=(0, 0)):
        super().save_manifest(flow, manifest)


class MarksAllStagesAlike(MemoryStore):
    def marks(self, stage):
        everywhere = [of["0"] for ref, of in self._buckets.items() if ref.flow == stage.flow]
        return super().marks(stage) if not everywhere else {"0": max(everywhere, key=lambda one: one.mark.count)}


def _first(stage):
    return type(stage)(stage.flow, 1, stage.stage)


BUGS = {cls.__name__: cls for cls in MemoryStore.__subclasses__() if cls.__module__ == __name__}
_open = {}


def open_buggy(url):
    return _open.setdefault(url, BUGS[url.partition("://")[2].partition("/")[0]]())


SUITE = """
import sys, pytest
sys.path.insert(0, {directory!r})
from test_the_judge import BUGS, open_buggy
from persistence.contract import StoreContract

def suite_of(bug):
    class OfBug(StoreContract):
        opener = staticmethod(open_buggy)
        increments = 50
        model_examples = 20

        @pytest.fixture
        def store_url(self, request):
            return f"buggy://{{bug}}/{{request.node.name}}"

    return OfBug

globals().update((f"Test{{bug}}", suite_of(bug)) for bug in BUGS)
"""

UNTIL_FOUND = """
import pytest

found = set()

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        found.add(item.cls)
    return report

def pytest_runtest_setup(item):
    if item.cls in found:
        pytest.skip("found")
"""


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """Number of tests of the suite that failed, by the planted bug."""
    folder = tmp_path_factory.mktemp("judge")
    suite = folder / f"test_{uuid.uuid4().hex}.py"
    suite.write_text(SUITE.format(directory=os.path.dirname(__file__)))
    (folder / "conftest.py").write_text(UNTIL_FOUND)
    command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, "-c", os.devnull, "--junit-xml", folder / "results.xml", suite],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == 1, done.stdout + done.stderr
    cases = ET.parse(folder / "results.xml").iter("testcase")
    return Counter(one.attrib["classname"].rpartition(".Test")[2] for one in cases if one.find("failure") is not None)


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug, failed):
    assert failed[bug] == 1
