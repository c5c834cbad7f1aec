"""Store URLs: their options, and how to show one without its secrets."""

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from persistence.errors import InvalidUrl


def redact(url: str) -> str:
    """Return `url` without what may be secret: user, password, the values of all options."""
    try:
        parts = urlsplit(url)
    except ValueError:  # what is secret in it, nobody can tell
        return f"{url.partition('://')[0]}://..."
    host = parts.netloc.rpartition("@")[2]
    user = "...@" if "@" in parts.netloc else ""
    options = "&".join(f"{name}=..." for name, _ in parse_qsl(parts.query, keep_blank_values=True))
    return f"{parts.scheme}://{user}{host}{parts.path}{f'?{options}' if options else ''}"


def options(url: str, known: Mapping[str, Callable[[str], Any]]) -> dict[str, Any]:
    """Read the options behind the `?` of a store's URL.

    Args:
        url: The URL.
        known: Per option what makes a value of its text; a ValueError says that it cannot.

    Raises:
        InvalidUrl: An option is unknown or has an impossible value. The text never has the value.
    """
    read = {}
    for name, text in parse_qsl(urlsplit(url).query, keep_blank_values=True):
        if name not in known:
            raise InvalidUrl(f"{redact(url)} has no option {name!r}", f"Known are: {', '.join(known) or 'none'}")
        try:
            read[name] = known[name](text)
        except ValueError as error:
            raise InvalidUrl(f"{redact(url)}: the value of {name!r} is not possible", "See the store's docs") from error
    return read


def choice(*values: str) -> Callable[[str], str]:
    """The reader of an option that is one of `values`."""

    def read(text: str) -> str:
        if text not in values:
            raise ValueError
        return text

    return read


def seconds(text: str) -> float:
    """The reader of an option that is a positive number of seconds."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise ValueError
    return number
