"""What `explain` says about a record is what the flow decided about it, or that nothing shows it."""

import json
from collections import defaultdict
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregations.definition.emit import Emit
from aggregations.definition.flow import Flow
from aggregations.definition.sessions import session
from aggregations.definition.source import Json, Topic
from aggregations.definition.windows import hopping, tumbling
from aggregations.run.memory import MemoryRunner
from envelope import Envelope, Hop, Siblings, encode
from envelope.filters import EventIdFilter, SequenceFilter, from_envelope, from_value
from jobs.explaining.outcome import AtStage, Outcome
from tests.support.explained import FOLDS, Sum, decided, flow, send
from tests.support.reports import Folded, Reports, event_place, is_passed_on
from tests.support.topics import InMemory

SENT = st.lists(st.tuples(st.integers(0, 50), st.sampled_from([0, 1, 1, 1, -1, 5000])), min_size=1, max_size=120)
"""Roots, and the value that each has whenever it is sent: the first one that is drawn for it."""


@given(SENT, st.sampled_from([1, 7, 1000]), st.sampled_from([3, 10_000]))
def test_a_folded_record_is_never_called_dropped_and_a_dropped_one_never_folded(
    sent: list[tuple[int, int]], size: int, search: int
) -> None:
    Sum.broken = True
    world, values = InMemory(flow(fold=Sum())), dict[int, int]()
    places = [send(world, root, v=values.setdefault(root, v), c="AB"[root % 2]) for root, v in sent]
    truth = decided(world, size)
    for place, (root, _) in zip(places, sent, strict=True):
        found = world.explain(place, search=search)
        rows: dict[str, AtStage] = {row.stage: row for row in found.stages}
        assert found.outcome is not Outcome.MISSING
        if values[root] == 0:
            assert found.outcome is Outcome.REMOVED
        elif values[root] == -1:
            assert found.outcome is Outcome.DEAD_LETTER
        for (stage, where), fold in truth.items():
            if where == place and stage in rows:
                said = rows[stage].outcome
                if fold or "no other record of its event is among the" not in rows[stage].why:
                    assert said is not (Outcome.DROPPED if fold else Outcome.FOLDED)
                if search > len(sent) and len(values) < 32:
                    assert said is (Outcome.FOLDED if fold else Outcome.DROPPED)


TIMES: list[dict[str, Any]] = [
    {},
    {"window": tumbling("10s", retention="0s")},
    {"window": tumbling("10s", lateness="5s", late="dead_letter")},
    {"window": hopping("10s", "5s", retention="0s")},
    {"window": session("5s", retention="0s")},
    {"expire_after": "10s"},
]
EMITS = [None, None, Emit(c="c", v="v"), Emit(c="k", v="new.n"), Emit(c="c", v="v").when(pl.col("new.n") % 2 == 0)]
FILTERS = [None, None, EventIdFilter(from_envelope("event_id"), timedelta(days=1)), SequenceFilter(from_value("at"))]


class Legs:
    """Drawn deliveries of legs, and the flow that reads them.

    Attributes:
        flow: Legs of v = 0 are filtered out, negative ones diverted behind the first stage, and the second rejects 5000.
    """

    def __init__(self, data: st.DataObject) -> None:
        times, emit, rule = (data.draw(st.sampled_from(each)) for each in (TIMES, EMITS, FILTERS))
        self._draw, self._policy = data.draw, data.draw(st.sampled_from(Siblings))
        self._indexed, self._named = data.draw(st.booleans()), data.draw(st.booleans())
        columns = Json({"k": str, "c": str, "v": int, "at": int})
        made: Flow[Any] = Flow("told").source(Topic("legs", columns, time="at", siblings=self._policy, ahead="1d"))
        made = made.filter(lambda leg: leg["v"] != 0)
        made = made if rule is None else made.deduplicate(rule)
        made = made.aggregate("first", "k", FOLDS, history=data.draw(st.sampled_from([2, 32])), emit=emit, **times)
        self.flow = made.divert(lambda leg: leg["v"] < 0).aggregate("second", lambda leg: leg["c"], Sum())
        self._legs: dict[tuple[int, int], dict[str, Any]] = {}

    def send(self, world: InMemory) -> None:
        """Send some of them, some of them again."""
        for _ in range(self._draw(st.integers(1, 12))):
            root, sibling = self._draw(st.integers(0, 12)), self._draw(st.integers(0, 2))
            leg = self._legs.get((root, sibling)) or self._legs.setdefault((root, sibling), self._leg(root))
            hop = Hop("raw", 0, root, via="wrap", index=sibling if self._indexed else None, topic_id="R")
            name = f"{root}-{sibling}" if self._named else ""
            key = leg["k"].encode()
            body = encode(Envelope(json.dumps(leg).encode(), (hop,), key, event_id=name))
            world.send(key, body, partition="KL".index(leg["k"]), timestamp_ms=1_000_000)

    def _leg(self, root: int) -> dict[str, Any]:
        seconds = 4 * root + self._draw(st.integers(0, 25))
        v = self._draw(st.sampled_from([1, 1, 1, 1, 0, -1, 5000]))
        return {"k": self._draw(st.sampled_from("KL")), "c": "AB"[root % 2], "v": v, "at": seconds * 1000}


@settings(max_examples=60)
@given(st.data(), st.sampled_from([1, 3, 1000]), st.sampled_from([2, 10_000]))
def test_late_events_emits_filters_siblings_and_dead_letters_are_reported_as_they_were(
    data: st.DataObject, size: int, search: int
) -> None:
    legs, folded = Legs(data), defaultdict[str, Folded](frozenset)
    world = InMemory(legs.flow)
    persist = MemoryRunner._persist

    def noted(runner: MemoryRunner, stage: Any, batch: Any) -> None:
        new = (
            one for one in batch.outcomes[stage.name].decided if is_passed_on(one, filters=bool(stage.aggregate.rule))
        )
        elements = (one.arrival.element for one in new)
        folded[stage.name] |= {(event_place(one.own), one.indices) for one in elements}
        persist(runner, stage, batch)

    for broken in (True, data.draw(st.booleans())):
        Sum.broken = broken
        legs.send(world)
        for number in range(len(world.dead)):
            if data.draw(st.integers(0, 2)) == 0:
                world.redrive(number, noted=data.draw(st.booleans()))
        with patch.object(MemoryRunner, "_persist", noted):
            world.run(size=size)
        records = (one for part in world.topics["legs"].values() for one in part if one)
        Reports(legs.flow, world, world.stores, folded, records).check(search=search)
