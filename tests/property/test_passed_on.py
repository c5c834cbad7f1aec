"""A function that passes values on as they are changes nothing: expressions behind it find the types of the columns."""

import json
import random
from collections.abc import Callable, Mapping
from typing import Any

import polars as pl
import pytest

from aggregations import Emit, Fields, Flow, Json, Topic, count, last
from aggregations.definition.element import Record
from envelope import decode
from tests.messages import Every
from tests.support.both import Both, record

SEED = 11
JSON = {
    "k": str,
    "i": pl.UInt8,
    "n": int,
    "f": float,
    "b": bool,
    "l": [int],
    "texts": [str],
    "floats": [float],
    "ll": [[int]],
    "pair": pl.Array(pl.Int64, 2),
    "s": {"a": int, "t": str, "l": [str], "in": {"f": float}},
    "items": [{"a": int, "l": [int]}],
}
SHARED = {
    "list": lambda of: of.list.len(),
    "sum": lambda of: of.list.sum(),
    "first": lambda of: of.list.first(),
    "mean": lambda of: of.list.mean(),
}


def expressions_of_json() -> dict[str, pl.Expr]:
    col = pl.col
    return {
        **{f"{column} {name}": of(col(column)) for column in ("l", "floats") for name, of in SHARED.items()},
        "texts joined": col("texts").list.join(","),
        "length of a text": col("texts").list.first().str.len_chars(),
        "list of a list": col("ll").list.first().list.sum(),
        "lists": col("ll").list.len(),
        "pair": col("pair").arr.sum(),
        "field": col("s").struct.field("a"),
        "text of a field": col("s").struct.field("t").str.len_chars(),
        "list of a field": col("s").struct.field("l").list.join("+"),
        "inner": col("s").struct.field("in").struct.field("f") / 3,
        "items": col("items").list.eval(pl.element().struct.field("a")).list.sum(),
        "first item": col("items").list.first().struct.field("l").list.len(),
        "flipped": ~col("i"),
        "ones": col("i").bitwise_count_ones(),
        "below": col("i") - 7,
        "text": col("i").cast(pl.String),
        "remainder": col("f") % 0.3,
        "rounds": col("f") // 0.1,
        "mixed": col("i") + col("f"),
        "upper": col("k").str.to_uppercase(),
        "number": col("k").cast(pl.Int64),
        "or": pl.coalesce("k", pl.lit("none")),
        "or number": pl.coalesce("n", "i"),
        "filled": col("n").fill_null(-1),
        "choice": pl.when(col("l").list.len() > 1).then("n").otherwise("i"),
        "made": pl.concat_list("i", "n").list.sum(),
        "of a struct": pl.struct("l", "i").struct.field("l").list.sum(),
        "not": ~col("b"),
        "known": col("s").is_null() | col("texts").is_null(),
    }


def json_value(rng: random.Random, kind: Any) -> Any:
    if rng.random() < 0.25:
        return None
    match kind:
        case [inner]:
            return [json_value(rng, inner) for _ in range(rng.choice((0, 0, 1, 2, 3)))]
        case pl.Array():
            return [json_value(rng, int), json_value(rng, int)]
        case dict():
            return {name: json_value(rng, of) for name, of in kind.items() if rng.random() < 0.8}
    if kind is float:
        return rng.choice((0, 3, 2.5, -0.0, 1e300))
    if kind is str:
        return rng.choice(("", "a", "7", "é"))
    return rng.random() < 0.5 if kind is bool else rng.choice((0, 3, 255) if kind is pl.UInt8 else (0, 3, -(2**63)))


def json_payload(rng: random.Random) -> bytes:
    return json.dumps({name: json_value(rng, of) for name, of in JSON.items() if rng.random() < 0.8}).encode()


def expressions_of_protobuf() -> dict[str, pl.Expr]:
    col = pl.col
    numbers = ("int32", "opt_uint32", "opt_uint64", "opt_sint64", "float", "opt_double")
    return {
        **{f"rep_int64 {name}": of(col("rep_int64")) for name, of in SHARED.items()},
        **{f"flipped {name}": ~col(name) for name in numbers[:4]},
        **{f"text of {name}": col(name).cast(pl.String) for name in numbers},
        "texts joined": col("rep_string").list.join(","),
        "length of bytes": col("opt_bytes").bin.size(),
        "bytes": col("rep_bytes").list.first().bin.size(),
        "field": col("at").struct.field("name").str.len_chars(),
        "track": col("track").list.eval(pl.element().struct.field("x")).list.sum(),
        "colour": col("colour") - 3,
        "third": col("double") / 3,
        "not": ~col("opt_bool"),
        "strict": col("opt_string").cast(pl.Int32),
    }


def protobuf_payload(rng: random.Random) -> bytes:
    given: dict[str, Any] = {}
    for name, some in {
        "int": (0, 3, 77),
        "double": (0.0, 2.5),
        "float": (0.0, 0.1),
        "string": ("", "7", "\u00e9"),
    }.items():
        for field in Every.DESCRIPTOR.fields:
            if name in field.name and field.name not in ("at", "track") and rng.random() < 0.6:
                chosen = [rng.choice(some) for _ in range(rng.randrange(3))]
                given[field.name] = chosen if field.is_repeated else rng.choice(some)
    if rng.random() < 0.5:
        given |= {"at": {"x": 3, "name": "n"} if rng.random() < 0.5 else {}, "track": [{"x": 1}, {}], "opt_bytes": b"b"}
    return bytes(Every(**given, opt_bool=rng.random() < 0.5).SerializeToString())


IDENTITIES: Mapping[str, Callable[[Flow[Any]], Flow[Any]]] = {
    "map": lambda flow: flow.map(lambda e: e.value),
    "flat_map": lambda flow: flow.flat_map(lambda e: [e.value]),
    "emit": lambda flow: flow.aggregate("before", "_key", Fields(n=count()), emit=lambda e, _: [e.value]),
}
PAYLOADS: Mapping[str, tuple[Any, dict[str, pl.Expr], Callable[[random.Random], bytes], str]] = {
    "json": (Json(JSON), expressions_of_json(), json_payload, "l"),
    "protobuf": (Every, expressions_of_protobuf(), protobuf_payload, "rep_int64"),
}


def flow_of(
    payload: Any, some: dict[str, pl.Expr], items: str, function: Callable[[Flow[Any]], Flow[Any]]
) -> Flow[Any]:
    """A flow in which each expression is a step's, a key's or a field's, with a function in front of its steps."""
    fields = {f"f{n}": last(one) for n, one in enumerate(some.values())}
    made = {f"m{n}": one for n, one in enumerate(some.values())}
    flow = function(Flow("f").source(Topic("t", payload, envelope=False)))
    flow = flow.filter(pl.col(items).list.len().fill_null(0) < 3).map(**made).also_to("aside", _aside)
    flow = flow.aggregate("keys", pl.col("m0").cast(pl.String).fill_null("null"), Fields(n=count(), **fields))
    read = {f"e{n}": f"m{n}" for n in range(len(made))}
    emit = Emit(old="old.f0", new="new.f1", k=pl.col("old.f0").is_null(), l=items, **read)
    flow = flow.aggregate("emits", "_key", Fields(n=count(), **fields), emit=emit)
    return flow.flat_map("l").aggregate("items", "_key", Fields(**{n: last(n) for n in ("l", "old", "new", *read)}))


def _aside(flow: Flow[Any]) -> Flow[Any]:
    return flow.publish("out", key=pl.col("m0").cast(pl.String))


def outcome(flow: Flow[Any], records: list[Record]) -> Any:
    """States by stage as text, in which 1, 1.0 and true differ, dead letters and outputs."""
    both = Both(flow)
    for at in range(0, len(records), 15):
        both.process(records[at : at + 15])
    states = {stage.name: {key: repr(one) for key, one in both.results(stage.name).items()} for stage in flow.stages}
    states.pop("before", None)
    return states, sorted(both.reasons()), [(one.key, decode(one.value).payload) for one in both.memory.outputs]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", PAYLOADS)
def test_a_function_that_returns_its_values_changes_no_result(kind: str, seed: int) -> None:
    rng = random.Random(SEED + seed)
    payload, expressions, draw, items = PAYLOADS[kind]
    some = dict(rng.sample(sorted(expressions.items()), 8))
    records = [record("t", offset, b"k%d" % (offset % 3), draw(rng)) for offset in range(30)]
    wanted = outcome(flow_of(payload, some, items, lambda flow: flow), records)
    for name, function in IDENTITIES.items():
        assert outcome(flow_of(payload, some, items, function), records) == wanted, (name, list(some), SEED + seed)
