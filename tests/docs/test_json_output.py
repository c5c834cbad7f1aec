"""The page about JSON output names every field that the commands write."""

import json
import re
from dataclasses import fields
from pathlib import Path

import msgspec
import pytest

from aggregations.definition.windows import tumbling
from aggregations.report import Report
from aggregations.run.plan import PartitionPlan, Plan
from envelope import Histories, Node
from jobs.backup import Restored, Snapshot
from jobs.cli.dead_letters import show
from jobs.cli.run import as_json, show_plan
from jobs.comparing import Comparison, Row, Seen, compare
from jobs.copying import CopyStatistics
from jobs.dead_letters.discard import Discarded
from jobs.dead_letters.letters import Handled
from jobs.explaining.blame import Passage, Resent
from jobs.explaining.copies import Copy, Resend
from jobs.explaining.outcome import AtStage, Explanation, Fate, InBatch, Letter, Outcome
from jobs.mending import Mended
from jobs.refolding.audit import Audit
from jobs.refolding.fold import Folded
from jobs.refolding.history import History
from jobs.refolding.rehearse import Rehearsal
from jobs.replay import Differences, Replayed, ReplayPlan, Swapped
from jobs.replaying.planning import RebuildRange
from jobs.republish.counts import Statistics, TopicGrowth
from jobs.stack.state import ServerState
from jobs.tracing import Found, Place, Step
from jobs.views import View
from persistence.findings import Finding
from persistence.manifest import Growth
from persistence.pointer import Change, Origin, Pointer, Rebuild

DOCS = Path(__file__).parents[2] / "docs"


def named(title: str, page: Path = DOCS / "reference" / "json.md") -> set[str]:
    """What the rows of the tables in a section name, in any column."""
    _, section = re.split(rf"^## {title}$", page.read_text(), maxsplit=1, flags=re.MULTILINE)
    section = re.split(r"^## ", section, maxsplit=1, flags=re.MULTILINE)[0]
    return {name for line in section.splitlines() if line.startswith("| ") for name in re.findall(r"`(\w+)`", line)}


def names(kind: type) -> set[str]:
    return {field.name for field in (msgspec.structs.fields if issubclass(kind, msgspec.Struct) else fields)(kind)}


def test_the_lines_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    show_plan(Plan("legs", "id"), json=True)
    [plan] = json.loads(capsys.readouterr().out).values()
    nested = names(PartitionPlan) | names(Finding) | names(Growth)
    assert named("Lines of run and plan") == {*plan, *as_json(Report()), *nested}


def test_the_lines_of_a_republisher() -> None:
    assert named("Lines of republish") == {*Statistics().as_dict()} | names(TopicGrowth)


def test_the_lines_of_a_copy() -> None:
    assert named("Lines of copy") == {*CopyStatistics().as_dict()}


def test_the_lines_of_redrive_and_discard(capsys: pytest.CaptureFixture[str]) -> None:
    found = {"discard"}  # the command
    group = ("legs", "carrier", "overflow")
    for result, done, more in ((Handled(), "redriven", {}), (Discarded(), "discarded", {"no_hole": 1})):
        result.done[group] = result.before[group] = 1
        show(result, done=done, written="", unusable="", none="", apply=True, json=True, **more)
        line = json.loads(capsys.readouterr().out)
        found |= {*line, *line[done][0]}
    assert named("Lines of redrive and discard") == found


def test_the_lines_of_snapshot_and_restore() -> None:
    saved = Snapshot(Path("a"), "fleet", 1, {}, 1, 1, {}, "", 0).as_json()
    assert named("Lines of snapshot and restore") == {*saved, *Restored({}, 0, 1, 1).as_json(), "snapshot", "restore"}


def test_the_lines_of_replay() -> None:
    change = Change(0, "ann@host", "swap", 2, "")
    pointer = Pointer(rebuild=Rebuild(2, 1), changes=(change,))
    one = RebuildRange("legs", 0, 0, 1)
    differ = Differences(Comparison({}))
    plan = ReplayPlan(
        "fleet", 1, 2, True, (), [one], {}, None, pointer, differ, refused=[Finding("a", "b", "c")]
    ).as_json()
    found = {
        *plan,
        *plan["ranges"][0],
        *plan["refused"][0],
        *plan["changes"][0],
        *differ.as_json(),
        *names(Pointer),
        *names(Rebuild),
        *names(Origin),
    }
    found |= {*Replayed("fleet", 2, 1).as_json(), *Swapped("fleet", 2, 1, True, Report(), differ).as_json()}
    history, folded = History({}, {}), Folded(0, {}, 0, {})
    mended = Mended("fleet", 1, "aircraft", 1, None, history, folded, Comparison({}), {}, applied=False)
    assert named("Lines of replay") == found | {*mended.as_json()}


def test_the_lines_of_rehearse_and_audit() -> None:
    row = lambda key, n: Row("s", key, {key: Seen.of({"n": n})})
    comparison = compare([row(b"a", 1), row(b"\xff", 1)], [row(b"a", 2)], stages=["s"])
    fold = Folded(1, {}, 0, {})
    whole = History({}, {})
    differences = comparison.stages["s"]
    found = {*Rehearsal("f", whole, fold, fold, comparison).as_json(), *differences.as_json(), *fold.as_json()}
    found |= {*Audit("f", 1, 1, None, whole, {}, fold, {}, (0, 0), (), comparison).as_json()}
    found |= {*differences.fields["n"].as_json(), *(name for one in differences.sample for name in one.as_json())}
    assert named("Lines of rehearse and audit") == found | {"rehearse", "audit"}


def test_the_lines_of_inspect() -> None:
    fields_of_bytes = View(b"\xff", None, 1, 1, 1, "", Histories()).as_json()
    window = tumbling("5m").split(b"a@2026-11-24T06:00:00Z")
    state = View(b"a", None, 1, 1, 1, "", Histories(), window=window).as_json()
    lanes = {"held", "floor", "used"}
    assert named("From the command line", DOCS / "guides" / "states.md") == {*fields_of_bytes, *state} | lanes


def test_the_lines_of_trace() -> None:
    step = Step(Place("legs", 0, 1), Found.FOUND, None, b"\xff").as_json()
    other = Step(Place("legs", 0, 1), Found.FOUND, None).as_json()
    assert named("Lines of trace") == {*step, *other, *Found}


def test_the_lines_of_explain() -> None:
    place = Place("legs", 0, 1)
    copy = Copy(place, 1, Resend("wrap", Node("raw", 0, 7), "legs", "republisher"))
    stages = [AtStage("first", Outcome.FOLDED, "", key, batch=InBatch(1)) for key in (b"a", b"\xff")]
    letter = Letter(place, "first", None, "", None, Fate.WAITING)
    whole = Explanation(
        place, Outcome.FOLDED, "", taken_by=copy, stages=tuple(stages), letters=(letter,), copies=(copy,)
    )
    found = {*whole.as_json(), *copy.as_json(), *letter.as_json(), *InBatch(1).as_json()}
    found |= {name for stage in stages for name in stage.as_json()}
    assert named("Lines of explain") == found | {*Outcome} | {*Fate} | {"flat_map"}


def test_the_lines_of_blame() -> None:
    hop = Resent(Passage("wrap", "raw", "legs", "republisher"))
    assert named("Lines of blame") == {*hop.as_json(), "republisher", "redrive", "retry"}


def test_the_lines_of_the_stack() -> None:
    assert names(ServerState) < named("Lines of the other commands")
