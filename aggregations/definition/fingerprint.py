"""Canonical text of Python code: the part of a stage's definition hash for a fold or a key function.

It contains arguments and closure variables, but no comments, docstrings or layout. Functions that the code
calls elsewhere are not included.
"""

import ast
import hashlib
import inspect
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

_PARSES = 20
_PAUSE_SECONDS = 0.01
_NOT_OURS = frozenset({"builtins", "typing", "abc", "aggregations.definition.folds", "aggregations.definition.lookups"})
_classes: WeakKeyDictionary[type, str] = WeakKeyDictionary()
_SCALARS = (str, bytes, int, float, complex, type(None), type(Ellipsis))


def describe_object(value: object) -> str:
    """Text of an instance: its class's name and code, and its attributes."""
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}#{_class(kind)}{_attributes(value, frozenset())}"


def describe_callable(function: Callable[..., Any]) -> str:
    """Text of a function, a method, a `partial` or an object with `__call__`."""
    return _value(function, frozenset())


def _attributes(value: object, within: frozenset[int]) -> str:
    slots = [name for kind in type(value).__mro__ for name in _slots(kind) if hasattr(value, name)]
    found = {**{name: getattr(value, name) for name in slots}, **getattr(value, "__dict__", {})}
    return _value(found, within) if found else ""


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _value(value: Any, within: frozenset[int]) -> str:
    """Text of an argument or a closure variable, the same in every process."""
    if isinstance(value, _SCALARS):
        return f"{type(value).__name__}:{value!r}" if type(value) not in _SCALARS else repr(value)
    if id(value) in within:
        return "..."
    inside = within | {id(value)}
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}[{', '.join(_value(one, inside) for one in value)}]"
    if isinstance(value, set | frozenset):
        return f"set[{', '.join(sorted(_value(one, inside) for one in value))}]"
    if isinstance(value, dict):
        items = sorted((_value(name, inside), _value(one, inside)) for name, one in value.items())
        return f"{{{', '.join(f'{name}: {one}' for name, one in items)}}}"
    if isinstance(value, partial):
        return f"partial({_value(value.func, inside)}, {_value(value.args, inside)}, {_value(value.keywords, inside)})"
    if isinstance(value, MethodType):
        return f"{_value(value.__func__, inside)} of {_value(value.__self__, inside)}"
    if isinstance(value, FunctionType):
        return _function(value, inside)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}#{_class(value)}"
    if isinstance(value, ModuleType):
        return value.__name__
    if inspect.isbuiltin(value) or inspect.ismethoddescriptor(value):
        return f"{getattr(value, '__module__', '')}.{value.__qualname__} of {_value(getattr(value, '__self__', None), inside)}"
    text = repr(value)
    if " at 0x" not in text:
        return text
    return f"{type(value).__module__}.{type(value).__qualname__}#{_class(type(value))}{_attributes(value, inside)}"


def _function(function: FunctionType, within: frozenset[int]) -> str:
    closed = {
        name: _cell(cell) for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    }
    given = [function.__defaults__ or (), function.__kwdefaults__ or {}, closed]
    extra = _value(given, within) if any(given) else ""
    return f"function#{_hash(_source_of_function(function))}{extra}"


class _Cell(Protocol):
    cell_contents: Any


def _cell(cell: _Cell) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that is not bound yet
        return None


def _source_of_function(function: FunctionType) -> str:
    # Code objects compare equal if they are the same code in the same line of different files.
    return _source_of_code(function.__code__.co_filename, function.__code__)


@lru_cache(maxsize=1 << 10)  # finding the source parses the whole file
def _source_of_code(_file: str, code: CodeType) -> str:
    node = _node_of(code)
    return _bytecode(code) if node is None else _unparsed(node)


def _node_of(code: CodeType) -> ast.AST | None:
    """The function or lambda in its source file. None if there is no source."""
    try:
        lines, _ = inspect.findsource(code)
        tree = _alone(lambda: ast.parse("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return None
    if code.co_name != "<lambda>":
        named = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and node.name == code.co_name
            and _first_line(node) == code.co_firstlineno
        ]
        return named[0] if len(named) == 1 else None
    places = [place for place in code.co_positions() if place[0] is not None and place[2] is not None]
    return next(
        (
            node
            for node in _lambdas(tree)
            if node.lineno == code.co_firstlineno and all(_within(node.body, place) for place in places[1:])
        ),
        None,
    )


def _first_line(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return min([node.lineno, *(one.lineno for one in node.decorator_list)])


def _lambdas(tree: ast.AST) -> Iterator[ast.Lambda]:
    """All lambdas, inner ones first."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda)]
    return iter(
        sorted(found, key=lambda node: (node.end_lineno or 0, node.end_col_offset or 0, -node.lineno, -node.col_offset))
    )


def _within(body: ast.expr, place: tuple[int | None, int | None, int | None, int | None]) -> bool:
    line, end_line, column, end_column = place
    begin, end = (body.lineno, body.col_offset), (body.end_lineno or 0, body.end_col_offset or 0)
    return begin <= (line or 0, column or 0) and (end_line or 0, end_column or 0) <= end


def _class(kind: type) -> str:
    """Hash of the code of a class and of its user-written bases."""
    if kind not in _classes:
        _classes[kind] = _hash(_class_text(kind))
    return _classes[kind]


def _class_text(kind: type) -> str:
    texts = []
    for one in kind.__mro__:
        if one.__module__ in _NOT_OURS:
            continue
        try:
            # Finding the source of a class parses its module.
            source = textwrap.dedent(_alone(lambda one=one: inspect.getsource(one)))  # type: ignore[misc]
            texts.append(_unparsed(_alone(lambda source=source: ast.parse(source))))  # type: ignore[misc]
        except (OSError, TypeError, SyntaxError):
            codes = (value.__code__ for value in vars(one).values() if isinstance(value, FunctionType))
            texts += [_bytecode(code) for code in codes]
    return "\n".join(texts)


def _alone(parse: Callable[[], T]) -> T:
    """Parse, and retry if another thread parsed at the same time, for example to format a traceback.

    CPython 3.11 has one counter for the depth of syntax trees in all threads, and raises SystemError if the counter
    does not return to its start (CPython issue 106905).
    """
    for _ in range(_PARSES - 1):
        with suppress(SystemError):
            return parse()
        time.sleep(_PAUSE_SECONDS)
    return parse()


def _unparsed(tree: ast.AST) -> str:
    """Source text without comments, docstrings and layout; it is nearly the same in every version of Python."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                node.body = body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def _bytecode(code: CodeType) -> str:
    """Text of code that was typed into an interpreter; it also changes with the version of Python."""
    inner = [_bytecode(one) if isinstance(one, CodeType) else repr(one) for one in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {inner}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:12]
