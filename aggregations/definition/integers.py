"""Numbers in expressions: what a row gives depends on that row alone, and integers never wrap.

Polars computes in the type of its operands and wraps silently: a product of two 32-bit columns, a difference
of unsigned columns. This module computes every integer operation of an expression in a wider type and converts the
result to a signed 64-bit integer; a row whose result does not fit is marked.

Polars divides one value, and multiplies several by the reciprocal of a constant: `col("v") / 49` of 49 is 1.0 in a frame
of one row, and 0.9999999999999999 beside another one. Powers also have a way of their own for one value, and sums:
`col("f") + 0` of -0.0 is 0.0 alone, and -0.0 beside another row. So constants that values are divided by are repeated
for every row, and no frame has only one.
"""

import io
import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, reduce
from typing import Any, NamedTuple, TypeAlias

import polars as pl

from aggregations.errors import FlowError

Tree: TypeAlias = Any
"""A serialized expression."""

LEFT_64_BITS = "an integer in an expression exceeds 64 bits"

_LOW, _HIGH, _UNSIGNED = -(2**63), 2**63 - 1, 2**64 - 1
_OPERATIONS = frozenset({"Plus", "Minus", "Multiply", "FloorDivide", "Modulus"})
_DIVISIONS = frozenset({"TrueDivide", "FloorDivide", "Modulus"})
_FUNCTIONS = frozenset({"Abs", "Negate", "Pow", "SumHorizontal", "MeanHorizontal"})
_OF_LISTS = frozenset({"Sum", "Diff"})
# The sum, difference or quotient of two values of these types fits into 64 bits.
_NARROW = frozenset({pl.Int8, pl.Int16, pl.Int32, pl.UInt8, pl.UInt16, pl.UInt32, pl.Boolean, pl.Null})
_WIDER = frozenset({pl.Int128, getattr(pl, "UInt128", pl.Int128)})
_LATER_ROW = pl.int_range(pl.len(), dtype=pl.Int64) > 0
"""False in the first row only: a choice by what is true in all rows is a constant for polars."""
_HEIGHT, _OVERFLOW = "\0height", "\0overflow"  # not valid as names of a message's columns
# Above this estimate a power may exceed even 128 bits.
_POWER = 2.0**64


class Exact(NamedTuple):
    """An expression whose integers do not wrap.

    Attributes:
        value: The expression; its integer operations return Int64, or null in rows where one overflows.
        overflow: Boolean, never null: whether an operation overflowed that the row's result depends on. None if no
            overflow is possible.
        paired: It has to be evaluated for two rows at least.
    """

    value: pl.Expr
    overflow: pl.Expr | None = None
    paired: bool = False


def exact(expr: pl.Expr, dtypes: Mapping[str, pl.DataType]) -> Exact:
    """Return the expression over columns of these types, computed in 64 bits.

    Explicit casts are left to polars. `when(...).then(...).otherwise(...)` overflows if the chosen branch does.

    Raises:
        FlowError: It computes with integers inside lists or structs, where overflow cannot be detected.
    """
    if expr.meta.is_column():
        return Exact(expr)
    known = tuple((name, dtypes[name]) for name in sorted(set(expr.meta.root_names())) if name in dtypes)
    return _exact(expr.meta.serialize(), known)


def select_exact(frame: pl.DataFrame, wanted: Mapping[str, pl.Expr]) -> tuple[pl.DataFrame, pl.Series | None]:
    """Evaluate expressions for every row, in 64 bits.

    Returns:
        One column per name of `wanted`, and a Boolean column of the rows in which an integer overflowed; None if there
        are none.

    Raises:
        Exception: Any error of polars if it cannot evaluate an expression for a row, and `FlowError`.
    """
    found = {name: exact(one, frame.schema) for name, one in wanted.items()}
    if not (frame.width and any(one.paired for one in found.values())):
        return _selected(frame, found)
    if frame.height == 1:
        values, overflows = _selected(pl.concat([frame, frame.clear(1)], rechunk=True), found)
        return values.head(1), None if overflows is None else overflows.head(1)
    # Polars may keep a column of equal values as a constant; a series is none.
    return _selected(pl.DataFrame(frame.get_columns()), found)


def _selected(frame: pl.DataFrame, found: Mapping[str, Exact]) -> tuple[pl.DataFrame, pl.Series | None]:
    overflow = _either(*(one.overflow for one in found.values()))
    # The extra column keeps the height if every expression is a literal.
    selection = [pl.int_range(pl.len()).alias(_HEIGHT), *(one.value.alias(name) for name, one in found.items())]
    if overflow is None:
        return frame.select(selection).drop(_HEIGHT), None
    selection.append(overflow.alias(_OVERFLOW))
    # Lazily, so that polars computes common parts of a value and its overflow once; but it does not check types without rows.
    values = frame.lazy().select(selection).collect() if frame.height else frame.select(selection)
    mask = values.get_column(_OVERFLOW)
    return values.drop(_HEIGHT, _OVERFLOW), mask if mask.any() else None


@lru_cache(maxsize=1024)
def _exact(serialized: bytes, dtypes: tuple[tuple[str, pl.DataType], ...]) -> Exact:
    with warnings.catch_warnings():
        # Polars warns that another version of polars may not read it.
        warnings.simplefilter("ignore")
        of = pl.Expr.deserialize(io.BytesIO(serialized))
        tree = json.loads(of.meta.serialize(format="json"))
        divides, computes = _contains(tree, _divides), _computes(tree)
        paired = divides or _contains(tree, _differs_alone)
        if not (divides or computes):
            return Exact(of, paired=paired)
        tree = _repeating(tree)
        if not computes:
            return Exact(_expression(tree), paired=paired)
        tree, overflow = _Rewriting(dict(dtypes)).of(tree)
        return Exact(_expression(tree), overflow, paired)


class _Rewritten(NamedTuple):
    tree: Tree
    overflow: pl.Expr | None = None


class _Rewriting:
    """Rewrites one expression, from its leaves up."""

    def __init__(self, dtypes: Mapping[str, pl.DataType]) -> None:
        self._nothing = pl.DataFrame(schema=dtypes)

    def of(self, tree: Tree) -> _Rewritten:
        if not (_computes(tree) or _chooses(tree)):
            return _Rewritten(tree)
        ((kind, body),) = tree.items()
        match kind:
            case "Alias":
                inner = self.of(body[0])
                return _Rewritten({kind: [inner.tree, *body[1:]]}, inner.overflow)
            case "BinaryExpr":
                return self._binary(body)
            case "Function":
                return self._function(body)
            case "Ternary":
                return self._ternary(body)
            case _ if isinstance(body, dict) and "expr" in body:
                inner = self.of(body["expr"])
                rest = {name: one for name, one in body.items() if name != "expr"}
                if _computes(rest) and _has_integers(self._dtype(inner.tree)):
                    raise _inside()
                return _Rewritten({kind: {**body, "expr": inner.tree}}, inner.overflow)
            case _ if not _computes(tree):
                return _Rewritten(tree)
            case _:
                raise FlowError(f"an expression computes inside {kind}; pass a plain function of the element instead")

    def _binary(self, body: Tree) -> _Rewritten:
        left, right = self.of(body["left"]), self.of(body["right"])
        tree = {"BinaryExpr": {**body, "left": left.tree, "right": right.tree}}
        overflow = _either(left.overflow, right.overflow)
        dtypes = self._dtype(left.tree), self._dtype(right.tree)
        if body["op"] not in _OPERATIONS or not self._whole(*dtypes):
            return _Rewritten(tree, overflow)
        # A product of two unsigned 32-bit integers has 64 bits, and no sign.
        narrow = _narrow(dtypes) and not (body["op"] == "Multiply" and all(one == pl.UInt32 for one in dtypes))
        first, second = _operands([left.tree, right.tree], dtypes, narrow=narrow)
        tree["BinaryExpr"].update(left=_tree(first.value), right=_tree(second.value))
        return _narrowed(tree, _either(overflow, first.overflow, second.overflow), safe=narrow)

    def _function(self, body: Tree) -> _Rewritten:
        inputs = [self.of(one) for one in body["input"]]
        trees = [one.tree for one in inputs]
        overflow = _either(*(one.overflow for one in inputs))
        tree = {"Function": {**body, "input": trees}}
        name, detail = _named(body["function"])
        if name in ("ListExpr", "ArrayExpr"):
            return self._of_list(tree, overflow, _named(detail)[0])
        dtypes = [self._dtype(one) for one in trees]
        if name not in _FUNCTIONS or not self._whole(*dtypes):
            return _Rewritten(tree, overflow)
        narrow = _narrow(dtypes) and name != "Pow"
        operands = _operands(trees, dtypes, narrow=narrow)
        overflow = _either(overflow, *(one.overflow for one in operands))
        if name == "Negate":
            tree = _tree(operands[0].value * pl.lit(-1, pl.Int64))
        elif name == "Pow":
            base, exponent = (one.value for one in operands)
            estimate = base.cast(pl.Float64).pow(exponent.cast(pl.Float64)).abs()
            beyond = (estimate >= _POWER).fill_null(value=False)
            tree = _tree(pl.when(~beyond).then(base.pow(exponent)))
            return _narrowed(tree, _either(overflow, beyond), safe=False)
        else:
            tree["Function"]["input"] = [_tree(one.value) for one in operands]
        if name == "MeanHorizontal":
            return _Rewritten(tree, overflow)
        return _narrowed(tree, overflow, safe=narrow)

    def _of_list(self, tree: Tree, overflow: pl.Expr | None, name: str) -> _Rewritten:
        body = tree["Function"]
        dtype = self._dtype(body["input"][0]) if name in _OF_LISTS else None
        inner = getattr(dtype, "inner", None)
        if inner is not None and inner.is_float() and name == "Sum":
            # The sum of no floats is -0.0, or 0.0 beside a list with a null.
            value = _expression(tree)
            return _Rewritten(_tree(pl.when(value == 0).then(pl.lit(0.0, inner)).otherwise(value)), overflow)
        if inner is None or not (inner.is_integer() or inner == pl.Boolean):
            return _Rewritten(tree, overflow)
        if name != "Sum":
            raise _inside()
        assert dtype is not None
        wide = pl.Array(pl.Int128, dtype.size) if isinstance(dtype, pl.Array) else pl.List(pl.Int128)
        body["input"][0] = _tree(_expression(body["input"][0]).cast(wide))
        return _narrowed(tree, overflow, safe=False)

    def _ternary(self, body: Tree) -> _Rewritten:
        predicate, truthy, falsy = (self.of(body[name]) for name in ("predicate", "truthy", "falsy"))
        branches = truthy.tree, falsy.tree
        if all(_literal(one) is not None or self._dtype(one).is_integer() for one in branches):
            # In an empty frame, polars infers another type for a choice between literals, and wraps when it casts it.
            branches = _typed(branches[0]), _typed(branches[1])
        tree = {"Ternary": {"predicate": predicate.tree, "truthy": branches[0], "falsy": branches[1]}}
        if truthy.overflow is None and falsy.overflow is None:
            return _Rewritten(tree, predicate.overflow)
        never = pl.lit(value=False)
        chosen = (
            pl.when(_expression(predicate.tree))
            .then(never if truthy.overflow is None else truthy.overflow)
            .otherwise(never if falsy.overflow is None else falsy.overflow)
        )
        return _Rewritten(tree, _either(predicate.overflow, chosen))

    def _whole(self, *dtypes: pl.DataType) -> bool:
        """Whether all operands are integers."""
        if any(dtype.is_nested() and _has_integers(dtype) for dtype in dtypes):
            raise _inside()
        whole = all(dtype.is_integer() or dtype in (pl.Boolean, pl.Null) for dtype in dtypes)
        return whole and any(dtype != pl.Null for dtype in dtypes)

    def _dtype(self, tree: Tree) -> pl.DataType:
        # Evaluated, not planned: polars plans a choice between literals as 32 bits and computes it in 64.
        return self._nothing.select(_expression(tree).alias("_")).schema["_"]


class _Operand(NamedTuple):
    value: pl.Expr
    overflow: pl.Expr | None = None


def _narrow(dtypes: Iterable[pl.DataType]) -> bool:
    return all(dtype in _NARROW for dtype in dtypes)


def _operands(trees: Iterable[Tree], dtypes: Iterable[pl.DataType], *, narrow: bool) -> list[_Operand]:
    """Operands, cast to a type in which the operation does not wrap."""
    found = []
    for tree, dtype in zip(trees, dtypes, strict=True):
        value = _expression(tree)
        wide = value.cast(pl.Int64 if narrow else pl.Int128, strict=False)
        if dtype in _WIDER:
            within = wide.is_between(pl.lit(_LOW, pl.Int128), pl.lit(_UNSIGNED, pl.Int128)).fill_null(value=False)
            found.append(_Operand(pl.when(within).then(wide), value.is_not_null() & ~within))
        else:
            found.append(_Operand(wide))
    return found


def _narrowed(tree: Tree, overflow: pl.Expr | None, *, safe: bool) -> _Rewritten:
    """Convert the result of an operation to Int64."""
    if safe:
        return _Rewritten(tree, overflow)
    wide = _expression(tree)
    value = wide.cast(pl.Int64, strict=False)
    return _Rewritten(_tree(value), _either(overflow, value.is_null() & wide.is_not_null()))


def _divides(name: str, below: Tree) -> bool:
    return name == "op" and below in _DIVISIONS


def _is_power(name: str, below: Tree) -> bool:
    return name == "function" and _named(below)[0] == "Pow"


def _differs_alone(name: str, below: Tree) -> bool:
    return (name == "op" and below in ("Plus", "Minus")) or _is_power(name, below)


def _contains(tree: Tree, wanted: Callable[[str, Tree], bool]) -> bool:
    """Whether a node of a serialized expression is as wanted, by its name and what is below it."""
    if isinstance(tree, dict):
        return any(
            wanted(name, below) or (name not in ("Literal", "Column") and _contains(below, wanted))
            for name, below in tree.items()
        )
    return isinstance(tree, list) and any(_contains(one, wanted) for one in tree)


def _is_constant(tree: Tree) -> bool:
    """Whether it reads no column, and no element of a list."""
    if isinstance(tree, dict):
        return all(
            name == "Literal" or (name not in ("Column", "Field") and _is_constant(below))
            for name, below in tree.items()
        )
    return all(map(_is_constant, tree)) if isinstance(tree, list) else tree not in ("Element", "Len")


def _repeating(tree: Tree) -> Tree:
    """The expression with each constant that it divides, or divides by, repeated for every row."""
    if isinstance(tree, list):
        return [_repeating(one) for one in tree]
    if not isinstance(tree, dict) or not _contains(tree, _divides):
        return tree
    found = {name: below if name in ("Literal", "Column") else _repeating(below) for name, below in tree.items()}
    if "Eval" in found and _contains(found["Eval"].get("evaluation"), _is_power):
        raise FlowError("an expression divides and computes powers inside lists; pass a plain function instead")
    match found:
        case {"BinaryExpr": {"left": left, "op": op, "right": right}} if op in _DIVISIONS:
            operands = {"left": left, "right": right}
            if _is_constant(left) != _is_constant(right):
                name = "left" if _is_constant(left) else "right"
                constant = _expression(operands[name])
                operands[name] = _tree(pl.when(_LATER_ROW).then(constant).otherwise(constant))
            return {"BinaryExpr": {**found["BinaryExpr"], **operands}}
    return found


def _computes(tree: Tree) -> bool:
    """Whether it contains an operation that may wrap."""
    return _contains(
        tree,
        lambda name, below: (name == "op" and below in _OPERATIONS) or (name == "function" and _may_wrap(below)),
    )


def _chooses(tree: Tree) -> bool:
    """Whether it contains a choice between values."""
    return _contains(tree, lambda name, _: name == "Ternary")


def _literal(tree: Tree) -> int | None:
    """The value of an integer literal without a type."""
    match tree:
        case {"Literal": {"Dyn": {"Int": int(number)}}}:
            return number
    return None


def _typed(tree: Tree) -> Tree:
    number = _literal(tree)
    if number is None or not _LOW <= number <= _UNSIGNED:
        return tree
    return _tree(pl.lit(number, pl.UInt64 if number > _HIGH else pl.Int64))


def _may_wrap(function: Tree) -> bool:
    name, detail = _named(function)
    if name in ("ListExpr", "ArrayExpr"):
        return _named(detail)[0] in _OF_LISTS
    return name in _FUNCTIONS


def _named(function: Tree) -> tuple[str, Tree]:
    """Name of a function, and its options."""
    if isinstance(function, dict) and len(function) == 1:
        return next(iter(function.items()))
    return str(function), None


def _has_integers(dtype: pl.DataType) -> bool:
    if isinstance(dtype, pl.Struct):
        return any(_has_integers(field.dtype) for field in dtype.fields)  # type: ignore[arg-type]
    if isinstance(dtype, pl.List | pl.Array):
        return _has_integers(dtype.inner)  # type: ignore[arg-type]
    return dtype.is_integer()


def _either(*marks: pl.Expr | None) -> pl.Expr | None:
    given = [one for one in marks if one is not None]
    return reduce(lambda one, other: one | other, given) if given else None


def _expression(tree: Tree) -> pl.Expr:
    try:
        return pl.Expr.deserialize(io.StringIO(json.dumps(tree)), format="json")
    except pl.exceptions.ComputeError as error:
        # JSON supports neither.
        raise FlowError(
            "an expression divides or computes with integers, and contains NaN or infinity; use is_nan() or is_infinite()"
        ) from error


def _tree(expr: pl.Expr) -> Tree:
    return json.loads(expr.meta.serialize(format="json"))


def _inside() -> FlowError:
    return FlowError("an expression computes with integers inside lists or structs; pass a plain function instead")
