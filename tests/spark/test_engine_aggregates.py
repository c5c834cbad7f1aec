"""Every aggregate, and columns of states passed on to a second stage, by the engine: the same states as in memory."""

from typing import Any

import polars as pl
import pytest

from aggregations.definition.aggregates import count, maximum, total
from aggregations.definition.aggregates_exact import collect, histogram, standard_deviation, variance
from aggregations.definition.aggregates_sketches import approximate_distinct, quantiles, top
from aggregations.definition.emit import Emit
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Topic
from tests.messages import Leg
from tests.support.world import World, legs, republished

pytestmark = [pytest.mark.spark, pytest.mark.integration]


def flow(source: str) -> Flow[Any]:
    fold = Fields(
        legs=count(),
        long=count(where=pl.col("minutes") > 10),
        worst=maximum("minutes"),
        spread=variance("minutes"),
        deviation=standard_deviation("minutes", where=pl.col("carrier") != "AA"),
        sizes=histogram("minutes", [1, 10]),
        opened=collect("carrier", 3),
        kinds=approximate_distinct("minutes"),
        ranks=quantiles("minutes"),
        usual=top("carrier", 1),
    )
    emit = Emit(carrier="carrier", worst="new.worst", grown=pl.col("new.worst") - pl.col("old.worst")).changed()
    found: Flow[Any] = (
        Flow("aggregates").source(Topic(source, payload=Leg)).aggregate("aircraft", "tail", fold, emit=emit)
    )
    return found.aggregate("carrier", "carrier", Fields(records=count(), worst=maximum("worst"), grown=total("grown")))


def test_batches_with_copies_end_in_the_states_of_the_oracle(world: World) -> None:
    some = legs(600)
    defined = flow(world.topic)
    world.send(republished(some, [*range(400), *range(250, 600)]))
    world.run(defined, max_records=170)
    world.check(defined)
    worst = max(leg.minutes for leg in some)
    found = world.results(defined, "carrier")
    assert max(one["worst"] for one in found.values()) == worst
    aircraft = world.results(defined, "aircraft")
    assert sum(one["legs"] for one in aircraft.values()) == len(some)
    firsts = {leg.tail: leg.minutes for leg in reversed(some)}
    grown = sum(one["grown"] for one in found.values())
    assert grown == sum(one["worst"] - firsts[tail.decode()] for tail, one in aircraft.items())
