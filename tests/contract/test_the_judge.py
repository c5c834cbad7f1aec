"""Stores with one planted bug each: the contract suite must find every one of them."""

import os
import subprocess
import sys
import time
import uuid

import pytest

from persistence.cas import check_term, settle
from persistence.errors import Conflict
from persistence.memory import MemoryStore
from persistence.protocol import Stored, Write


class IgnoresTerms(MemoryStore):
    def save(self, stage, writes, *, term, batch):
        super().save(stage, writes, term=max(self.installed_term(stage.flow_ref), 1), batch=batch)


class TrustsUnknownTerms(MemoryStore):
    def save(self, stage, writes, *, term, batch):
        self._terms[stage.flow_ref] = max(term, self.installed_term(stage.flow_ref))
        super().save(stage, writes, term=term, batch=batch)


class RefusesRetries(MemoryStore):
    def save(self, stage, writes, *, term, batch):
        held = self.load(stage, [write.key for write in writes])
        if changed := tuple(w.key for w in writes if w.expected != (held[w.key].version if w.key in held else 0)):
            raise Conflict(changed, stage)
        super().save(stage, writes, term=term, batch=batch)


class TakesAnyValueForARetry(MemoryStore):
    def save(self, stage, writes, *, term, batch):
        held = self.load(stage, [write.key for write in writes])
        todo = [w for w in writes if not (w.key in held and held[w.key].version == w.expected + 1)]
        super().save(stage, todo, term=term, batch=batch)


class AppliesPartOfACall(MemoryStore):
    def save(self, stage, writes, *, term, batch):
        if len(writes) == len({write.key for write in writes}):
            for write in writes[:-1]:
                super().save(stage, [write], term=term, batch=batch)
            writes = writes[-1:]
        super().save(stage, writes, term=term, batch=batch)


class NamesOnlyTheFirstConflict(MemoryStore):
    def save(self, stage, writes, *, term, batch):
        try:
            super().save(stage, writes, term=term, batch=batch)
        except Conflict as error:
            raise Conflict(error.keys[:1], stage) from None


class TakesMissingForVersionZero(MemoryStore):
    def save(self, stage, writes, *, term, batch):
        held = self.load(stage, [write.key for write in writes])
        super().save(stage, [w if w.key in held else Write(w.key, 0, w.value) for w in writes], term=term, batch=batch)


class MixesGenerations(MemoryStore):
    def load(self, stage, keys):
        return super().load(stage.flow_ref.stage(stage.stage) if stage.generation == 1 else _first(stage), keys)

    def save(self, stage, writes, *, term, batch):
        self._terms.setdefault(_first(stage).flow_ref, term)
        super().save(_first(stage), writes, term=term, batch=batch)


class LetsManifestsGoBack(MemoryStore):
    def save_manifest(self, flow, manifest):
        self._manifests.pop(flow, None)
        super().save_manifest(flow, manifest)


class HandsOutATermTwice(MemoryStore):
    def acquire_term(self, flow, *, above=0):
        if above or self.installed_term(flow) < 2:
            return super().acquire_term(flow, above=above)
        return self.installed_term(flow)


class ChecksThenWrites(MemoryStore):
    def save(self, stage, writes, *, term, batch):
        for write in settle(stage, writes, self._stages.get(stage, {}), term=term, batch=batch):
            time.sleep(0)
            self._stages.setdefault(stage, {})[write.key] = Stored(write.expected + 1, term, batch, write.value)


class ForgetsTermsOnItsWay(MemoryStore):
    def save(self, stage, writes, *, term, batch):
        check_term(stage, term, self.installed_term(stage.flow_ref))
        time.sleep(0.001)
        super().save(stage, writes, term=self.installed_term(stage.flow_ref), batch=batch)


class ScansWhatItSawFirst(MemoryStore):
    def scan(self, stage):
        yield from sorted(self._stages.get(stage, {}).items())[:4000]


def _first(stage):
    return type(stage)(stage.flow, 1, stage.stage)


BUGS = {cls.__name__: cls for cls in MemoryStore.__subclasses__() if cls.__module__ == __name__}
_open = {}


def open_buggy(url):
    return _open.setdefault(url, BUGS[url.partition("://")[2].partition("/")[0]]())


SUITE = """
import sys, pytest
sys.path.insert(0, {directory!r})
from test_the_judge import open_buggy
from persistence.contract import StoreContract

class TestBuggy(StoreContract):
    opener = staticmethod(open_buggy)
    increments = 50
    model_examples = 20

    @pytest.fixture
    def store_url(self, request):
        return "buggy://{bug}/" + request.node.name
"""


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug, tmp_path):
    suite = tmp_path / f"test_{uuid.uuid4().hex}.py"
    suite.write_text(SUITE.format(directory=os.path.dirname(__file__), bug=bug))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "-c",
            os.devnull,
            suite,
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == 1, done.stdout + done.stderr
