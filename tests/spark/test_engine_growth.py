"""A key in two partitions of the topic it is said to be partitioned by, as after partitions were added."""

import json

import pytest
from confluent_kafka import Producer

from aggregations.fields import Fields, count, total
from aggregations.flow import Flow
from aggregations.run import bind
from aggregations.source import Json, Topic
from aggregations.spark import run_flow
from aggregations.states import state_of
from envelope import Envelope, Hop, encode
from persistence.kafka import KafkaSettings
from persistence.protocol import FlowRef
from persistence.registry import open_store

pytestmark = pytest.mark.spark

COUNT = 100


def legs(first: int) -> list[bytes]:
    return [
        encode(
            Envelope(
                json.dumps({"tail": "N1", "carrier": "AA", "air": 1}).encode(),
                chain=(Hop("elsewhere", 0, first + n, via="wrap", index=0, topic_id="E"),),
            )
        )
        for n in range(COUNT)
    ]


@pytest.mark.parametrize("stages", [1, 2])
def test_no_half_of_it_is_lost_however_far_apart_the_halves_are(spark, kafka, topic, tmp_path, stages) -> None:
    name, dead = topic(2, "legs"), topic(1, "dead")
    producer = Producer({"bootstrap.servers": kafka})
    for partition, first in ((1, COUNT), (0, 0)):  # the later half may be folded first
        for value in legs(first):
            producer.produce(name, value, b"N1", partition=partition)
    producer.flush()
    flow = Flow("growth").source(Topic(name, Json({"tail": str, "carrier": str, "air": int})))
    flow = flow.aggregate("aircraft", "tail", Fields(legs=count(), air=total("air")))
    if stages == 2:
        flow = flow.aggregate("carrier", "carrier", Fields(legs=count(), air=total("air")))
    url = f"sqlite://{tmp_path}/states.db"
    report = run_flow(
        flow,
        kafka=KafkaSettings(kafka),
        stores=bind(flow, {}, url),
        dead_letters=dead,
        until_caught_up=True,
    )
    assert report.records == 2 * COUNT
    store = open_store(url)
    for stage in flow.stages:
        ref = FlowRef("growth").stage(stage.name)
        folded = [state_of(stored, ref, key).fold for key, stored in store.scan(ref)]
        assert folded == [{"legs": 2 * COUNT, "air": 2 * COUNT}]
    store.close()
