"""Delays per carrier in one pass: spread, quantiles, a histogram, the usual destinations; and every new record.

python fill.py                 creates the topics, and produces flights and one malformed record
headwater describe delays:flow
headwater run delays:flow --dead-letters flights.dead --until-caught-up
headwater inspect delays:flow --stage carrier
"""

import polars as pl

from aggregations import (
    Emit,
    Fields,
    Flow,
    Json,
    Topic,
    approximate_distinct,
    collect,
    count,
    histogram,
    maximum,
    quantiles,
    standard_deviation,
    top,
    variance,
)
from jobs import run

FLIGHT = {"carrier": str, "tailnum": str, "dest": str, "dep_time": int, "arr_delay": int, "flight": int}

flow = (
    Flow("delays")
    .source(Topic("flights.raw", payload=Json(FLIGHT), envelope=False))
    .aggregate(
        "carrier",
        key="carrier",
        fold=Fields(
            flights=count(),
            cancelled=count(where=pl.col("dep_time").is_null()),
            worst=maximum("arr_delay"),
            spread=standard_deviation("arr_delay"),
            spread_of_late=variance("arr_delay", where=pl.col("arr_delay") > 15),
            usual=quantiles("arr_delay", at=(0.5, 0.99)),
            delays=histogram("arr_delay", bounds=[0, 15, 60, 180]),
            aircraft=approximate_distinct("tailnum"),
            destinations=top("dest", 3),
            opened_with=collect("flight", 5),
        ),
        co_partitioned=False,
        emit=Emit(carrier="carrier", flight="flight", worst="new.worst", before="old.worst").changed(),
    )
    .aggregate("records", key="carrier", fold=Fields(records=count(), worst=maximum("worst")))
)

if __name__ == "__main__":
    run(flow)
