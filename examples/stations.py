"""Fastening stations: the attempts that each screw took, and what each station did in ten minutes.

headwater describe stations:flow
headwater run stations:flow --until-caught-up
headwater inspect stations:flow --stage screw --where 'attempts > 3'
"""

import polars as pl

from aggregations import Fields, Flow, Json, Topic, collect, count, last, maximum, session, tumbling
from jobs import run

FASTENING = {"station": str, "screw": str, "torque": int, "ok": bool, "at": int}

flow = (
    Flow("stations")
    .source(Topic("fastenings", payload=Json(FASTENING), envelope=False, time="at"))
    # A screw that is not touched for two minutes is done: what comes later is rework, and another session.
    .aggregate(
        "screw",
        key="screw",
        fold=Fields(attempts=count(), torque=maximum("torque"), ok=last("ok", by="at"), torques=collect("torque", 20)),
        window=session("2m", lateness="10m"),
        co_partitioned=False,
    )
    .aggregate(
        "station",
        key="station",
        fold=Fields(attempts=count(), failed=count(where=~pl.col("ok"))),
        window=tumbling("10m", lateness="10m"),
    )
)

if __name__ == "__main__":
    run(flow)
