"""Exceptions of user code, as dead letters describe them."""

import sys
from dataclasses import dataclass
from traceback import walk_tb
from types import FrameType, TracebackType
from typing import Final, Self

TEXT_BYTES: Final = 1000
"""Longest text of an exception that is kept, in bytes of UTF-8."""

_OURS: Final = frozenset({"envelope", "persistence", "aggregations", "jobs"})


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception of user code.

    Attributes:
        kind: Name of the exception's type.
        at: File, line and function in that code, such as `fleet.py:14 in fold`; empty when no line is known.
        text: The exception's own text, at most `TEXT_BYTES` bytes. It may quote the record, and in a fold the state of
            its key: it belongs only in the record's own dead letter, never in logs.
    """

    kind: str
    at: str = ""
    text: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """Describe an exception that was caught."""
        return cls(type(error).__name__, _at(error.__traceback__), _text(error))

    def __str__(self) -> str:
        return f"{self.kind} at {self.at}" if self.at else self.kind


def cut(text: str) -> str:
    """Cut a text to at most `TEXT_BYTES` bytes of valid UTF-8."""
    return text.encode(errors="backslashreplace")[:TEXT_BYTES].decode(errors="ignore")


def _text(error: BaseException) -> str:
    try:
        return cut(str(error))
    except Exception:
        return ""


def _at(traceback: TracebackType | None) -> str:
    """The innermost line of the user's own code; for an error in a library, the line that calls the library."""
    frames = [(frame, line) for frame, line in walk_tb(traceback) if _package(frame) not in _OURS]
    own = [one for one in frames if not _is_library(one[0])] or frames[:1]
    if not own:
        return ""
    frame, line = own[-1]
    name = frame.f_code.co_filename.replace("\\", "/").rpartition("/")[2]
    return f"{name}:{line} in {frame.f_code.co_name}"


def _package(frame: FrameType) -> str:
    name = str(frame.f_globals.get("__name__", ""))
    # The demo counts as user code.
    return "" if name.startswith("jobs.demo.") else name.partition(".")[0]


def _is_library(frame: FrameType) -> bool:
    return _package(frame) in sys.stdlib_module_names or "site-packages" in frame.f_code.co_filename
