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
_NOT_OURS = frozenset({"builtins", "typing", "abc", "aggregations.definition.folds"})
_classes: WeakKeyDictionary[type, str] = WeakKeyDictionary()
_SCALARS = (str, bytes, int, float, complex, type(None), type(Ellipsis))


def describe_object(of: object) -> str:
    """Text of an instance: its class's name and code, and its attributes."""
    kind = type(of)
    return f"{kind.__module__}.{kind.__qualname__}#{_class(kind)}{_attributes(of, frozenset())}"


def describe_callable(function: Callable[..., Any]) -> str:
    """Text of a function, a method, a `partial` or an object with `__call__`."""
    return _value(function, frozenset())


def _attributes(of: object, within: frozenset[int]) -> str:
    slots = [name for kind in type(of).__mro__ for name in _slots(kind) if hasattr(of, name)]
    found = {**{name: getattr(of, name) for name in slots}, **getattr(of, "__dict__", {})}
    return _value(found, within) if found else ""


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _value(of: Any, within: frozenset[int]) -> str:
    """Text of an argument or a closure variable, the same in every process."""
    if isinstance(of, _SCALARS):
        return f"{type(of).__name__}:{of!r}" if type(of) not in _SCALARS else repr(of)
    if id(of) in within:
        return "..."
    inside = within | {id(of)}
    if isinstance(of, list | tuple):
        return f"{type(of).__name__}[{', '.join(_value(one, inside) for one in of)}]"
    if isinstance(of, set | frozenset):
        return f"set[{', '.join(sorted(_value(one, inside) for one in of))}]"
    if isinstance(of, dict):
        items = sorted((_value(name, inside), _value(one, inside)) for name, one in of.items())
        return f"{{{', '.join(f'{name}: {one}' for name, one in items)}}}"
    if isinstance(of, partial):
        return f"partial({_value(of.func, inside)}, {_value(of.args, inside)}, {_value(of.keywords, inside)})"
    if isinstance(of, MethodType):
        return f"{_value(of.__func__, inside)} of {_value(of.__self__, inside)}"
    if isinstance(of, FunctionType):
        return _function(of, inside)
    if isinstance(of, type):
        return f"{of.__module__}.{of.__qualname__}#{_class(of)}"
    if isinstance(of, ModuleType):
        return of.__name__
    if inspect.isbuiltin(of) or inspect.ismethoddescriptor(of):
        return f"{getattr(of, '__module__', '')}.{of.__qualname__} of {_value(getattr(of, '__self__', None), inside)}"
    text = repr(of)
    if " at 0x" not in text:
        return text
    return f"{type(of).__module__}.{type(of).__qualname__}#{_class(type(of))}{_attributes(of, inside)}"


def _function(of: FunctionType, within: frozenset[int]) -> str:
    closed = {name: _cell(cell) for name, cell in zip(of.__code__.co_freevars, of.__closure__ or (), strict=True)}
    given = [of.__defaults__ or (), of.__kwdefaults__ or {}, closed]
    extra = _value(given, within) if any(given) else ""
    return f"function#{_hash(_source_of_function(of))}{extra}"


class _Cell(Protocol):
    cell_contents: Any


def _cell(cell: _Cell) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that is not bound yet
        return None


def _source_of_function(of: FunctionType) -> str:
    # Code objects compare equal if they are the same code in the same line of different files.
    return _source_of_code(of.__code__.co_filename, of.__code__)


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
