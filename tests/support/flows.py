"""Flows of the engine's tests: each in columns and message by message, with the same results.

They are in a separate module because Spark's workers import it: functions and classes are pickled by name.
"""

import os
import select
import signal
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path as File
from typing import Any, Final, Literal

import polars as pl

from aggregations.definition.aggregates import count, maximum, total
from aggregations.definition.element import Element
from aggregations.definition.emit import Emit
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.sessions import session
from aggregations.definition.source import Json, Topic
from aggregations.definition.windows import hopping, tumbling
from envelope import Reason, Verdict
from envelope.dedup.history import HISTORY
from envelope.filters import (
    EventIdFilter,
    ProducerFilter,
    Ruling,
    Scope,
    SequenceFilter,
    SessionWindows,
    TimeWindows,
    deduplicate,
    deduplicate_by_key,
    deduplicate_by_key_value,
    distinct,
    from_envelope,
    from_header,
    from_value,
)
from tests.messages import Leg

Path = Literal["columns", "messages"]
PATHS: tuple[Path, ...] = ("columns", "messages")

TOTALS = Fields(legs=count(), minutes=total("minutes"), worst=maximum("minutes"))
BROKEN = "broken"
"""A carrier that no fold in plain Python takes."""


class Totals:
    """What `TOTALS` counts, in plain Python."""

    def zero(self) -> dict[str, Any]:
        return {"legs": 0, "minutes": 0, "worst": None}

    def fold(self, state: dict[str, Any], element: Element[Any]) -> dict[str, Any]:
        if element["carrier"] == BROKEN:
            raise ValueError(element["carrier"])
        minutes = element["minutes"]
        worst = minutes if state["worst"] is None else max(minutes, state["worst"])
        return {"legs": state["legs"] + 1, "minutes": state["minutes"] + minutes, "worst": worst}


class Deadly(Totals):
    """Kills a process once, while a file exists. The file has the process id; without one, it is the folding process."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def fold(self, state: dict[str, Any], element: Element[Any]) -> dict[str, Any]:
        with suppress(FileNotFoundError):
            victim = int(File(self.marker).read_text() or os.getpid())
            File(self.marker).unlink()
            ended = os.pidfd_open(victim)
            os.kill(victim, signal.SIGKILL)
            select.select([ended], [], [])  # its sockets are closed now: whoever calls it finds that it is gone
            os.close(ended)
        return super().fold(state, element)


class Named(Totals):
    """Writes the process id of the folding process, or of its parent, into a file that exists."""

    def __init__(self, marker: str, *, parent: bool = False) -> None:
        self.marker = marker
        self.parent = parent

    def fold(self, state: dict[str, Any], element: Element[Any]) -> dict[str, Any]:
        if File(self.marker).exists():
            File(self.marker).write_text(str(os.getppid() if self.parent else os.getpid()))
        return super().fold(state, element)


def takes_time(element: Element[Any]) -> bool:
    return bool(element["minutes"] != 0)


def goes_back_in_time(element: Element[Any]) -> bool:
    return bool(element["minutes"] < 0)


def with_hours(element: Element[Any]) -> Mapping[str, Any]:
    return {**element.value, "hours": element["minutes"] // 60}


def tail(element: Element[Any]) -> str | None:
    return element["tail"] or None


def carrier(element: Element[Any]) -> Any:
    return element["carrier"]


def carriers(element: Element[Any]) -> Iterator[Mapping[str, Any]]:
    """A leg that several carriers sold: one item for each."""
    for one in element["carrier"].split("+"):
        yield {**element.value, "carrier": one}


def fleet(source: str | Topic, path: Path = "columns", *, stages: int = 2, co_partitioned: bool = True) -> Flow[Any]:
    """Totals per aircraft and, re-keyed, per carrier.

    Legs of no minutes are filtered out, those of negative minutes diverted; a leg without an aircraft has no key.
    """
    flow: Flow[Any] = Flow("fleet").source(Topic(source, payload=Leg) if isinstance(source, str) else source)
    if path == "columns":
        minutes, name = pl.col("minutes"), pl.col("tail")
        flow = flow.filter(minutes != 0).divert(minutes < 0).map(hours=minutes // 60)
        flow = flow.aggregate("aircraft", pl.when(name != "").then(name), TOTALS, co_partitioned=co_partitioned)
        return flow.aggregate("carrier", "carrier", TOTALS) if stages == 2 else flow
    flow = flow.filter(takes_time).divert(goes_back_in_time).map(with_hours)
    flow = flow.aggregate("aircraft", tail, Totals(), co_partitioned=co_partitioned)
    return flow.aggregate("carrier", carrier, Totals()) if stages == 2 else flow


def shared(source: str, history: int = HISTORY, *, path: Path = "messages") -> Flow[Any]:
    """Totals per carrier of legs that several carriers sold, then per aircraft: items of a record scatter."""
    flow: Flow[Any] = Flow("shared").source(Topic(source, payload=Leg))
    flow = flow.flat_map(carriers if path == "messages" else pl.col("carrier").str.split("+"))
    flow = flow.aggregate("carrier", carrier, Totals(), history=history)
    return flow.aggregate("aircraft", tail, Totals(), history=history)


def relay(source: str, target: str, path: Path = "columns", fuels: str = "") -> Flow[Any]:
    """Publishes legs that several carriers sold, one item for each; legs of negative minutes are diverted.

    It also publishes plain JSON of fuel, if there is a topic of that.
    """
    flow: Flow[Any] = Flow("relay").source(Topic(source, payload=Leg))
    if path == "columns":
        minutes = pl.col("minutes")
        flow = flow.divert(minutes < 0).flat_map(pl.col("carrier").str.split("+"))
    else:
        flow = flow.divert(goes_back_in_time).flat_map(carriers)
    return (flow.merge(Flow("fuels").source(Topic(fuels, FUELS, envelope=False))) if fuels else flow).publish(target)


def four_stages(source: str, history: int = HISTORY) -> Flow[Any]:
    """Totals per aircraft, per carrier, per remainder of the minutes, and per aircraft of a carrier."""
    flow: Flow[Any] = Flow("four").source(Topic(source, payload=Leg))
    minutes = pl.col("minutes")
    keys: dict[str, str | pl.Expr] = {
        "aircraft": "tail",
        "carrier": "carrier",
        "remainder": (minutes % 6).cast(pl.String),
        "pair": pl.concat_str("carrier", "tail", separator=" "),
    }
    flow = flow.divert(minutes < 0)
    for name, key in keys.items():
        flow = flow.aggregate(name, key, TOTALS, history=history)
    return flow


def raw_value(element: Element[Any]) -> bytes:
    return bytes(element["value"])


def counted(source: str, path: Path) -> Flow[Any]:
    """Number of messages of each payload, whatever that is."""
    flow: Flow[Any] = Flow("counted").source(Topic(source))
    return flow.aggregate("payloads", "value" if path == "columns" else raw_value, Fields(seen=count()))


FUELS = Json({"tail": str, "carrier": str, "litres": int})
SERVED = Fields(legs=count("minutes"), minutes=total("minutes"), fuels=count("litres"), litres=total("litres"))


class Served:
    """What `SERVED` counts, in plain Python."""

    def zero(self) -> dict[str, Any]:
        return {"legs": 0, "minutes": 0, "fuels": 0, "litres": 0}

    def fold(self, state: dict[str, Any], element: Element[Any]) -> dict[str, Any]:
        if element["carrier"] == BROKEN:
            raise ValueError(element["carrier"])
        for name, column in (("legs", "minutes"), ("fuels", "litres")):
            if element[column] is not None:
                state = {**state, name: state[name] + 1, column: state[column] + element[column]}
        return state


def takes_fuel(element: Element[Any]) -> bool:
    return element.value is not None and element["litres"] != 0


def gives_fuel_back(element: Element[Any]) -> bool:
    return bool((element["litres"] or 0) < 0)


def served(
    legs: str,
    fuels: str,
    path: Literal["columns", "messages", "tombstones"] = "columns",
    *,
    co_partitioned: bool = True,
) -> Flow[Any]:
    """Legs in envelopes and plain JSON of fuel, per aircraft and then per carrier.

    Legs of no minutes and fuel of no litres are filtered out, negative litres diverted. With `tombstones` records are
    read message by message.
    """
    source = Topic(fuels, FUELS, envelope=False, tombstones="element" if path == "tombstones" else "skip")  # type: ignore[arg-type]
    flew, fuelled = Flow("served").source(Topic(legs, payload=Leg)), Flow("fuels").source(source)
    if path == "columns":
        flow = flew.filter(pl.col("minutes") != 0).merge(fuelled.filter(pl.col("litres") != 0))
        flow = flow.divert(pl.col("litres") < 0).aggregate("aircraft", "tail", SERVED, co_partitioned=co_partitioned)
        return flow.aggregate("carrier", "carrier", SERVED)
    flow = flew.filter(takes_time).merge(fuelled.filter(takes_fuel)).divert(gives_fuel_back)
    return flow.aggregate("aircraft", tail, Served(), co_partitioned=co_partitioned).aggregate(
        "carrier", carrier, Served()
    )


def totals(legs: Iterable[Any], key: str) -> dict[bytes, dict[str, Any]]:
    """The expected states of `fleet`, for legs without copies."""
    found: dict[bytes, dict[str, Any]] = {}
    for leg in legs:
        if leg.minutes > 0 and leg.tail:
            state = found.setdefault(getattr(leg, key).encode(), {"legs": 0, "minutes": 0, "worst": 0})
            state["legs"] += 1
            state["minutes"] += leg.minutes
            state["worst"] = max(leg.minutes, state["worst"])
    return found


def sold(element: Element[Any], state: Any) -> Iterator[Mapping[str, Any]]:
    return carriers(element)


def emitting(source: str) -> Flow[Any]:
    """Totals per aircraft, which emits an item for each carrier that sold the leg, then totals per carrier."""
    flow: Flow[Any] = Flow("emitting").source(Topic(source, payload=Leg))
    return flow.aggregate("aircraft", tail, Totals(), emit=sold).aggregate("carrier", carrier, Totals())


def spending(topic: str, table: str, missing: str = "null") -> Flow[Any]:
    """Payments per category of the merchant, which is looked up behind the stage of the cards."""
    merchants = Topic(table, Json({"category": str}), envelope=False)
    return (
        Flow("spending")
        .source(Topic(topic, Json({"card": str, "merchant": str, "cents": int}), envelope=False))
        .aggregate("card", "card", Fields(n=count()))
        .lookup("merchant", merchants, "merchant", missing=missing)
        .aggregate("category", pl.col("category").fill_null("unknown"), Fields(n=count(), cents=total("cents")))
    )


def closing(source: str, target: str) -> Flow[Any]:
    """Legs per aircraft and five minutes, published when the window closes, and legs per carrier."""
    windowed = (
        Flow("closing")
        .source(Topic(source, Leg))
        .aggregate(
            "tails", "tail", Fields(legs=count(), minutes=total("minutes")), window=tumbling("5m", retention="0s")
        )
    )
    published = windowed.publish_states(target, on="close")
    return published.aggregate("carriers", "carrier", Fields(legs=count()), history=512)


def incident_number(element: Element[Any]) -> Any:
    return element["id"]


class Largest:
    """A filter of the user: it passes on a larger id than all before it in its partition."""

    name = "largest"

    def scope(self, arrival: Any) -> bytes:
        return f"{arrival.topic}:{arrival.partition}".encode()

    def zero(self) -> list[int]:
        return [0]

    def judge(self, state: list[int], arrival: Any) -> tuple[Ruling, list[int]]:
        try:
            number = from_value("id")(arrival)
        except ValueError:
            number = None
        if number is None:
            return Ruling(Verdict.REJECTED, forward=False, reason=Reason.MISSING_FIELD, detail="it has no id"), state
        if number <= state[0]:
            return Ruling(Verdict.DUPLICATE, forward=False), state
        return Ruling(Verdict.ACCEPTED, forward=True), [number]

    def dump(self, state: list[int]) -> Any:
        return state

    def load(self, value: Any) -> list[int]:
        return list(value)


OVER_PARTITIONS: Final = "over partitions"
ASTRAY: Final = (OVER_PARTITIONS, "changed key", "event id over partitions")
"""Filters that look for copies in all partitions."""
FILTERS: Final[Mapping[str, Any]] = {
    "sequence": SequenceFilter(from_envelope("sequence")),
    "sequence by key": SequenceFilter(from_envelope("sequence"), scope_by=Scope.KEY),
    "producer": ProducerFilter(),
    "event id": EventIdFilter(from_envelope("event_id"), horizon=timedelta(days=1)),
    "interval": deduplicate_by_key_value(from_envelope("event_id"), timedelta(days=1)),
    OVER_PARTITIONS: deduplicate(from_envelope("event_id"), timedelta(days=1), partitions=3),
    "changed key": deduplicate_by_key(timedelta(days=1), key=from_envelope("event_id"), partitions=3),
    "event id over partitions": EventIdFilter(from_envelope("event_id"), horizon=timedelta(days=1), partitions=3),
    "window": distinct(TimeWindows(timedelta(days=3650))),
    "session": distinct(SessionWindows(timedelta(0)), time=from_value("id")),
    "header": SequenceFilter(from_header("sequence")),
    "own class": Largest(),
    "own": SequenceFilter(incident_number),
    "column": SequenceFilter(from_value("id")),
}
"""Filters of flows."""
BARE: Final = ("own class", "own", "column")
"""Their messages have no envelope."""


def filtered(source: str, kind: str = "column", target: str = "") -> Flow[Any]:
    """Messages per incident behind a filter; with a target topic, they are published instead."""
    topic = Topic(source, payload=Json({"id": int}), envelope=kind not in BARE)
    flow = Flow("filtered").source(topic).deduplicate(FILTERS[kind], name="filter")
    return flow.publish(target) if target else flow.aggregate("incident", "_key", Fields(messages=count()))


def shifts(source: str, final: str, aside: str) -> Flow[Any]:
    """Sessions per aircraft, published when they close; new worst legs of aircraft in use, per carrier in hopping windows.

    Long legs leave for a branch.
    """
    return (
        Flow("shifts")
        .source(Topic(source, Leg))
        .branch("long", pl.col("minutes") > 15, lambda flow: flow.publish(aside))
        .aggregate(
            "tails",
            "tail",
            Fields(legs=count(), minutes=total("minutes")),
            window=session("3m", lateness="2m", retention="0s"),
        )
        .publish_states(final, on="close")
        .aggregate(
            "worst",
            "tail",
            Fields(worst=maximum("minutes")),
            expire_after="10m",
            emit=Emit(carrier="carrier", worst="new.worst").changed(),
        )
        .aggregate(
            "hours",
            "carrier",
            Fields(records=count(), worst=total("worst")),
            window=hopping("20m", "10m", retention="0s"),
        )
    )
