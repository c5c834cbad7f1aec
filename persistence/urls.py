"""Store URLs: their options, and their text without secrets."""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from persistence.errors import InvalidUrl

_NAME_MAX: Final = 255
"""Bytes of a file's name, and with `_PATH_MAX` of its path, that Linux takes: limits.h."""
_PATH_MAX: Final = 4095
_NEEDS_QUOTES: Final = re.compile(r"[\x00-\x1f%#?]")
"""Characters of a path that mean something else in a URL, or that `urlsplit` leaves out."""


def redact(url: str) -> str:
    """Return `url` without parts that may be secret: user, password and the values of all options."""
    try:
        parts = urlsplit(url)
    except ValueError:  # any part of an invalid URL may be secret
        return f"{url.partition('://')[0]}://..."
    host = parts.netloc.rpartition("@")[2]
    user = "...@" if "@" in parts.netloc else ""
    options = "&".join(f"{name}=..." for name, _ in parse_qsl(parts.query, keep_blank_values=True))
    return f"{parts.scheme}://{user}{host}{parts.path}{f'?{options}' if options else ''}"


def embedded(scheme: str, path: Path) -> str:
    """The URL of an embedded store in a path of any characters, which `path_of` reads again.

    Args:
        scheme: `lmdb` or `sqlite`.
        path: The path; a relative one is one of the current directory.
    """
    return f"{scheme}://{_NEEDS_QUOTES.sub(lambda found: quote(found[0]), str(path.absolute()))}"


def path_of(url: str, what: str, remedy: str) -> Path:
    """The path that a URL of an embedded store names.

    Args:
        url: The URL.
        what: What it should name: a file or a directory.
        remedy: How to write the URL.

    Raises:
        InvalidUrl: It names none, or the path contains a null character or is too long for a file system.
    """
    parts = urlsplit(url)
    path = unquote(parts.netloc + parts.path)
    if not path or "\0" in path:
        raise InvalidUrl(f"{redact(url)} names no {what}", remedy)
    found = Path(path).absolute()
    if len(os.fsencode(found)) > _PATH_MAX or any(len(os.fsencode(part)) > _NAME_MAX for part in found.parts):
        raise InvalidUrl(f"{redact(url)}: File name too long", remedy)
    return found


def options(url: str, known: Mapping[str, Callable[[str], Any]]) -> dict[str, Any]:
    """Read the options after the `?` of a store's URL.

    Args:
        url: The URL.
        known: Parser by option; a parser raises ValueError for an invalid value.

    Raises:
        InvalidUrl: An option is unknown or its value is invalid. The text never contains the value.
    """
    read = {}
    for name, text in parse_qsl(urlsplit(url).query, keep_blank_values=True):
        if name not in known:
            raise InvalidUrl(f"{redact(url)} has no option {name!r}", f"Known options: {', '.join(known) or 'none'}")
        what = f"{redact(url)}: the value of {name!r} is invalid"
        try:
            read[name] = known[name](text)
        except UnfitValueError as error:
            raise InvalidUrl(what, str(error)) from None
        except ValueError as error:
            raise InvalidUrl(what, "See the store's docs") from error
    return read


class UnfitValueError(ValueError):
    """The value of an option is invalid; the text says what to write, and does not quote the value."""


def choice(*values: str) -> Callable[[str], str]:
    """Parser of an option whose value is one of `values`."""

    def read(text: str) -> str:
        if text not in values:
            raise UnfitValueError(f"Write one of: {', '.join(values)}")
        return text

    return read


def seconds(text: str) -> float:
    """Parser of an option that is a positive number of seconds."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise UnfitValueError("Write a number of seconds greater than 0")
    return number


def whole(low: int, high: int) -> Callable[[str], int]:
    """Parser of an option that is a whole number from `low` to `high`."""

    def read(text: str) -> int:
        digits = text.strip()
        if not digits.isdecimal() or not low <= int(digits[:20]) <= high:
            raise UnfitValueError(f"Write a whole number from {low:,} to {high:,}")
        return int(digits)

    return read
