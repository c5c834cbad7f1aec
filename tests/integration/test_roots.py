"""Roots and keys in the tasks that read, against a real broker, on both paths."""

from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pytest

from aggregations.definition.aggregates import count
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.engine.job import Job, TaskReport
from aggregations.engine.ranges import Range, Slot
from aggregations.per_message.ledger import UnlistedError
from aggregations.run.begin import begin
from aggregations.run.binding import bind
from aggregations.spark.blocks import unpack
from aggregations.spark.tasks import outcome_of, reading
from envelope import Envelope, Hop, Verdict, encode
from jobs.dead_letters.letters import Letters
from persistence.kafka import AcknowledgedProducer, KafkaSettings, Topics
from persistence.protocol import FlowRef
from persistence.registry import open_store
from tests.support.jobs import changed, job_of

pytestmark = pytest.mark.integration


def key_of(element):
    return element["tail"]


@dataclass
class Broker:
    """A root topic with three records, a topic of legs, and what a reading task makes of them."""

    kafka: str
    raw: str
    legs: str
    dead: str

    def __post_init__(self) -> None:
        self.settings = KafkaSettings(self.kafka)
        self.ids = Topics(self.settings).topic_ids([self.raw, self.legs])
        with AcknowledgedProducer(self.settings) as producer:
            for _ in range(3):
                producer.send(self.raw, b"x")
            producer.flush()

    def leg(self, offset: int, root: str = "", topic_id: str | None = None) -> bytes:
        named = self.ids[self.raw] if topic_id is None else topic_id
        hop = Hop(root or self.raw, 0, offset, via="wrap", index=0, topic_id=named)
        return encode(Envelope(b'{"tail":"N1"}', chain=(hop,)))

    def read(self, values: list[bytes], key: Any, store: str, *, others: int = 0) -> TaskReport:
        """Fold these values.

        Args:
            values: What is in the topic behind what was read before.
            key: The stage's key.
            store: URL.
            others: Number of further tasks of the batch.
        """
        start = Topics(self.settings).marks([self.legs])[self.legs, 0].high
        with AcknowledgedProducer(self.settings) as producer:
            for value in values:
                producer.send(self.legs, value, b"N1")
            producer.flush()
        flow = Flow("roots").source(Topic(self.legs, Json({"tail": str})))
        flow = flow.aggregate("aircraft", key, Fields(legs=count()))
        run = begin(flow, bind(flow, {}, store))
        known = {self.legs: self.ids[self.legs]}
        job = job_of(
            *(flow, run, known),
            kafka=self.settings,
            dead_letters=self.dead,
            tasks=[
                Slot(0, (Range(0, start, start + len(values), self.legs),)),
                *(Slot(number, ()) for number in range(1, 1 + others)),
            ],
        )
        report, failures = attempt(job)
        if failures and all(isinstance(one, UnlistedError) for one in failures):  # as the driver does
            run.list_dead({entry for one in failures for entry in one.entries})
            report, failures = attempt(changed(job, ledger=run.ledger))
        run.close()
        assert failures == []
        return report


def attempt(job: Job) -> tuple[TaskReport, list[Exception]]:
    return outcome_of(unpack(reading(job)([0])))


@pytest.fixture
def broker(kafka, topic) -> Broker:
    return Broker(kafka, topic(1, "raw"), topic(1, "legs"), topic(1, "dead"))


PATHS = pytest.mark.parametrize("key", ["tail", key_of], ids=["vectorised", "per message"])


@PATHS
def test_a_root_beyond_the_end_of_its_topic_goes_to_the_dead_letters(broker, tmp_path, key) -> None:
    leg, raw = broker.leg, broker.raw
    values = [leg(0), leg(2), leg(3), leg(2**62), leg(2**62, "elsewhere"), leg(2**62, raw, "of-another-life")]
    report = broker.read(values, key, f"sqlite://{tmp_path}/states.db")
    assert report.counts.reasons == {"root_beyond_end": 2}
    assert sum(report.counts.verdicts["aircraft"].values()) == 4
    letters = Letters(broker.settings, broker.dead)
    assert sorted(letter.facts.offset for letter in letters if letter.facts) == [2, 3]


@PATHS
def test_a_root_that_does_not_name_its_topic_s_id_is_of_the_current_one_and_only_that_is_remembered(
    broker, tmp_path, key
) -> None:
    values = [broker.leg(1), broker.leg(1, topic_id=""), broker.leg(1, topic_id="of-another-life")]
    values.append(broker.leg(1, "elsewhere", "id-of-nothing"))
    report = broker.read(values, key, f"sqlite://{tmp_path}/states.db")
    verdicts = report.counts.verdicts["aircraft"]
    assert (verdicts[Verdict.DUPLICATE_IN_BATCH], verdicts[Verdict.STALE_INCARNATION]) == (1, 1)
    assert report.seen == {broker.raw: (broker.ids[broker.raw],)}


@PATHS
def test_the_only_task_of_a_batch_writes_what_it_folded_and_one_of_several_waits_for_the_others(
    broker, tmp_path, key
) -> None:
    written = {}
    for others in (0, 1):
        url = f"sqlite://{tmp_path}/{others}.db"
        broker.read([broker.leg(0)], key, url, others=others)
        with closing(open_store(url)) as store:
            written[others] = [key for key, _ in store.scan(FlowRef("roots").stage("aircraft"))]
    assert written == {0: [b"N1"], 1: []}
