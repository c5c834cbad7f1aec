"""Ids with a time, and an index by time, so that old ids are found without a look at the others."""

import re
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Any, TypeAlias
from urllib.parse import quote, unquote_to_bytes

from envelope.errors import EnvelopeError, Reason
from envelope.filters.arrival import INT64

Id: TypeAlias = str | int | bytes | tuple["Id", ...]
"""An identity. Ids of different types are different: 1, "1" and b"1"."""


_SAFE = " /:=@,;+#"
_PRINTABLE = re.compile(rb"[A-Za-z0-9_.~ /:=@,;+#-]*\Z")


class TimeIndex:
    """Ids, each with its time and facts about it. Adding and removing cost the logarithm of their number."""

    __slots__ = ("_added", "_by_time", "_facts")

    def __init__(self) -> None:
        self._facts: dict[Id, tuple[Any, ...]] = {}
        self._by_time: list[tuple[int, int, Id]] = []
        self._added = 0

    def __len__(self) -> int:
        return len(self._facts)

    def get(self, identity: Id) -> tuple[Any, ...] | None:
        """Time and facts of an id; None if it is not there."""
        return self._facts.get(identity)

    def add(self, identity: Id, time_ms: int, *facts: Any) -> None:
        """Add an id that is not there."""
        assert identity not in self._facts
        self._facts[identity] = (time_ms, *facts)
        heappush(self._by_time, (time_ms, self._added, identity))
        self._added += 1

    def purge(self, before_ms: int, limit: int | None = None) -> int | None:
        """Remove the ids whose time is below `before_ms`, and then the oldest ones beyond `limit`.

        Only what is removed is looked at, and one entry more.

        Returns:
            The highest time that was removed; None if nothing was.
        """
        by_time, removed = self._by_time, None
        while by_time and (by_time[0][0] < before_ms or (limit is not None and len(by_time) > limit)):
            removed, _, identity = heappop(by_time)
            del self._facts[identity]
        return removed

    def dump(self) -> list[list[Any]]:
        """The ids in the order of their times: `[time, facts..., id]`."""
        facts = self._facts  # two entries differ in their number at the latest, so no ids are compared
        return [
            [*facts[identity], identity if type(identity) is str else to_json(identity)]
            for _, _, identity in sorted(self._by_time)
        ]

    @classmethod
    def load(cls, entries: Any) -> "TimeIndex":
        """The index that `dump` returned this list for."""
        made = cls()
        ids = [entry[-1] if type(entry[-1]) is str else from_json(entry[-1]) for entry in entries]
        made._facts = {found: tuple(entry[:-1]) for found, entry in zip(ids, entries, strict=True)}
        made._by_time = [
            (entry[0], number, found) for number, (found, entry) in enumerate(zip(ids, entries, strict=True))
        ]
        made._added = len(ids)
        heapify(made._by_time)
        return made

    def __iter__(self) -> Iterator[Id]:
        return iter(self._facts)


def identity_of(found: Any) -> Id:
    """Check what an extractor of ids returned.

    Raises:
        EnvelopeError: `TRANSFORM_FAILED`: it is neither text nor bytes, an integer of 64 bits, or a tuple of these.
    """
    kind = type(found)
    if kind is str:
        if not found.isascii():
            try:
                found.encode()
            except UnicodeEncodeError:
                raise EnvelopeError(Reason.TRANSFORM_FAILED, "the id contains an unpaired surrogate") from None
        return found  # type: ignore[no-any-return]
    if kind is bytes or (kind is int and -INT64 <= found < INT64):
        return found  # type: ignore[no-any-return]
    if kind is tuple:
        return tuple(identity_of(one) for one in found)
    raise EnvelopeError(
        Reason.TRANSFORM_FAILED,
        f"the id is of type {kind.__name__}: use text, bytes, an integer of 64 bits, or a tuple of these",
    )


def quoted(value: bytes) -> str:
    """Bytes as text: printable ASCII as it is, everything else and `%` percent-encoded."""
    return value.decode() if _PRINTABLE.match(value) else quote(value, safe=_SAFE)


def unquoted(text: str) -> bytes:
    """The bytes that `quoted` returned this text for."""
    return unquote_to_bytes(text) if "%" in text else text.encode()


def to_json(identity: Id) -> Any:
    """An id as JSON: text and integers as they are, a tuple as a list, bytes as an object with quoted text."""
    if isinstance(identity, bytes):
        return {"bytes": quoted(identity)}
    return [to_json(one) for one in identity] if isinstance(identity, tuple) else identity


def from_json(value: Any) -> Id:
    """The id that `to_json` returned this value for."""
    if isinstance(value, dict):
        return unquoted(value["bytes"])
    return tuple(from_json(one) for one in value) if isinstance(value, list) else value
