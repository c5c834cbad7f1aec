"""Payloads, and the functions of the flow under test that reject or change them."""

import zlib
from typing import Any

from aggregations.definition.element import Element
from aggregations.definition.flow import Flow

OUT = "out"
"""The topic that the flow writes."""

_PRIME = 65521

Payload = dict[str, Any]
"""`id` says which logical message it is: the root's id and what every processor made of it."""


def digest(*texts: str) -> int:
    """A number that depends only on the texts.

    CRC-32 is linear: for texts that differ in one bit, all results differ in the same bits, or in none of the lowest
    ones. The remainder by a prime avoids this.
    """
    return zlib.crc32("|".join(texts).encode()) % _PRIME


class Marked:
    """Whether an element is marked as bad in some way."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __call__(self, element: Element[Any]) -> bool:
        return bool(element["bad"] == self.mark)


class Outage:
    """An outage of something that steps and folds need. One world runs at a time.

    Attributes:
        over: The outage is over; nothing is rejected any more.
    """

    def __init__(self) -> None:
        self.over = False


OUTAGE = Outage()
"""The outage of the running world; not part of any definition."""


class Refuse:
    """Rejects marked elements during the outage, and passes on all others unchanged."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __call__(self, element: Element[Any]) -> Payload:
        if element["bad"] == self.mark and not OUTAGE.over:
            raise ValueError("this step refuses it")
        payload: Payload = element.value
        return payload


class Keep:
    """A filter that drops nothing, but raises for some elements."""

    def __init__(self, refuse: Refuse) -> None:
        self.refuse = refuse

    def __call__(self, element: Element[Any]) -> bool:
        return bool(self.refuse(element))


class Aside:
    """The steps of a branch: it publishes, and fails for some elements after it has published others."""

    def __init__(self, refuse: Refuse | None) -> None:
        self.refuse = refuse

    def __call__(self, flow: Flow[Any]) -> Flow[Any]:
        flow = flow.publish(OUT, key="g")
        return flow.filter(Keep(self.refuse)) if self.refuse else flow


class KeyOf:
    """A key that is null or raises for some elements."""

    def __init__(self, column: str, refuse: Refuse) -> None:
        self.column = column
        self.refuse = refuse

    def __call__(self, element: Element[Any]) -> str | None:
        if element["x"] % 2 and element["bad"] == self.refuse.mark and not OUTAGE.over:
            return None
        key: str = self.refuse(element)[self.column]
        return key


class Split:
    """The flat-map; it raises for some elements."""

    def __init__(self, refuse: Refuse | None) -> None:
        self.refuse = refuse

    def __call__(self, element: Element[Any]) -> list[Payload]:
        return split(self.refuse(element) if self.refuse else element.value)


class Emit:
    """The `emit` of a stage."""

    def __init__(self, refuse: Refuse | None) -> None:
        self.refuse = refuse

    def __call__(self, element: Element[Any], state: Any) -> list[Payload]:
        return emitted(self.refuse(element) if self.refuse else element.value)


class Seen:
    """Counts how often each id was folded, and rejects messages that are bad for its stage."""

    def __init__(self, name: str) -> None:
        self.name = name

    def zero(self) -> dict[str, int]:
        return {}

    def fold(self, state: dict[str, int], element: Element[Any]) -> dict[str, int]:
        state[element["id"]] = state.get(element["id"], 0) + 1
        if element["bad"] == self.name and not OUTAGE.over:
            raise ValueError("bad for this stage")
        return state

    def merge(self, state: dict[str, int], other: dict[str, int]) -> dict[str, int]:
        return {name: state.get(name, 0) + other.get(name, 0) for name in {**state, **other}}


def kept(payload: Payload) -> bool:
    """Whether the flow's filter keeps it."""
    return bool(payload["x"] % 5)


def split(payload: Payload) -> list[Payload]:
    """The items of the flat-map. Only the last item of a bad payload is bad."""
    name, many = payload["id"], digest(payload["id"]) % 4
    return [
        {**payload, "id": f"{name}!{i}", "k": f"s{i}", "bad": payload["bad"] if i == many - 1 else ""}
        for i in range(many)
    ]


def emitted(payload: Payload) -> list[Payload]:
    """The items that a stage emits. Only the second item of a bad payload is bad."""
    return [
        {**payload, "id": f"{payload['id']}^{i}", "g": f"{payload['g']}{i}", "bad": payload["bad"] if i else ""}
        for i in range(2)
    ]


def kept_element(element: Element[Any]) -> bool:
    return kept(element.value)
