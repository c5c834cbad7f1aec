"""The commands with all their options, and the effect of each option."""

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from aggregations.report import Report
from aggregations.run.plan import Plan
from envelope import Histories, Tombstones
from envelope.event_ids import EventIds
from jobs.copying import CopyStatistics
from jobs.dead_letters.discard import Discarded
from jobs.dead_letters.letters import Handled
from jobs.explaining.blame import Blame, Passage, Resent
from jobs.explaining.outcome import Explanation, Outcome
from jobs.republish.counts import Statistics
from jobs.republish.source import Wrapping
from jobs.tracing import Found, Place, Step
from jobs.views import View
from persistence.kafka import KafkaSettings
from tests.support.filters import by_id, only_strict

FLOW = "jobs.demo.flow:flow"
STACK_KAFKA = "127.0.0.1:20001"
NOW = 1_000_000
"""Seconds since 1970, when a command asks."""


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


CLUSTER = {
    "bootstrap": renamed(BOOTSTRAP, "kafka", "settings"),
    "kafka_settings": renamed(FILE, "kafka", "settings"),
    "root": renamed(ROOT, "kafka", "settings"),
}


LETTERS = {
    **CLUSTER,
    "source": Option("--from other.dead", {"letters": "other.dead"}, without="--from dead"),
    "apply": Option("--apply", {"apply": True}),
    "reason": Option("--reason overflow --reason empty", {"selection.reasons": frozenset({"overflow", "empty"})}),
    "stage": Option("--stage carrier", {"selection.stages": frozenset({"carrier"})}),
    "topic": Option("--topic legs", {"selection.topics": frozenset({"legs"})}),
    "json": JSON,
}


STORE = Option("--store carrier=sqlite://c.db", {"stores.carrier": "sqlite://c.db"})


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
            "journal": Option("--journal notes", {"journal": "notes"}),
            "journal_share": Option("--journal-share 0.25", {"journal_share": 0.25}),
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
            "checkpoint": Option("--checkpoint logs", {"checkpoint": "logs"}),
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
            "event_id": Option(
                "--input raw --event-id coordinates",
                {"source.wrapping": Wrapping.NONE, "source.event_id": EventIds.parse("coordinates")},
            ),
            "from_cluster": Option(
                "--from-cluster west=w:1", {"cluster": "west", "source_settings": KafkaSettings("w:1")}
            ),
            "tombstones": Option("--tombstones dead_letter", {"source.tombstones": Tombstones.DEAD_LETTER}),
            "dead_letters": Option("--dead-letters dead", {"dead_letter": "dead"}),
            "deduplicate": Option("--deduplicate tests.support.filters:by_id", {"deduplicate": by_id}),
            "policy": Option("--policy tests.support.filters:only_strict", {"policy": only_strict}),
            "store": Option("--store lmdb://states", {"store": "lmdb://states"}),
            "generation": Option("--generation 2", {"generation": 2}),
            "until_caught_up": Option("--until-caught-up", {"until_caught_up": True}),
            "batch": Option("--batch 7", {"batch_size": 7}),
            **CLUSTER,
            "json": JSON,
        },
    ),
    "headwater copy": Command(
        "copy --name c --from a --to b --bootstrap b:1",
        "jobs.copying.run.copy",
        CopyStatistics(),
        {
            "name": Option("--name d", {"name": "d"}, without="--name c"),
            "target": Option("--to d", {"target": "d"}, without="--to b"),
            "source": Option("--from c --from d", {"source.topics.topics": ("c", "d")}, without="--from a"),
            "kind": Option("--input raw", {"source.topics.wrapping": Wrapping.NONE}),
            "event_id": Option(
                "--input raw --event-id coordinates",
                {"source.topics.wrapping": Wrapping.NONE, "source.topics.event_id": EventIds.parse("coordinates")},
            ),
            "from_cluster": Option(
                "--from-cluster west=w:1", {"source.cluster": "west", "source.settings": KafkaSettings("w:1")}
            ),
            "tombstones": Option("--tombstones dead_letter", {"source.topics.tombstones": Tombstones.DEAD_LETTER}),
            "accept": Option("--accept compacted-source", {"source.accept": ["compacted-source"]}),
            "dead_letters": Option("--dead-letters dead", {"dead_letter": "dead"}),
            "positions": Option("--positions here", {"positions": "here"}),
            "until_caught_up": Option("--until-caught-up", {"until_caught_up": True}),
            "batch": Option("--batch 7", {"batch_size": 7}),
            **CLUSTER,
            "json": JSON,
        },
    ),
    "headwater copy (lines)": Command(
        "copy --name c --from-lines a.log --to b --bootstrap b:1",
        "jobs.copying.run.copy",
        CopyStatistics(),
        {
            "lines": Option("--from-lines b.log", {"source.path": Path("b.log")}, without="--from-lines a.log"),
            "kind": Option("--input json", {"source.json": True}),
            "key": Option("--input json --key till", {"source.json": True, "source.key": "till"}),
            "event_id": Option("--event-id coordinates", {"source.event_id": "coordinates"}),
        },
    ),
    "headwater copy (rows)": Command(
        "copy --name c --from-database sqlite:a.db --query SELECT(1) --column a --to b --bootstrap b:1",
        "jobs.copying.run.copy",
        CopyStatistics(),
        {
            "database": Option("sqlite:b.db", {"source.connect": "b.db"}, without="sqlite:a.db"),
            "query": Option("--query SELECT(2)", {"source.query": "SELECT(2)"}, without="--query SELECT(1)"),
            "column": Option("--column b", {"source.column": "b"}, without="--column a"),
            "key": Option("--key till", {"source.key": "till"}),
            "event_id": Option("--event-id field:number", {"source.event_id": "field:number"}),
        },
    ),
    "headwater copy (rows of a driver)": Command(
        "copy --name c --from-database sqlite:a.db --query SELECT(1) --column a --to b --bootstrap b:1",
        "jobs.copying.run.copy",
        CopyStatistics(),
        {"database": Option("sqlite3:connect", {"source.connect": sqlite3.connect}, without="sqlite:a.db")},
    ),
    "headwater redrive": Command(
        "redrive --from dead --bootstrap b:1",
        "jobs.dead_letters.redrive.redrive",
        Handled(dead_letters=1),
        {
            **LETTERS,
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
            "key": Option("--key UA", {"keys": [b"UA"]}),
            "window": Option("--window 2026-11-24T06:00:00Z", {"start": datetime(2026, 11, 24, 6, tzinfo=UTC)}),
            "prefix": Option("--prefix U", {"prefix": b"U"}),
            "after": Option("--after DL", {"after": b"DL"}),
            "where": Option("--where legs>1", {"where": "legs>1"}),
            "older_than": Option("--older-than 15m", {"older_than_ms": (NOW - 900) * 1000}),
            "newer_than": Option("--newer-than 15m", {"newer_than_ms": (NOW - 900) * 1000}),
            "limit": Option("--limit 7", {"limit": 8}),  # one more, to say whether there are more
            "format": Option("--format json", lines=True),
            "store": STORE,
            "generation": Option("--generation 3", {"generation": 3}),
            "json": JSON,
        },
    ),
    "headwater trace": Command(
        "trace legs:0:1 --bootstrap b:1",
        "jobs.tracing.trace",
        [Step(Place("legs", 0, 1), Found.FOUND, None, b"UA", 1)],
        {
            "record": Option("trips:2:3", {"place": Place("trips", 2, 3)}, without="legs:0:1"),
            **CLUSTER,
            "json": JSON,
        },
    ),
    "headwater explain": Command(
        f"explain {FLOW} flights.legs:0:1 --bootstrap b:1",
        "jobs.explaining.explain.explain",
        [Explanation(Place("flights.legs", 0, 1), Outcome.FOLDED, "stage aircraft: the state holds its position")],
        {
            "flow": Option("tests.support.pure_flow:flow", {"flow.name": "fleet"}, without=FLOW),
            "record": Option("raw:2:3", {"record": Place("raw", 2, 3)}, without="flights.legs:0:1"),
            "event_id": Option("--event-id b", {"record": "b"}, without="flights.legs:0:1"),
            "search": Option("--search 7", {"search": 7}),
            "dead_letters": Option("--dead-letters dead", {"dead_letters": "dead"}),
            "journal": Option("--journal notes", {"journal": "notes"}),
            "store": STORE,
            "generation": Option("--generation 3", {"generation": 3}),
            "bootstrap": BOOTSTRAP,
            "kafka_settings": FILE,
            "root": ROOT,
            "json": JSON,
        },
    ),
    "headwater explain (search)": Command(
        f"explain {FLOW} --event-id a --bootstrap b:1",
        "jobs.explaining.explain.explain",
        [Explanation(Place("flights.legs", 0, 1), Outcome.FOLDED, "stage aircraft: the state holds its position")],
        {"ranges": Option("--range flights.legs:0 --range TIME/", {"ranges": ["flights.legs:0", "TIME/"]})},
    ),
    "headwater blame": Command(
        f"blame {FLOW} --bootstrap b:1",
        "jobs.explaining.blame.blame",
        Blame((), [Resent(Passage("wrap", "raw", "legs", "republisher"), 3, 1, 1)], 3, 1),
        {
            "flow": Option("tests.support.pure_flow:flow", {"flow.name": "fleet"}, without=FLOW),
            "ranges": Option("--range flights.legs:0", {"ranges": ["flights.legs:0"]}),
            "bootstrap": BOOTSTRAP,
            "kafka_settings": FILE,
            "root": ROOT,
            "json": JSON,
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
}
"""By the words of the command; those in brackets say in which form it is called."""


ELSEWHERE = {
    # Which function it calls, with which options: `tests/unit/test_cli_local.py`.
    "headwater run": {"runner"},
    # `test_json_lines_in_a_file_are_those_of_standard_output` and `test_parquet_has_typed_fields_and_the_histories` of
    # `tests/unit/test_cli_inspect_selection.py`.
    "headwater inspect": {"output"},
    # `test_the_re_sends_are_drawn` of `tests/unit/test_blame.py`.
    "headwater blame": {"svg"},
    # What stays of a demo: `tests/unit/test_demo.py`.
    "headwater demo": {"keep", "json"},
    # They call nothing that could be recorded: `tests/unit/test_cli.py`, `tests/unit/test_cli_results.py`, and for the
    # picture `test_a_picture_is_written_besides_what_describe_shows` and `tests/unit/test_picture.py`.
    "headwater describe": {"flow", "svg", "json"},
    # What it prints, with every option: `tests/unit/test_submit.py`.
    "headwater submit-command": {"flow", "deploy_mode", "py_files", "json"},
    "headwater faults": {"json"},
    # What it writes is tried from a wheel: `tests/packaging`.
    "headwater new": {"directory", "json"},
    "headwater": {"debug", "version"},
}
"""Options whose effect is seen in what a command writes, and where."""
