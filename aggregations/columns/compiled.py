"""Functions that numba compiles to machine code.

A module with such functions is imported only where they run: importing numba takes half a second of CPU.
"""

from collections.abc import Callable
from typing import Any, Final, TypeVar

import numba

F = TypeVar("F", bound=Callable[..., Any])

BYTES: Final = numba.types.Array(numba.uint8, 1, "C", readonly=True)
"""Bytes of an Arrow buffer, which is not written to."""
NUMBERS: Final = numba.types.Array(numba.int64, 1, "C", readonly=True)


def compiled(signature: Any) -> Callable[[F], F]:
    """Compile a function when its module is imported, without the GIL, or load it from numba's cache on disk.

    It is compiled once per machine. The cache is next to the module or, if that directory is not writable, in the
    user's own; a module that is not in a file is compiled again in each process.

    Args:
        signature: Types of the result and the arguments.
    """

    def decorate(function: F) -> F:
        try:
            made: F = numba.njit(signature, cache=True, nogil=True)(function)
        except RuntimeError as error:
            if "cannot cache function" not in str(error):
                raise
            made = numba.njit(signature, nogil=True)(function)
        return made

    return decorate
