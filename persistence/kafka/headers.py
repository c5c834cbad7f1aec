"""Headers of the messages of a confluent-kafka consumer."""

from collections.abc import Sequence
from gc import get_referents
from operator import methodcaller
from typing import Any, Final

_HEADERS: Final = methodcaller("headers")
REPLACED: Final = "\ufffd"
"""Takes the place of a name that is not UTF-8."""


def name_of(name: bytes) -> str:
    """The name of a header; `REPLACED` if it is not UTF-8."""
    try:
        return name.decode()
    except UnicodeDecodeError:
        return REPLACED


def headers_of(message: Any) -> list[tuple[str, bytes | None]]:
    """The headers of a message, in order; a name that is not UTF-8 is `REPLACED`.

    Not every client checks the names that it writes. For a name that is not UTF-8, confluent-kafka 2.16 returns a pair
    whose first item is missing: to read that item ends the process. It also sets an error, which Python does not always
    raise where the method is called directly, and always where a function in C calls it, once for each message.
    """
    pairs: list[tuple[str, bytes | None]] | None
    try:
        pairs = _HEADERS(message)
    except SystemError:
        pairs = _HEADERS(message)
    if not pairs:
        return []
    if len(get_referents(*pairs)) == 2 * len(pairs):
        return pairs
    return [(REPLACED if len(get_referents(pair)) < 2 else pair[0], pair[1]) for pair in pairs]


def have_headers(messages: Sequence[Any]) -> list[bool]:
    """Whether each message has headers, at a third of the cost of `headers_of`."""
    try:
        return [bool(pairs) for pairs in map(_HEADERS, messages)]
    except SystemError:  # for a name that is not UTF-8
        return [bool(headers_of(message)) for message in messages]
