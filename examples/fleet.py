"""Hours in the air and delays, per aircraft and, re-keyed, per carrier.

headwater describe fleet:flow
headwater run fleet:flow --until-caught-up --dead-letters flights.dead
headwater inspect fleet:flow --stage carrier
headwater submit-command fleet:flow --master spark://master:7077 --store redis://host

It is also a program: `python fleet.py`, or `spark-submit fleet.py`, with the options of `headwater run`.
"""

import polars as pl

from aggregations import Fields, Flow, Topic, count, maximum, total
from jobs import run
from jobs.demo.leg_pb2 import Leg

flow = (
    Flow("fleet")
    .source(Topic("flights.legs", payload=Leg))  # a protobuf message: its fields are the columns
    .filter(pl.col("event") == Leg.EVENT_ARRIVED)
    .map(late=pl.col("arr_delay") > 15)
    .aggregate("aircraft", key="tail", fold=Fields(legs=count(), minutes=total("air_minutes")))
    .aggregate("carrier", key="carrier", fold=Fields(legs=count(), late=total("late"), worst=maximum("arr_delay")))
)

if __name__ == "__main__":
    run(flow)
