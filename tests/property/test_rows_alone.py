"""What an expression gives for a row does not depend on the rows beside it, to the last bit.

Polars has other ways for one value than for several, and for constants: 49 / 49 was 1.0 alone, and 0.9999999999999999
beside another row.
"""

import math
import random
import struct
import warnings
from collections.abc import Callable
from typing import Any

import polars as pl
import pytest

from aggregations import Fields, Flow, Json, Topic, count
from aggregations.definition.integers import select_exact
from aggregations.errors import FlowError
from tests.support.both import Both, record

SEED = 5
HEIGHTS = (1, 2, 3, 7, 8, 9, 1_000)
CONSTANTS: tuple[Any, ...] = (49, 0.1, 3, 7.0, -3, 0.3, 0, -0.0)
COLUMNS = ("f", "g", "i", "u")
FUNCTIONS = (
    *("exp", "log", "log10", "log1p", "sqrt", "cbrt", "sin", "cos", "tan", "sinh", "tanh", "arcsin", "arctan", "abs"),
    *("sign", "floor", "ceil", "round", "degrees", "radians", "is_nan", "is_finite"),
)
OPERATIONS: dict[str, Callable[[Any, Any], pl.Expr]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "**": lambda a, b: a**b,
}


def table() -> pl.DataFrame:
    rng = random.Random(SEED)
    floats = [49.0, 0.3, 0.1, -0.0, 0.0, 1e300, 5e-324, 200.0, 1 / 3, math.inf, math.nan, None]
    floats += [rng.uniform(-100, 100) for _ in range(500)] + [float(rng.randrange(1_000)) for _ in range(600)]
    whole = [49, 0, -7, 2**53 + 1, None, 1, 3] + [rng.randrange(-1_000, 1_000) for _ in range(len(floats) - 7)]
    return pl.DataFrame(
        {
            "f": floats,
            "g": floats[::-1],
            "i": whole,
            "u": pl.Series([abs(one or 0) % 2**32 for one in whole], dtype=pl.UInt32),
            "l": [None if one is None else [one, 0.7, 0.1][: 1 + place % 3] for place, one in enumerate(floats)],
        }
    )


def expressions() -> dict[str, pl.Expr]:
    found: dict[str, pl.Expr] = {name: getattr(pl.col("f"), name)() for name in FUNCTIONS}
    for sign, make in OPERATIONS.items():
        for column in COLUMNS:
            found |= {f"{column} {sign} {other}": make(pl.col(column), pl.col(other)) for other in COLUMNS}
            for constant in CONSTANTS:
                found[f"{column} {sign} {constant}"] = make(pl.col(column), pl.lit(constant))
                found[f"{constant} {sign} {column}"] = make(pl.lit(constant), pl.col(column))
                found[f"{column} {sign} ({constant} + 1)"] = make(pl.col(column), pl.lit(constant) + pl.lit(1.0))
    f, several = pl.col("f"), pl.col("l")
    return found | {
        "nested": ((f / 49).floor() + pl.col("i") / 10) / 7,
        "choice": pl.when(f > 0).then(f / 49).otherwise(f // 0.1),
        "struct": pl.struct(a=f / 49).struct.field("a"),
        "32 bits": f.cast(pl.Float32) / 49,
        "list / 49": several / 49,
        "list % 0.1": several % 0.1,
        "each / 49": several.list.eval(pl.element() / 49),
        "mean of a list": several.list.mean(),
        "mean": pl.mean_horizontal("f", "g", pl.lit(0.1)),
        "angle": pl.arctan2(f, pl.lit(3.0)),
        "logarithm": f.log(2.5),
    }


def bits(value: Any) -> Any:
    match value:
        case float():
            return "nan" if math.isnan(value) else struct.pack("d", value)
        case list():
            return [bits(one) for one in value]
    return value


def results(frame: pl.DataFrame, expression: pl.Expr) -> list[Any]:
    values, overflow = select_exact(frame, {"r": expression})
    marks = [False] * frame.height if overflow is None else overflow.to_list()
    return [(bits(value), mark) for value, mark in zip(values["r"].to_list(), marks, strict=True)]


TABLE = table()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sign", [*OPERATIONS, "others"])
def test_a_row_gives_the_same_in_frames_of_every_height(sign: str) -> None:
    rng = random.Random(SEED)
    for name, expression in expressions().items():
        if sign != next((one for one in name.split(" ") if one in OPERATIONS), "others"):
            continue
        try:
            whole = results(TABLE, expression)
        except (FlowError, pl.exceptions.PolarsError):
            continue  # refused
        for height in HEIGHTS:
            odd = range(12) if height == 1 else (0, 3)  # the first values, -0.0 among them
            for start in [*odd, *(rng.randrange(TABLE.height - height) for _ in range(4 if height == 1 else 2))]:
                part = TABLE[start : start + height]
                pieces = pl.concat([part[:1], part[1:]], rechunk=False)
                for frame in (part, pieces):
                    assert results(frame, expression) == whole[start : start + height], (name, height, start, SEED)


def test_a_division_is_that_of_two_numbers() -> None:
    frame = pl.DataFrame({"f": [49.0, 0.3, 200.0]}).with_columns(constant=pl.lit(49.0))
    for part in (frame, frame[:1], frame[1:2], frame[:2]):
        floats = part["f"].to_list()
        for divisor in (pl.lit(49), pl.lit(7) * pl.lit(7.0), pl.col("constant")):
            assert select_exact(part, {"r": pl.col("f") / divisor})[0]["r"].to_list() == [one / 49.0 for one in floats]


def test_the_sum_of_no_floats_is_zero_whatever_is_beside_it() -> None:
    lists = pl.List(pl.Float64)
    for beside in ([], [[None]], [[1.0]], [[-0.0]]):
        frame = pl.DataFrame({"l": [[], *beside]}, schema={"l": lists})
        assert results(frame, pl.col("l").list.sum().cast(pl.String))[0] == ("0.0", False), beside


def test_a_copy_has_the_key_of_its_event_whatever_is_beside_it() -> None:
    key = (pl.col("v") / 49).floor().cast(pl.Int64)
    flow = Flow("f").source(Topic("t", Json({"v": int}), envelope=False)).aggregate("bucket", key, Fields(n=count()))
    for batches in ([[49], [200]], [[49, 200]], [[200, 49, 3]]):
        both = Both(flow)
        offset = 0
        for batch in batches:
            both.process([record("t", offset + n, b"k", b'{"v":%d}' % v) for n, v in enumerate(batch)])
            offset += len(batch)
        assert {b"1", b"4"} <= both.results("bucket").keys() <= {b"0", b"1", b"4"}
        assert both.results("bucket")[b"1"] == {"n": 1}


def test_powers_beside_a_division_inside_lists_are_refused() -> None:
    with pytest.raises(FlowError, match="powers inside lists; pass a plain function"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        select_exact(TABLE, {"r": pl.col("l").list.eval(pl.element() ** 2 / 3)})
