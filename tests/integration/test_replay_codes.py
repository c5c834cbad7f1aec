"""The commands over recorded history: what each refuses, with which exit code and line, and that it then writes nothing."""

import os
import socket
import uuid
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aggregations.engine.options import RunOptions
from aggregations.local import run_local
from aggregations.run.begin import begin
from aggregations.run.binding import bind
from jobs.cli.errors import Exit
from jobs.loading import load_flow
from jobs.replaying.generations import generations_of
from persistence.kafka import AcknowledgedProducer, KafkaSettings, Topics
from persistence.pointer import Pointer
from tests.support.cli import run

pytestmark = pytest.mark.integration

FLOWS = """
from aggregations import Fields, Flow, Topic, count, total
from aggregations.definition.source import Json

source = Flow("fleet").source(Topic({topic!r}, Json({{"tail": str, "minutes": int}}), envelope=False))
flow = source.aggregate("aircraft", "tail", Fields(n=count()))
changed = source.aggregate("aircraft", "tail", Fields(n=count(), minutes=total("minutes")))
other = Flow("ships").source(Topic({topic!r}, Json({{"tail": str}}), envelope=False))
other = other.aggregate("aircraft", "tail", Fields(n=count()))
"""
APPLY = "--apply --reason r --runner local"
SWAP = "--swap --reason r --runner local"
KEYS = "--stage aircraft --key N1"


class Site:
    """A flow that has folded ten records, and its commands in this process."""

    def __init__(self, kafka: str, name: str, directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
        self.name, self._patch, self._capsys = name, monkeypatch, capsys
        self.settings = KafkaSettings(kafka)
        self.module = f"flows_{uuid.uuid4().hex}"
        Path(f"{self.module}.py").write_text(FLOWS.format(topic=name))
        with AcknowledgedProducer(self.settings) as producer:
            for n in range(10):
                producer.send(name, b'{"tail": "N%d", "minutes": 5}' % (n % 2), b"N%d" % (n % 2))
            producer.flush()
        self.flow = load_flow(f"{self.module}:flow")
        self.url = f"sqlite://{directory}/states.db"
        self.stores = bind(self.flow, {}, self.url)
        run_local(self.flow, RunOptions(kafka=self.settings, stores=self.stores, until_caught_up=True))

    def given(self, words: str) -> tuple[int, str]:
        """Give a command, as `VERB FLOW OPTION...`; return its exit code and what it said."""
        verb, flow, *options = words.split()
        kafka = [] if verb == "snapshot" else ["--bootstrap", self.settings.bootstrap]
        stores = [] if verb == "rehearse" else ["--store", self.url]
        code = run(self._patch, verb, f"{self.module}:{flow}", *options, *stores, *kafka)
        return code, self._capsys.readouterr().err

    def seen(self) -> tuple[Pointer, list[Any]]:
        """The pointer, and the manifests of three generations."""
        with generations_of(self.flow, self.stores) as found:
            return found.pointer(), [found.manifests(generation) for generation in (1, 2, 3)]

    def working(self, worker: str) -> None:
        """Let a process be at work on the rebuild."""
        with generations_of(self.flow, self.stores) as found:
            pointer = found.pointer()
            assert pointer.rebuild is not None
            found.change(pointer, rebuild=msgspec.structs.replace(pointer.rebuild, worker=worker))

    def check(self, rows: list[tuple[str, Exit, str]]) -> None:
        """Check that each command ends with its exit code and one line, and writes nothing."""
        before = self.seen()
        for words, code, said in rows:
            found, shown = self.given(words)
            assert (found, said in shown) == (code, True), f"{words}: {found}, {shown}"
            assert shown.splitlines()[-1].startswith(("headwater: ", "Error: ")), shown
            assert self.seen() == before, words


@pytest.fixture
def site(
    kafka: str,
    topic: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Site:
    monkeypatch.chdir(tmp_path)
    return Site(kafka, topic(name="legs"), tmp_path, monkeypatch, capsys)


def test_what_a_flow_is_refused_that_has_run(site: Site) -> None:
    refused, usage = Exit.REFUSED, Exit.USAGE
    site.check(
        [
            (f"replay nowhere {APPLY}", usage, "nowhere"),
            (f"replay other {APPLY}", refused, "contain nothing of it"),
            (f"replay changed {APPLY}", refused, "--redefine"),
            ("replay changed", refused, "--redefine"),
            (f"replay flow {APPLY} --accept everything", usage, "unknown risk everything"),
            (f"replay flow {APPLY} --snapshot nowhere", usage, "nowhere: No such file or directory"),
            (f"replay flow {APPLY} --snapshot sqlite://copies.db#monday", refused, "no such snapshot of flow fleet"),
            (f"replay flow {SWAP}", refused, "no generation is being rebuilt"),
            ("replay flow --rollback --reason r", refused, "no earlier generation is left"),
            ("replay flow --abandon --reason r", refused, "no generation is being rebuilt"),
            ("replay flow --drop 1 --reason r", refused, "it is live"),
            ("replay flow --drop 7 --reason r", refused, "the stores contain nothing of it"),
            ("replay flow --stage ship --key N1", refused, "no stage 'ship'"),
            ("replay flow --stage aircraft --key XX", refused, "no state of key XX"),
            (f"replay flow {KEYS} --snapshot nowhere", usage, "No such file"),
            (f"rehearse changed --against {site.module}:flow --range {site.name}:0:7-3", refused, "7"),
            (f"rehearse changed --against {site.module}:flow --range {site.name}:0:0-99", refused, "99"),
            (f"rehearse changed --against {site.module}:flow --range nowhere:0:0-9", refused, "nowhere"),
            ("audit flow --stage ship", refused, "no stage 'ship'"),
            ("audit changed", refused, "another definition"),
            ("audit flow --snapshot nowhere", usage, "No such file"),
        ]
    )
    with closing(begin(site.flow, site.stores)):
        site.check(
            [
                (f"replay flow {KEYS}", refused, "a run is at work"),
                ("audit flow", refused, "a run is at work"),
                ("snapshot flow --to s", refused, "a run is at work"),
            ]
        )
    Topics(site.settings).delete([site.name])
    site.check([(f"replay flow {APPLY}", refused, f"topic {site.name} does not exist")])


def test_what_is_refused_while_a_generation_is_rebuilt_and_what_goes_on(site: Site) -> None:
    refused = Exit.REFUSED
    assert site.given("snapshot flow --to s")[0] == Exit.DONE
    assert site.given(f"replay flow {APPLY}")[0] == Exit.DONE
    site.check(
        [
            ("run flow --runner local --until-caught-up --generation 2", refused, "`headwater replay` rebuilds it"),
            ("replay flow --rollback --reason r", refused, "use --abandon"),
            ("replay flow --drop 2 --reason r", refused, "it is being rebuilt"),
            (f"replay flow {APPLY} --outputs send", refused, "are dropped since it began"),
            (f"replay flow {APPLY} --snapshot s", refused, "began where the flow began"),
            (f"replay changed {APPLY}", refused, "--redefine"),
        ]
    )
    host = socket.gethostname()
    site.working(f"{host}/{os.getppid()}")
    at_work = f"another `headwater replay` is at work on it: process {os.getppid()} on {host}"
    site.check([(f"replay flow {form}", refused, at_work) for form in (APPLY, SWAP, "--abandon --reason r")])
    site.working(f"{host}/4194305")  # it was killed
    assert site.given(f"replay flow {APPLY}")[0] == Exit.DONE
    code, said = site.given(f"replay flow {SWAP} --json")
    assert code == Exit.DONE, said
    site.check([("run flow --runner local --until-caught-up --generation 1", refused, "generation 2 is live")])
