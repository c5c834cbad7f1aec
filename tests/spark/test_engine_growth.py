"""A key in two partitions of a topic partitioned by that key, as after partitions were added."""

import json
import threading
from collections import defaultdict

import pytest
from confluent_kafka import Producer

from aggregations.definition.aggregates import count, total
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.engine.options import RunOptions
from aggregations.errors import RunRefusedError
from aggregations.run.states import state_of
from aggregations.spark import run_flow
from envelope import Envelope, Hop, decode, encode
from persistence.kafka import KafkaSettings
from persistence.manifest import decode_manifest
from persistence.protocol import FlowRef
from persistence.registry import open_store
from tests.messages import Leg
from tests.support.flows import Totals, tail
from tests.support.world import World, republished
from tests.support.world import legs as made

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
    options = RunOptions(kafka=KafkaSettings(kafka), stores=url, dead_letters=dead, until_caught_up=True)
    report = run_flow(flow, options)
    assert report.records == 2 * COUNT
    store = open_store(url)
    for stage in flow.stages:
        ref = FlowRef("growth").stage(stage.name)
        folded = [state_of(stored, ref, key).fold for key, stored in store.scan(ref)]
        assert folded == [{"legs": 2 * COUNT, "air": 2 * COUNT}]
    store.close()


ROUND = 200


def flights(source: str, path: str = "columns", history: int = 2) -> Flow:
    flow = Flow("flights").source(Topic(source, payload=Leg))
    key, fold = ("tail", Fields(legs=count())) if path == "columns" else (tail, Totals())
    return flow.aggregate("aircraft", key, fold, history=history)


class Sender:
    """Sends successive rounds of legs."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.legs = made(10 * ROUND, tails=20)
        self.sent = 0

    def send(self, partitions: int = 0) -> None:
        """Add partitions, then send a round."""
        if partitions:
            self.world.topics.add_partitions(self.world.topic, partitions)
        self.world.send(republished(self.legs, range(self.sent, self.sent + ROUND)))
        self.sent += ROUND

    def expected(self) -> dict[bytes, int]:
        found: dict[bytes, int] = defaultdict(int)
        for leg in self.legs[: self.sent]:
            found[leg.tail.encode()] += 1
        return dict(found)

    def folded(self, flow: Flow) -> dict[bytes, int]:
        return {key: state["legs"] for key, state in self.world.results(flow, "aircraft").items()}

    def growth(self, flow: Flow) -> object:
        return decode_manifest(self.world.manifest(flow), FlowRef(flow.name)).growth.get(self.world.topic)


@pytest.mark.parametrize("path", ["columns", "messages"])
@pytest.mark.parametrize("counts", [(4, 6), (4, 8, 12)])
def test_partitions_that_were_added_under_a_backlog_while_the_flow_was_down(world, path, counts) -> None:
    sender, flow = Sender(world), flights(world.topic, path)
    sender.send(counts[0])
    world.run(flow)
    sender.send()
    for partitions in counts[1:]:
        sender.send(partitions)
    plans = []
    report = world.run(flow, max_records=90, planned=plans.append)
    assert report.batches > 4
    assert "below_floor" not in report.verdicts["aircraft"]
    assert sender.folded(flow) == sender.expected()
    assert f"growth of topic {world.topic} from {counts[0]} to {counts[-1]} partitions" in plans[0].lines()[-1]
    assert sender.growth(flow).until is None, "producers may not know of the new partitions for five minutes"
    for _ in range(2):  # the first run takes the ends and reads to them, the second one finds them reached
        sender.send()
        world.run(flow, metadata_max_age=0)
    assert sender.growth(flow) is None
    assert sender.folded(flow) == sender.expected()


def test_partitions_that_are_added_while_the_flow_lags(world, caplog) -> None:
    sender, flow, stop = Sender(world), flights(world.topic), threading.Event()
    sender.send()
    world.run(flow)
    sender.send()

    def grow(report) -> None:
        if sender.sent == 2 * ROUND:
            sender.send(3)
            sender.send(5)
        elif sum(world.ends(flow).values()) >= sender.sent:
            stop.set()

    world.run(flow, until_caught_up=False, trigger_seconds=0.1, max_records=60, progress=grow, stop=stop)
    assert sender.folded(flow) == sender.expected()
    assert f"growth of topic {world.topic} from 2 to 5 partitions: states evict no position" in caplog.text


def in_order(world: World, out: str) -> bool:
    """Whether the outputs of every key and root partition rise."""
    seen: dict[object, list[int]] = defaultdict(list)
    for record in world.records(out):
        root = decode(record.value or b"").chain[0]
        seen[record.partition, record.key, root.partition].append(root.offset)
    return all(offsets == sorted(offsets) for offsets in seen.values())


def test_what_a_flow_publishes_stays_in_order_when_partitions_are_doubled_under_a_backlog(world, topic) -> None:
    out, stop = topic(partitions=2, name="out"), threading.Event()
    sender, flow = Sender(world), flights(world.topic).publish(out)
    sender.send()
    world.run(flow)
    sender.send()

    def grow(report) -> None:
        if sender.sent == 2 * ROUND:
            sender.send(4)
        elif sum(world.ends(flow).values()) >= sender.sent:
            stop.set()

    options = {"until_caught_up": False, "trigger_seconds": 0.1, "max_records": 60, "progress": grow, "stop": stop}
    world.run(flow, metadata_max_age=0.5, **options)
    assert len(world.ends(flow)) == 4
    assert sender.folded(flow) == sender.expected()
    assert in_order(world, out)
    assert len(world.records(out)) >= sender.sent


def test_a_growth_that_no_order_can_be_kept_in_is_refused_by_name(world, topic) -> None:
    sender, flow = Sender(world), flights(world.topic).publish(topic(partitions=2, name="out"))
    sender.send()
    world.run(flow)
    sender.send()

    def grow(report) -> None:
        if sender.sent == 2 * ROUND:
            sender.send(3)

    with pytest.raises(RunRefusedError, match=r"grew from 2 to 3 partitions .*--accept grown-undrained"):
        world.run(flow, until_caught_up=False, trigger_seconds=0.1, max_records=60, progress=grow)
    with pytest.raises(RunRefusedError, match=r"grew from 2 to 3 partitions .*--accept grown-undrained"):
        world.run(flow)
    world.run(flow, accept=["grown-undrained"])
    assert sender.folded(flow) == sender.expected()


def test_a_publishing_flow_that_has_read_everything_goes_on_with_any_number_of_partitions(world, topic) -> None:
    out = topic(partitions=2, name="out")
    sender, flow = Sender(world), flights(world.topic).publish(out)
    sender.send()
    world.run(flow)
    world.topics.add_partitions(world.topic, 3)
    world.run(flow)
    sender.send()
    world.run(flow)
    assert sender.folded(flow) == sender.expected()
    assert in_order(world, out)
