"""Functions that numba compiles to machine code.

A module with such functions is imported only where they run: importing numba takes half a second of CPU.
"""

from collections.abc import Callable
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeVar

import numba
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic

F = TypeVar("F", bound=Callable[..., Any])

BYTES: Final = types.Array(numba.uint8, 1, "C", readonly=True)
"""Bytes of an Arrow buffer, which is not written to."""
NUMBERS: Final = types.Array(numba.int64, 1, "C", readonly=True)
SPANS: Final = types.Tuple((BYTES, NUMBERS, NUMBERS))
"""The members of `arrays.Spans`."""

SOURCES: Final = (
    *("aggregations.columns", "envelope", "envelope.dedup", "envelope.filters"),
    *("persistence.compiled", "persistence.lmdb.text_kernels"),
)
"""Packages, with all of their modules, and modules from which compiled functions use constants or other functions."""


@cache
def version() -> str:
    """Return a digest of the source code of `SOURCES`; of none where it is not in files, and nothing is kept on disk."""
    digest = sha256()
    for name in SOURCES:
        for file in _files(name):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _files(name: str) -> list[Path]:
    """The files of a module, or of all modules of a package, without importing them."""
    spec = find_spec(name)
    if spec is None:
        return []
    if spec.submodule_search_locations is None:
        return [Path(spec.origin)] if spec.has_location and spec.origin else []
    return [file for one in spec.submodule_search_locations for file in sorted(Path(one).glob("*.py"))]


def compiled(signature: Any = None, *, allocates: bool = True) -> Callable[[F], F]:
    """Compile a function without the GIL, or load it from numba's cache on disk.

    It is compiled once per machine: when its module is imported, or without a signature when it is first called. The
    cache is next to the module or, if that directory is not writable, in the user's own; a module that is not in a
    file is compiled again in each process. The cache looks only at the function's own module, and compiled code
    contains constants and functions of others. The function's name in the cache therefore contains a digest of them all.

    Args:
        signature: Types of the result and the arguments.
        allocates: The function creates arrays. If not, it counts no references to them, which takes half of the time
            of small functions and of their compilation.
    """
    options = {"nogil": True} if allocates else {"nogil": True, "_nrt": False}

    def decorate(function: F) -> F:
        function.__qualname__ += f"_{version()}"
        try:
            made: F = numba.njit(signature, cache=True, **options)(function)
        except RuntimeError as error:
            if "cannot cache function" not in str(error):
                raise
            made = numba.njit(signature, **options)(function)
        return made

    return decorate


def helper(function: F) -> F:
    """Compile a function into those that call it."""
    made: F = numba.njit(nogil=True, forceinline=True)(function)
    return made


@intrinsic  # type: ignore[untyped-decorator]
def pointer(context: Any, address: Any) -> Any:
    """An address as a pointer, for `numba.carray`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@helper
def borrowed(array: Any) -> Any:
    """The same array without a count of its references, which each call of a function would change.

    The array itself must be used later in the function: it may be freed after its last use.
    """
    return numba.carray(pointer(array.ctypes.data), array.shape, array.dtype)


@intrinsic  # type: ignore[untyped-decorator]
def copy_bytes(context: Any, target: Any, at: Any, source: Any, first: Any, count: Any) -> Any:
    """Copy `count` bytes from `source[first:]` to `target[at:]`, which must not overlap; these numbers are not checked."""
    for array in (target, source):
        if array.layout != "C" or array.dtype.bitwidth != 8:
            raise TypingError(f"bytes without gaps are copied, not {array}")

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kinds = signature.args
        target, at, source, first, count = arguments
        to = builder.gep(context.make_array(kinds[0])(context, builder, target).data, [at])
        of = builder.gep(context.make_array(kinds[2])(context, builder, source).data, [first])
        cgutils.raw_memcpy(builder, to, of, count, 1)
        return context.get_dummy_value()

    return types.void(target, types.int64, source, types.int64, types.int64), generate
