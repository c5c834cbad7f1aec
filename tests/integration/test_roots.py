"""Roots that cannot exist, against a real broker, in the tasks of both paths."""

import pyarrow as pa
import pytest

from aggregations.fields import Fields, count
from aggregations.flow import Flow
from aggregations.run import begin, bind
from aggregations.source import Json, Topic
from aggregations.spark.job import Job
from aggregations.spark.tasks import outcome_of, reading
from envelope import Envelope, Hop, encode
from jobs.letters import Letters
from persistence.kafka import AcknowledgedProducer, KafkaSettings, Topics

pytestmark = pytest.mark.integration


def key_of(element):
    return element["tail"]


@pytest.mark.parametrize("key", ["tail", key_of], ids=["vectorised", "per message"])
def test_a_root_beyond_the_end_of_its_topic_goes_to_the_dead_letters(kafka, topic, tmp_path, key) -> None:
    raw, legs, dead = topic(1, "raw"), topic(1, "legs"), topic(1, "dead")
    settings = KafkaSettings(kafka)
    topics = Topics(settings)
    ids = topics.topic_ids([raw, legs])
    with AcknowledgedProducer(settings) as producer:
        for _ in range(3):
            producer.send(raw, b"x")

        def leg(offset: int, root: str = raw, topic_id: str = ids[raw]) -> bytes:
            hop = Hop(root, 0, offset, via="wrap", index=0, topic_id=topic_id)
            return encode(Envelope(b'{"tail":"N1"}', chain=(hop,)))

        values = [leg(0), leg(2), leg(3), leg(2**62), leg(2**62, "elsewhere"), leg(2**62, raw, "of-another-life")]
        for value in values:
            producer.send(legs, value, b"N1")
        producer.flush()
    flow = Flow("roots").source(Topic(legs, Json({"tail": str}))).aggregate("aircraft", key, Fields(legs=count()))
    run = begin(flow, bind(flow, {}, f"sqlite://{tmp_path}/states.db"))
    job = Job(flow, run.ref, dict(run.urls), run.term, run.batch, 1, settings, dead, ids, {})
    rows = pa.table(
        {
            "key": pa.array([b"N1"] * len(values), pa.binary()),
            "value": pa.array(values, pa.binary()),
            "topic": [legs] * len(values),
            "partition": pa.array([0] * len(values), pa.int32()),
            "offset": range(len(values)),
            "timestamp": pa.array([0] * len(values), pa.timestamp("us")),
        }
    )
    parcels = [row for batch in reading(job)(iter(rows.to_batches())) for row in batch.to_pylist()]
    report, failures = outcome_of((row["kind"], row["payload"]) for row in parcels)
    assert failures == []
    assert report.counts.reasons == {"bad_coordinates": 2}
    assert sum(report.counts.verdicts["aircraft"].values()) == 4
    assert sorted(letter.facts.offset for letter in Letters(settings, dead) if letter.facts) == [2, 3]
    run.close()
