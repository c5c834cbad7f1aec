"""The commands with all their options, the effect of each option, and a recorder of what a command calls."""

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from aggregations.report import Report
from aggregations.run.plan import Plan
from envelope import Histories, Tombstones
from jobs.dead_letters.discard import Discarded
from jobs.dead_letters.letters import Handled
from jobs.republish.counts import Statistics
from jobs.republish.source import Wrapping
from jobs.stack import StackState, process
from jobs.stack.state import ServerState
from jobs.views import View

FLOW = "jobs.demo.flow:flow"


STACK_KAFKA = "127.0.0.1:20001"


SETTINGS_FILE = '[kafka]\nbootstrap = "file:9092"\n'


IGNORED = frozenset({"progress", "planned", "stop"})
"""What a command makes itself: callbacks and events."""


@dataclass(frozen=True)
class Option:
    """Words to add to a command, and what its callee then gets that it does not get without them.

    Attributes:
        words: The words.
        reaches: Dotted paths into the callee's arguments, with the value expected there.
        without: Words of the command to leave out.
        lines: It makes the command write JSON lines; nothing else changes.
    """

    words: str
    reaches: Mapping[str, Any] = field(default_factory=dict)
    without: str = ""
    lines: bool = False


@dataclass(frozen=True)
class Command:
    """A command whose callee is recorded.

    Attributes:
        words: The shortest way to call it.
        callee: Module and name of what it calls.
        result: What the callee returns.
        options: By name of the parameter.
    """

    words: str
    callee: str
    result: Any
    options: Mapping[str, Option]


JSON = Option("--json", lines=True)


BOOTSTRAP = Option("--bootstrap other:1", {"kafka.bootstrap": "other:1"}, without="--bootstrap b:1")


FILE = Option("--kafka-settings kafka.toml", {"kafka.bootstrap": "file:9092"}, without="--bootstrap b:1")


ROOT = Option("--root local", {"kafka.bootstrap": STACK_KAFKA}, without="--bootstrap b:1")


def renamed(option: Option, old: str, new: str) -> Option:
    return Option(option.words, {path.replace(old, new): one for path, one in option.reaches.items()}, option.without)


LETTERS = {
    "source": Option("--from other.dead", {"letters": "other.dead"}, without="--from dead"),
    "apply": Option("--apply", {"apply": True}),
    "reason": Option("--reason overflow --reason empty", {"selection.reasons": frozenset({"overflow", "empty"})}),
    "stage": Option("--stage carrier", {"selection.stages": frozenset({"carrier"})}),
    "topic": Option("--topic legs", {"selection.topics": frozenset({"legs"})}),
    "bootstrap": renamed(BOOTSTRAP, "kafka", "settings"),
    "kafka_settings": renamed(FILE, "kafka", "settings"),
    "json": JSON,
}


STORE = Option("--store carrier=sqlite://c.db", {"stores.carrier": "sqlite://c.db"})


STACK = StackState(Path("local"))


COMMANDS = {
    "headwater run": Command(
        f"run {FLOW} --bootstrap b:1",
        "aggregations.spark.run_flow",
        Report(records=3, batches=1),
        {
            "flow": Option("tests.support.pure_flow:flow", {"flow.name": "fleet"}, without=FLOW),
            "store": STORE,
            "until_caught_up": Option("--until-caught-up", {"until_caught_up": True}),
            "dead_letters": Option("--dead-letters dead", {"dead_letters": "dead"}),
            "trigger": Option("--trigger 250ms", {"trigger_seconds": 0.25}),
            "max_records": Option("--max-records 7", {"max_records": 7}),
            "metadata_max_age": Option("--metadata-max-age 1m", {"metadata_max_age": 60.0}),
            "group": Option("--group lag", {"group": "lag"}),
            "generation": Option("--generation 3", {"generation": 3}),
            "accept": Option("--accept lost-records --accept definition", {"accept": ["lost-records", "definition"]}),
            "start": Option("--start 0:12,1:7", {"start": {0: 12, 1: 7}}),
            "bootstrap": BOOTSTRAP,
            "kafka_settings": FILE,
            "root": ROOT,
            "master": Option(
                "--master spark://head:7077 --store redis://r",
                {"master": "spark://head:7077", "stores.aircraft": "redis://r", "stores.carrier": "redis://r"},
            ),
            "conf": Option("--conf spark.ui.port=4041", {"conf.spark\0ui\0port": "4041"}),
            "json": JSON,
        },
    ),
    "headwater plan": Command(
        f"plan {FLOW} --bootstrap b:1",
        "aggregations.spark.checks.plan_flow",
        (Plan("legs", "T1"),),
        {
            "flow": Option("tests.support.pure_flow:flow", {"flow.name": "fleet"}, without=FLOW),
            "store": STORE,
            "dead_letters": Option("--dead-letters dead", {"dead_letters": "dead"}),
            "group": Option("--group lag", {"group": "lag"}),
            "generation": Option("--generation 3", {"generation": 3}),
            "accept": Option("--accept lost-records --accept definition", {"accept": ["lost-records", "definition"]}),
            "start": Option("--start 0:12,1:7", {"start": {0: 12, 1: 7}}),
            "bootstrap": BOOTSTRAP,
            "kafka_settings": FILE,
            "root": ROOT,
            "master": Option("--master spark://head:7077", {"master": "spark://head:7077"}),
            "json": JSON,
        },
    ),
    "headwater republish": Command(
        "republish jobs.demo.flow:legs --from a --to b --via v --bootstrap b:1",
        "jobs.republish.run.republish",
        Statistics(),
        {
            "function": Option(
                "jobs.republish.record:identity", {"transform.__name__": "identity"}, without="jobs.demo.flow:legs"
            ),
            "source": Option("--from c --from d", {"source.topics": ("c", "d")}, without="--from a"),
            "target": Option("--to c --to d", {"target": ["c", "d"]}, without="--to b"),
            "topic_wait": Option("--topic-wait 30s", {"topic_wait": 30.0}),
            "metadata_max_age": Option("--metadata-max-age 1m", {"metadata_max_age": 60.0}),
            "accept": Option("--accept compacted-source", {"accept": ["compacted-source"]}),
            "via": Option("--via other", {"name": "other"}, without="--via v"),
            "group": Option("--group other", {"group": "other"}),
            "instance": Option("--instance one", {"settings.options": {"group.instance.id": "one"}}),
            "kind": Option("--input raw", {"source.wrapping": Wrapping.NONE}),
            "tombstones": Option("--tombstones dead_letter", {"source.tombstones": Tombstones.DEAD_LETTER}),
            "dead_letters": Option("--dead-letters dead", {"dead_letter": "dead"}),
            "until_caught_up": Option("--until-caught-up", {"until_caught_up": True}),
            "batch": Option("--batch 7", {"batch_size": 7}),
            "bootstrap": renamed(BOOTSTRAP, "kafka", "settings"),
            "kafka_settings": renamed(FILE, "kafka", "settings"),
            "root": renamed(ROOT, "kafka", "settings"),
            "json": JSON,
        },
    ),
    "headwater redrive": Command(
        "redrive --from dead --bootstrap b:1",
        "jobs.dead_letters.redrive.redrive",
        Handled(dead_letters=1),
        {
            **LETTERS,
            "root": renamed(ROOT, "kafka", "settings"),
            "application": Option("--application v", {"selection.applications": frozenset({"v"})}),
            "unproven": Option("--unproven", {"selection.unproven": True}),
            "mend": Option("--mend jobs.demo.flow:legs", {"mend.__name__": "legs"}),
        },
    ),
    "headwater discard": Command(
        f"discard {FLOW} --from dead --bootstrap b:1",
        "jobs.dead_letters.discard.discard",
        Discarded(dead_letters=1),
        {
            **LETTERS,
            "root": renamed(ROOT, "kafka", "settings"),
            "flow": Option("tests.support.pure_flow:flow", {"flow.name": "fleet"}, without=FLOW),
            "store": STORE,
            "generation": Option("--generation 3", {"generation": 3}),
        },
    ),
    "headwater inspect": Command(
        f"inspect {FLOW} --stage carrier",
        "jobs.views.states",
        (View(b"UA", {"legs": 1}, 1, 1, 1, "", Histories()),),
        {
            "flow": Option("tests.support.pure_flow:flow", {"flow.name": "fleet"}, without=FLOW),
            "stage": Option("--stage aircraft", {"stage": "aircraft"}, without="--stage carrier"),
            "store": STORE,
            "generation": Option("--generation 3", {"generation": 3}),
        },
    ),
    "headwater demo": Command(
        "demo",
        "jobs.demo.play.play",
        None,
        {
            "flights": Option("--flights 500", {"count": 500}),
            "store": Option("--store redis", {"store": "redis"}),
        },
    ),
    "headwater schema print": Command(
        "schema print sqlite://a.db",
        "persistence.registry.schema",
        [],
        {"url": Option("sqlite://b.db", {"url": "sqlite://b.db"}, without="sqlite://a.db"), "json": JSON},
    ),
    "headwater schema apply": Command(
        "schema apply sqlite://a.db",
        "persistence.registry.apply_schema",
        [],
        {"url": Option("sqlite://b.db", {"url": "sqlite://b.db"}, without="sqlite://a.db"), "json": JSON},
    ),
    "headwater stack up": Command(
        "stack up",
        "jobs.stack.up",
        STACK,
        {
            "kafka": Option("--no-kafka", {"kafka": False}),
            "redis": Option("--redis", {"redis": True}),
            "cassandra": Option("--cassandra", {"cassandra": True}),
            "heap": Option("--heap 256", {"heap_mb": 256}),
            "root": Option("--root other", {"root": Path("other")}),
            "json": JSON,
        },
    ),
    "headwater stack down": Command(
        "stack down",
        "jobs.stack.down",
        [],
        {"root": Option("--root other", {"root": Path("other")}), "json": JSON},
    ),
    "headwater stack status": Command(
        "stack status",
        "jobs.stack.status",
        STACK,
        {"root": Option("--root other", {"root": Path("other")}), "json": JSON},
    ),
}


ELSEWHERE = {
    # Which function it calls, with which options: `tests/unit/test_cli_local.py`.
    "headwater run": {"runner"},
    # The keys and the most to show: `tests/unit/test_cli_inspect.py`. What stays of a demo: `tests/unit/test_demo.py`.
    "headwater inspect": {"key", "limit", "json"},
    "headwater demo": {"keep", "json"},
    # They call nothing that could be recorded: `tests/unit/test_cli.py` and `tests/unit/test_cli_results.py`.
    "headwater describe": {"flow", "json"},
    # What it prints, with every option: `tests/unit/test_submit.py`.
    "headwater submit-command": {"flow", "deploy_mode", "py_files", "json"},
    "headwater faults": {"json"},
    # What it writes is tried from a wheel: `tests/packaging`.
    "headwater new": {"directory", "json"},
    "headwater": {"debug", "version"},
}
"""Options whose effect is seen in what a command writes, and where."""


@dataclass
class Calls:
    """What the callees of commands were given."""

    given: list[dict[str, Any]] = field(default_factory=list)

    def of(self, callee: Callable[..., Any], result: Any) -> Callable[..., Any]:
        """A callee that keeps its arguments by name."""
        signature = inspect.signature(callee)

        def recorded(*arguments: Any, **named: Any) -> Any:
            bound = signature.bind(*arguments, **named).arguments
            for parameter in signature.parameters.values():
                if parameter.kind is parameter.VAR_KEYWORD:
                    bound |= bound.pop(parameter.name, {})
            self.given.append({name: one for name, one in bound.items() if name not in IGNORED})
            return result

        return recorded


def recorded_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Commands run in an empty directory with a settings file and a local stack that runs, as far as can be seen."""
    monkeypatch.chdir(tmp_path)
    for name in ("HEADWATER_KAFKA_BOOTSTRAP", "HEADWATER_KAFKA_BOOTSTRAP_SERVERS", "HEADWATER_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("jobs.cli.republish._unread", lambda *_: 0)
    (tmp_path / "kafka.toml").write_text(SETTINGS_FILE)
    (tmp_path / "local").mkdir()
    pid = os.getpid()
    kafka = ServerState("kafka", pid, process.start_of(pid) or "", STACK_KAFKA, "log")
    StackState(tmp_path / "local", (kafka,)).save()
    (tmp_path / ".headwater").mkdir()
    (tmp_path / ".headwater" / "stack").symlink_to(tmp_path / "empty")
    return Calls()


def plant(calls: Calls, command: Command, monkeypatch: pytest.MonkeyPatch, result: Any = None) -> None:
    module, _, name = command.callee.rpartition(".")
    callee = getattr(import_module(module), name)
    monkeypatch.setattr(command.callee, calls.of(callee, command.result if result is None else result))


class Exact:
    """A demo whose numbers were right, or not."""

    def __init__(self, *, exact: bool = True) -> None:
        self.exact = exact
