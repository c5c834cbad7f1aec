"""The flow that headwater runs in the benchmark; topic and name come from the environment."""

import os

from aggregations import Fields, Flow, Topic, count, maximum, total
from jobs.demo.leg_pb2 import Leg

flow = (
    Flow(os.environ.get("BENCH_RUN", "bench"))
    .source(Topic(os.environ.get("BENCH_TOPIC", "bench"), payload=Leg))
    .aggregate("keys", key="tail", fold=Fields(count=count(), sum=total("air_minutes"), max=maximum("arr_delay")))
)
