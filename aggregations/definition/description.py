"""A flow as text, one line a step: what `headwater describe` shows."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from aggregations.definition.emit import Emit
from aggregations.definition.expressions import Expression, name_of, text_of
from aggregations.definition.fields import Fields
from aggregations.definition.judging import Judging
from aggregations.definition.lookups import Lookup
from aggregations.definition.operators import (
    Aggregate,
    Branch,
    Divert,
    Filter,
    FlatMap,
    Map,
    Publish,
    PublishOn,
    PublishStates,
    Step,
)
from aggregations.definition.paths import calls_of, keeps_columns
from aggregations.definition.source import AHEAD, Topic
from aggregations.definition.windows import Late, length_text
from envelope import Siblings, Tombstones
from envelope.dedup.eviction import LANES
from envelope.dedup.history import WIDE
from envelope.dedup.retries import NO_RETRIES
from envelope.limits import DEFAULT_LIMITS

if TYPE_CHECKING:
    from aggregations.definition.flow import Flow

_METHODS = {
    Filter: "filter",
    Map: "map",
    FlatMap: "flat_map",
    Lookup: "lookup",
    Divert: "divert",
    Aggregate: "aggregate",
    Publish: "publish",
    PublishStates: "publish_states",
}


class Line(NamedTuple):
    """A source, a step of a flow, or the place where its sources meet.

    Attributes:
        step: Name of the method of `Flow` that adds it.
        what: Its content: the topic or topics, the expression, or the name of the function.
        path: `vectorised`, also with Python for a part of the step, or `per message`, also with vectorised verdicts;
            empty where nothing is computed.
        branch: Names of the branches that the step is in, with slashes; empty on the main line.
    """

    step: str
    what: str
    path: str
    branch: str = ""


def text_of_flow(flow: "Flow[Any]") -> str:
    """The flow as text: its name, then a line for each step, indented by the branches that it is in."""
    lines = [flow.name]
    for step, what, path, branch in lines_of(flow):
        within = "  " * (branch.count("/") + bool(branch))
        lines.append(f"  {within + step:14s} {what:50s} {path}".rstrip())
    return "\n".join(lines)


def lines_of(flow: "Flow[Any]") -> Iterator[Line]:
    """The sources and the steps of a flow, in order: each source with its own steps, then a line where they meet.

    The content of a line has every option that is not the default, except the URL of a store.
    """
    for name, table in flow.tables.items():
        yield Line("table", f"{name} from {_topic(table.inputs[0].topic, Tombstones.ELEMENT)}", "")
    flow = flow.parts[-1]
    if not flow.inputs:
        yield Line("source", "(none)", "")
    for one in flow.inputs:
        yield Line("source", _topic(one.topic), "")
        yield from _lines(one.steps, one.pieces, flow.name, columnar=True)
    columnar = all(keeps_columns(step) for one in flow.inputs for step in one.steps)
    if flow.merges:
        yield Line("merge", ", ".join(one.topic.name for one in flow.inputs), "")
    yield from _lines(flow.steps, flow.pieces, flow.name, columnar=columnar)


def _lines(
    steps: Sequence[Step | Aggregate | PublishStates],
    pieces: Iterable[tuple[str, int, int]],
    flow: str,
    *,
    columnar: bool,
    branch: str = "",
) -> Iterator[Line]:
    for number, step in enumerate(steps):
        begun = sorted((piece for piece in pieces if piece[1] == number), key=lambda piece: -piece[2])
        yield from (Line("via", name, "", branch) for name, _, _ in begun)
        named = isinstance(step, Publish) and step.name != "/".join(filter(None, [flow, branch]))
        content = f"{_content(step)}, as {step.name}" if named else _content(step)  # type: ignore[union-attr]
        yield Line(_method(step), content, _path(step, columnar=columnar), branch)
        if isinstance(step, Branch):
            within = f"{branch}/{step.name}".lstrip("/")
            yield from _lines(step.steps, step.pieces, flow, columnar=columnar, branch=within)
        columnar = columnar and (isinstance(step, PublishStates) or keeps_columns(step))


def _method(step: Step | Aggregate | PublishStates) -> str:
    if isinstance(step, Branch):
        return "also_to" if step.when is None else "branch"
    if isinstance(step, Aggregate) and step.rule is not None:
        return "deduplicate"
    return _METHODS[type(step)]


def _content(step: Step | Aggregate | PublishStates) -> str:
    match step:
        case Filter(argument) | Divert(argument) | FlatMap(argument):
            return text_of(argument)
        case Map(columns, function):
            return _columns(columns) if function is None else name_of(function)
        case Publish(topic, key, value, topics=topics):
            text = f"{text_of(topic)}: {', '.join(topics)}" if topics else str(topic)
            by = "" if key is None else f", key {text_of(key)}"
            return text + by + ("" if value is None else f", value {name_of(value)}")
        case PublishStates(topic, on):
            return topic if on is PublishOn.UPDATE else f"{topic} on {on}"
        case Branch(name=name, when=when):
            return name if when is None else f"{name} when {text_of(when)}"
        case Lookup(table, _, key, columns, missing):
            return f"{_columns(columns)} of {table} by {text_of(key)}, missing {missing}"
        case Aggregate():
            return _stage(step)


def _stage(stage: Aggregate) -> str:
    """The content of a stage: its key and what decides which elements share a state, its fold, and what it emits."""
    judging = stage.fold if isinstance(stage.fold, Judging) else None
    given = {
        "not co-partitioned": judging is None and not stage.co_partitioned,
        f"history {stage.history}": stage.history != (WIDE if judging and not judging.by_key else None),
        f"{stage.lanes} lanes": stage.lanes != LANES,
    }
    options = "".join(f", {option}" for option, is_given in given.items() if is_given)
    if judging is not None:
        return f"{stage.name}: {judging.describe()}{options}"
    by = text_of(stage.key)
    if stage.window is not None:
        by += f", {stage.window}"
        by += ", late elements are dead letters" if stage.window.late is Late.DEAD_LETTER else ""
    by += "" if stage.expiry is None else f", expires after {stage.expiry}"
    fold = stage.fold if isinstance(stage.fold, Fields) else name_of(type(stage.fold))
    return f"{stage.name} by {by}{options}: {fold}{_emitted(stage)}"


def _emitted(stage: Aggregate) -> str:
    emit = stage.emit
    if emit is None:
        return ""
    if not isinstance(emit, Emit):
        return f", emit {name_of(emit)}"
    when = "" if emit.condition is None else f" when {text_of(emit.condition)}"
    return f", emit {_columns(emit.columns)}{when}"


def _columns(columns: Mapping[str, Expression]) -> str:
    """Columns by their names, each with what it is, unless that is a column of this name."""
    texts = {name: text_of(of) for name, of in columns.items()}
    return ", ".join(name if name == text else f"{name}={text}" for name, text in texts.items())


def _topic(topic: Topic, tombstones: Tombstones = Tombstones.SKIP) -> str:
    """A topic, and what is not the default of how it is read."""
    given = {
        f"cluster {topic.cluster}": bool(topic.cluster),
        "without envelopes": not topic.envelope,
        f"siblings {topic.siblings}": topic.siblings is not Siblings.EVENT_ID,
        f"tombstones {topic.tombstones}": topic.tombstones is not tombstones,
        f"time {'' if topic.time is None else text_of(topic.time)}": topic.time is not None,
        f"at most {length_text(topic.ahead_seconds)} ahead": topic.ahead_seconds != AHEAD,
        f"idle after {topic.idle}": topic.idle is not None,
        f"skew {topic.skew}": topic.skew is not None,
        f"stable {' '.join(topic.stable)}": bool(topic.stable),
        f"retries of {', '.join(name for name, _ in topic.retries.topics)}": topic.retries != NO_RETRIES,
        repr(topic.limits): topic.limits != DEFAULT_LIMITS,
    }
    return ", ".join([topic.name, *(option for option, is_given in given.items() if is_given)])


def _path(step: Step | Aggregate | PublishStates, *, columnar: bool) -> str:
    if isinstance(step, PublishStates):
        return ""
    if isinstance(step, Branch):
        return _path(Filter(step.when), columnar=columnar) if step.when is not None else ""
    if not columnar:
        judged = isinstance(step, Aggregate) and not isinstance(step.emit, Emit)
        return "per message, verdicts vectorised" if judged else "per message"
    if not keeps_columns(step):
        called = "emit" if isinstance(step, Aggregate) else "its function"
        return f"per message from here: {called} replaces the values"
    calls = calls_of(step)
    merging = ", merging sessions per message" if isinstance(step, Aggregate) and step.sessions is not None else ""
    return (f"vectorised, with Python for {calls}" if calls else "vectorised") + merging


def line_of(step: Step | Aggregate | PublishStates) -> str:
    """One step: the method of `Flow` that adds it, and its content."""
    return f"{_method(step)}({_content(step)})"
