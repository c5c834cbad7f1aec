"""A flow whose records are explained, and how its records are made."""

import json
from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

import polars as pl

from aggregations.definition.aggregates import count, total
from aggregations.definition.element import Element
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.per_message.dead_letters import DeadLetterCollector
from aggregations.per_message.stage import Decided
from envelope import Envelope, Hop, encode
from jobs.explaining.outcome import AtStage, Explanation, Outcome
from jobs.tracing import Place
from tests.support.topics import InMemory

LEGS = Topic("legs", Json({"k": str, "c": str, "v": int}))
FOLDS = Fields(n=count(), sum=total("v"))


class Sum:
    """Rejects 5000 as long as it is broken."""

    broken = True

    def zero(self) -> dict[str, int]:
        return {"n": 0, "sum": 0}

    def fold(self, state: dict[str, int], element: Element[Any]) -> dict[str, int]:
        if element["v"] == 5000 and self.broken:
            raise ValueError
        return {"n": state["n"] + 1, "sum": state["sum"] + element["v"]}


def mend() -> None:
    Sum.broken = False


def flow(*, fold: Any = FOLDS, **options: Any) -> Flow[Any]:
    """Per `k`, then per `c`; legs of v = 0 are filtered out, negative ones diverted."""
    made: Flow[Any] = Flow("fleet").source(LEGS).filter(pl.col("v") != 0).divert(pl.col("v") < 0)
    return made.aggregate("first", "k", fold, **options).aggregate("second", "c", FOLDS)


def send(world: InMemory, root: int, *, v: int = 1, c: str = "UA", k: str = "K", via: str = "wrap", **at: Any) -> Place:
    """A republished leg: sent again with the same root, it is the same event."""
    chain = (Hop("raw", 0, root, via=via, index=0, count=1, topic_id="R"),)
    body = json.dumps({"k": k, "c": c, "v": v}).encode()
    return world.send(k.encode(), encode(Envelope(body, chain, k.encode(), event_id=f"e{root}")), **at)


def outcomes(found: Explanation) -> list[tuple[str, Outcome]]:
    return [(one.stage, one.outcome) for one in found.stages]


def keys(rows: Iterable[AtStage]) -> list[bytes | None]:
    return [one.key for one in rows]


def decided(world: InMemory, size: int) -> dict[tuple[str, Place], bool]:
    """Run a flow, and return by stage and record whether it was folded."""
    found: dict[tuple[str, Place], bool] = {}
    collect = DeadLetterCollector.decided

    def noted(self: DeadLetterCollector, stage: str, decisions: Iterable[Decided]) -> None:
        for one in decisions:
            own = one.arrival.element.own
            if one.reason is None:
                found[stage, Place(own.topic, own.partition, own.offset)] = one.decision.fold
        collect(self, stage, decisions)

    with patch.object(DeadLetterCollector, "decided", noted):
        world.run(size=size)
    return found
