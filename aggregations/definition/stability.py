"""What differs between two deliveries of an event decides nothing: the rule for every expression of a flow.

A producer or a republisher sends an event again after a crash, and an operator redrives it. A state drops the copy
because it holds the event's position. So the copy must come to this state: whatever decides on the way has to give the
same answer for each delivery.

| column | in another delivery |
|---|---|
| the payload's, `_key`, `_topic`, `_event_id`, `_event_time_us` | the same: they belong to the event and its path |
| `_chain` | the same root, if the event was republished: the first hop but for its `via` and `pass_through`; further hops are the places of other records |
| `_partition`, `_offset`, `_timestamp` | those of another record |
| `_headers` | headwater's republishers, copies and redrives keep them, and what a mirror adds repeats the envelope; other producers may write a trace, an attempt or a time into them |

Refused for `DIFFERING`, and for columns that `map` or `Emit` made of them: an expression that **decides** which elements
are passed on or folded (`filter`, `divert`, `branch`, `flat_map`, `Emit.when`, `where=` of a field), under which key
(of stages, lookups and outputs) or in which topic, which of several events a field has (`by=`), or what a filter
compares. `Topic(time=)` takes columns of the payload only.

Allowed: an expression whose result is only **stored**, as a column of `map` or `Emit`, or by a field that folds it. The
result is that of the delivery that was folded, which is the first that the flow has read.

`Topic(stable=)` declares columns that are the same in every delivery to a topic. Of a function that decides, only its
own code is checked, and that of functions of its module that it calls with the element as the first argument, for
attributes of its element; nothing else that it calls is, nor what `flat_map`, `emit` and folds call.
"""

import dis
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Final, TypeAlias

import polars as pl

from aggregations.definition.emit import NEW, OLD, Emit
from aggregations.definition.expressions import Expression, columns_of, describe_expression, parsed, text_of
from aggregations.definition.fields import Fields
from aggregations.definition.judging import Judging
from aggregations.definition.lookups import Lookup
from aggregations.definition.operators import Aggregate, Branch, Divert, Filter, FlatMap, Map, Publish
from aggregations.definition.system import CHAIN, HEADERS, OFFSET, PARTITION, TIMESTAMP
from aggregations.errors import FlowError
from envelope.filters.arrival import FromValue

if TYPE_CHECKING:
    from aggregations.definition.inputs import Input

DIFFERING: Final = frozenset({CHAIN, HEADERS, OFFSET, PARTITION, TIMESTAMP})
"""Columns of a record that may differ between two deliveries of an event."""

Deciding: TypeAlias = Expression | Callable[..., object]
Origins: TypeAlias = Mapping[str, frozenset[str]]
"""Columns that may differ between two deliveries, each with those of `DIFFERING` that it is made of."""

_EACH: Final[Origins] = {name: frozenset({name}) for name in DIFFERING}
_ATTRIBUTES: Final[Origins] = {
    "chain": frozenset({CHAIN}),
    "headers": frozenset({HEADERS}),
    "offset": frozenset({OFFSET}),
    "own": frozenset({OFFSET, PARTITION}),
    "partition": frozenset({PARTITION}),
    "timestamp_ms": frozenset({TIMESTAMP}),
}
"""Attributes of an element, with the columns that are made of them."""
_LOADS: Final = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_SUBSCRIPTS: Final = frozenset({"BINARY_SUBSCR", "BINARY_OP"})
_LOOK: Final = 4
"""Instructions that are looked at together: of `element.chain[0]`."""
_CHAIN: Final = f'{{"Column":"{CHAIN}"}}'
_ROOT: Final = re.compile(
    r'"FieldByName":"(?!via"|pass_through")\w+"}},"input":\[{"Function":{"function":{"ListExpr":{"Get":(true|false)}},'
    rf'"input":\[{_CHAIN},{{"Literal":{{"Dyn":{{"Int":0}}}}}}\]'
)
"""A field of `list.first()` or `list.get(0)` of the chain, in the text of `describe_expression`.

Another republisher may have sent it on, and said so: a copy that was tried again has another `via` or `pass_through`.
"""


def checked_stable(stable: object) -> tuple[str, ...]:
    """Read the argument `stable=` of a topic.

    Raises:
        FlowError: It is not a list of columns of `DIFFERING`.
    """
    wanted = f"stable= takes a list of columns, of {', '.join(sorted(DIFFERING))}"
    if isinstance(stable, str) or not isinstance(stable, Collection):
        raise FlowError(f"{wanted}; got {stable!r}")
    if others := [name for name in stable if not isinstance(name, str) or name not in DIFFERING]:
        raise FlowError(f"{wanted}; got {others[0]!r}")
    return tuple(sorted(set(stable)))


def differing(inputs: Iterable["Input"], steps: Iterable[object]) -> Origins:
    """The columns behind the steps of a flow that may differ between two deliveries of an event."""
    found: dict[str, frozenset[str]] = {}
    for one in inputs:
        own = {name: of for name, of in _EACH.items() if name not in one.topic.stable}
        for name, of in _behind(one.steps, own).items():
            found[name] = of | found.get(name, frozenset())
    return _behind(steps, found)


def check_decisions(step: object, origins: Origins) -> None:
    """Check every expression and function of a step that decides.

    Raises:
        FlowError: One reads a column that may differ between two deliveries of an event.
    """
    origins = {**origins, **_of_state(step, origins)}
    for what, argument in _decisions(step):
        if argument is not None and (read := _origins(argument, origins)):
            names, text = sorted(read), text_of(argument)
            made = "" if names == [text] else f", as {text}"
            raise FlowError(
                f"{what} reads {', '.join(names)}{made}: what differs between two deliveries of an event must not decide, "
                "or a copy counts again. Read the payload, the event time, the event id or the root (first hop of _chain); "
                f"or, if every delivery has the same, declare Topic(..., stable={names})"
            )


def _decisions(step: object) -> Iterator[tuple[str, Deciding | None]]:
    match step:
        case Filter(argument) | Divert(argument) | Branch(when=argument):
            yield "it", argument
        case FlatMap(items):
            yield "it", None if callable(items) else items
        case Lookup(key=key):
            yield "key=", key
        case Publish(topic, key):
            yield "key=", key
            yield "the choice of the topic", topic if step.topics else None
        case Aggregate(fold=Judging() as judging):
            for name in judging.columns:  # the time may be that of the record, as it is by default
                yield "the filter", None if judging.time == FromValue(name) else name
        case Aggregate(key=key, fold=fold, emit=emit):
            yield "key=", key
            for name, field in fold.fields.items() if isinstance(fold, Fields) else ():
                yield f"by= of field {name!r}", field.by
                yield f"where= of field {name!r}", field.where
            yield "when() of emit=", emit.condition if isinstance(emit, Emit) else None


def _behind(steps: Iterable[object], origins: Origins) -> Origins:
    for step in steps:
        match step:
            case Map(columns, None):
                kept = {name: of for name, of in origins.items() if name not in columns}
                origins = {**kept, **_made(columns, origins)}
            case Aggregate(emit=Emit(columns=columns)):
                origins = {**_of_records(origins), **_made(columns, {**origins, **_of_state(step, origins)})}
            case FlatMap(items) if not callable(items):
                origins = {name: of for name, of in origins.items() if name != step.column}
            case Map() | FlatMap():
                origins = _of_records(origins)
            case Aggregate() if step.makes:
                origins = _of_records(origins)
    return origins


def _of_state(step: object, origins: Origins) -> Origins:
    """The columns of a stage's state that its `Emit` reads."""
    match step:
        case Aggregate(fold=Fields(fields=fields), emit=Emit()):
            state = _made({name: field.of for name, field in fields.items() if field.of is not None}, origins)
            return {begin + name: of for begin in (OLD, NEW) for name, of in state.items()}
    return {}


def _of_records(origins: Origins) -> Origins:
    """Without the columns of the elements' values."""
    return {name: of for name, of in origins.items() if name in DIFFERING}


def _made(columns: Mapping[str, Expression], origins: Origins) -> Origins:
    return {name: of for name, made in columns.items() if (of := _origins(made, origins))}


def _origins(argument: Deciding, origins: Origins) -> frozenset[str]:
    """The columns of `DIFFERING` of which the result of an expression, or of a function, is made."""
    if not isinstance(argument, str | pl.Expr):
        return _read_by(argument) & origins.keys()
    found = parsed(argument)
    names = columns_of([found])
    if CHAIN in names and CHAIN in origins and _CHAIN not in _ROOT.sub("", describe_expression(found)):
        names -= {CHAIN}
    return frozenset[str]().union(*(origins.get(name, ()) for name in names))


def _read_by(function: object, within: tuple[object, ...] = ()) -> frozenset[str]:
    """The columns of `DIFFERING` whose attributes the code of a function reads from its element, the first argument.

    So does a function of its module that it calls with the element as the first argument.
    """
    called = function if hasattr(function, "__code__") else type(function).__call__
    if not isinstance(code := getattr(called, "__code__", None), CodeType) or function in within:
        return frozenset()
    of_object = not isinstance(function, FunctionType)  # a method: its first argument is the object
    element = code.co_varnames[: code.co_argcount][of_object : of_object + 1]
    known = getattr(called, "__globals__", {})
    read = frozenset[str]()
    for part in _codes(code):
        steps = list(dis.get_instructions(part))
        steps += steps[-1:] * _LOOK
        for before, one, then, last in zip(*(steps[n:] for n in range(_LOOK)), strict=False):
            if (
                before.opname == "LOAD_GLOBAL"
                and _loads(one, 0) in element
                and isinstance(known.get(before.argval), FunctionType)
            ):
                read |= _read_by(known[before.argval], (*within, function))
            if _loads(before, -1) in element and one.opname in _LOADS:
                root = one.argval == "chain" and then.argval == 0 and last.opname in _SUBSCRIPTS
                read |= frozenset() if root else _ATTRIBUTES.get(one.argval, frozenset())
    return read


def _loads(step: dis.Instruction, which: int) -> object:
    """The name of a variable that an instruction loads, the first or the last one if it loads two; else None."""
    names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    return names[which] if names and ("LOAD_FAST" in step.opname or step.opname == "LOAD_DEREF") else None


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function, and of the functions and comprehensions in it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)
