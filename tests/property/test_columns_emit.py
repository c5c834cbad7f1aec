"""What `Emit` passes on, compared between the vectorised path and the definition: states of the stage behind it."""

from typing import Any

import polars as pl
from hypothesis import given
from hypothesis import strategies as st

from aggregations.definition.aggregates import FieldAggregate, count, total
from aggregations.definition.emit import Emit
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from tests.property.test_columns_fields import TOPIC, aggregates, batches
from tests.support.both import Both, record


@st.composite
def emits(draw: st.DrawFn, fields: dict[str, FieldAggregate]) -> Emit:
    """Columns `c0` and `c1` of text or numbers as the next stage can fold them, and perhaps a condition."""
    names = [
        name
        for name, field in fields.items()
        if field.result_type(pl.Int64()) is not None and field.kind != "quantiles"
    ]
    states = [f"{when}.{name}" for name in names for when in ("old", "new")]
    read = st.sampled_from([*states, *states, "opt_int64", "opt_string"])
    number = st.builds(lambda name: pl.col(name).cast(pl.Int64, strict=False) * 2, read)
    emit = Emit(
        key=draw(st.sampled_from(["string", "int32"])), c0=draw(read | number), c1=draw(read), n=pl.col("opt_int32") + 1
    )
    if draw(st.booleans()) and any(str(one).startswith("new.") for one in (emit.columns["c0"], emit.columns["c1"])):
        emit = emit.changed()
    if names and draw(st.booleans()):
        changed = pl.col(f"new.{names[0]}").ne_missing(pl.col(f"old.{names[0]}"))
        emit = emit.when(draw(st.sampled_from([changed, pl.col("opt_bool"), pl.col("opt_int64") * 4 > 0])))
    return emit


@st.composite
def flows(draw: st.DrawFn) -> Flow[Any]:
    found = draw(st.lists(aggregates(), min_size=1, max_size=3), label="fields")
    fields = {"n": count(), **{f"f{i}": one for i, one in enumerate(found)}}
    key = draw(st.sampled_from([pl.when(pl.col("string") != "").then("string"), "int32"]))
    flow: Flow[Any] = Flow("f").source(TOPIC)
    flow = flow.aggregate("one", key, Fields(**fields), co_partitioned=False, emit=draw(emits(fields)))
    if draw(st.booleans(), label="function"):
        flow = flow.filter(lambda element: element["n"] != 3)
    flow = flow.map(n=pl.col("n") + 1)
    return flow.aggregate("two", "key", Fields(c=count("c0"), d=count("c1"), n=total("n")), co_partitioned=False)


@given(flows(), batches())
def test_columns_emit_what_the_definition_emits(flow: Flow[Any], found: list[list[tuple[int, bytes]]]) -> None:
    both = Both(flow)
    for batch in found:
        both.process([record(TOPIC.name, offset, b"k", value) for offset, value in batch])
