"""Records without a timestamp, which Kafka shows as -1 (sarama#907, goreplay#1261): no event time, wherever they go through."""

import pytest

from aggregations import Fields, Flow, Json, MemoryRunner, Record, Topic, bind, count, tumbling
from envelope import HopWriter, decode
from jobs.republish import InputRecord, InputTopics, JsonPayload, Processor, Wrapping, identity
from tests.support.both import Both

VALUE = b'{"k":"a"}'
RECORD = Record("in", 0, 0, b"a", VALUE, -1, topic_id="T1")


def windowed(topic: Topic) -> Flow:
    return Flow("f").source(topic).aggregate("s", key="k", fold=Fields(n=count()), window=tumbling("1h"))


def republished() -> bytes:
    source = InputTopics("in", Wrapping.NONE, JsonPayload)
    processor = Processor(identity, via="r", source=source, targets={"out": 1_000_000})
    (out,) = processor.process(
        InputRecord("in", 0, 0, b"a", VALUE, timestamp_ms=-1), HopWriter("in", 0, via="r", topic_id="T1")
    )
    return out.value


def published() -> bytes:
    flow = Flow("p").source(Topic("in", Json({"k": str}), envelope=False)).publish("out", key="k")
    both = Both(flow.aggregate("s", key="k", fold=Fields(n=count())))
    both.process([RECORD])  # and compares the outputs of both paths
    (out,) = both.memory.outputs
    return out.value


@pytest.mark.parametrize("made", [republished, published])
def test_behind_a_republisher_and_behind_a_flow_it_has_no_event_time(made) -> None:
    value = made()
    assert decode(value).event_time_us is None
    both = Both(windowed(Topic("out", Json({"k": str}))))
    both.topic_ids["in"] = "T1"
    both.process([Record("out", 0, 0, b"a", value, 1_700_000_000_000, topic_id="T1")])
    assert (both.results("s"), both.reasons()) == ({}, [(0, "bad_event_time")])


def test_read_directly_it_has_no_event_time() -> None:
    both = Both(windowed(Topic("in", Json({"k": str}), envelope=False)))
    both.process([RECORD])
    assert (both.results("s"), both.reasons()) == ({}, [(0, "bad_event_time")])


def test_an_event_time_before_1970_of_its_own_is_one() -> None:
    flow = Flow("p").source(Topic("in", Json({"k": str}), envelope=False)).publish("out", key="k")
    runner = MemoryRunner(flow, bind(flow, {}, "memory://no-timestamp-2"))
    runner.process([Record("in", 0, 0, b"a", VALUE, 0)])
    assert decode(runner.outputs[0].value).event_time_us == 0
