"""The republisher on a real broker: killed, stopped, rebalanced, and chains hop by hop."""

import json
import signal
import threading
import uuid
from typing import Any

import pytest

from envelope import Envelope, decode, encode
from envelope.deadletter import DeadLetterHeaders
from jobs.republish import InputTopics, OutputRecord, Republisher
from persistence.kafka import KafkaSettings, Topics
from tests.integration.republish_process import split
from tests.support.republish import (
    INPUTS,
    POISON,
    Make,
    expected,
    killed_and_repeated,
    outputs,
    process,
    produce,
    read_all,
    run,
)

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    "fault",
    [
        "republish:produce.before@3",
        "republish:produce.after@3",
        "republish:flush.after@2",
        "republish:dead_letter.before@1",
        "republish:dead_letter.after@1",
        "republish:commit.before@2",
        "republish:commit.after@2",
    ],
)
def test_a_republisher_that_is_killed_repeats_and_loses_nothing(
    fault: str, settings: KafkaSettings, topic: Make
) -> None:
    source, target, dead = topic(4, "in"), topic(3, "out"), topic(1, "dead")
    mixed = [*INPUTS[:900], *POISON, *INPUTS[900:]]
    produce(settings, source, mixed)
    arguments: dict[str, Any] = {
        "bootstrap": settings.bootstrap,
        "options": {"group.instance.id": "one"},  # the next run takes the place of the killed one at once
        "source": source,
        "kind": "raw",
        "target": target,
        "dead_letter": dead,
        "name": "split",
        "group": uuid.uuid4().hex,
        "batch_size": 500,
        "until_caught_up": True,
    }
    killed_and_repeated(fault, arguments)

    wanted, copies = expected(settings, source), outputs(settings, target)
    assert set(copies) == set(wanted)
    for place, values in copies.items():
        assert len(set(values)) == 1, "copies of one output are the same bytes"
        assert decode(values[0]).payload == wanted[place]
    dead_letters = read_all(settings, dead)
    assert {(m.key(), m.value()) for m in dead_letters} == set(POISON)
    letters = [DeadLetterHeaders.read(m.headers()) for m in dead_letters]
    assert {(letter.topic, letter.reason, letter.raised and letter.raised.kind) for letter in letters if letter} == {
        (source, "transform_failed", "ValueError")
    }


def test_a_stop_by_signal_finishes_what_is_under_way_and_repeats_nothing(
    settings: KafkaSettings, topic: Make, topics: Topics
) -> None:
    source, target = topic(4, "in"), topic(3, "out")
    produce(settings, source, INPUTS)
    arguments: dict[str, Any] = {
        "bootstrap": settings.bootstrap,
        "source": source,
        "kind": "raw",
        "target": target,
        "name": "split",
        "group": uuid.uuid4().hex,
        "batch_size": 100,
    }
    first = process(**arguments)
    assert first.stdout
    assert int(first.stdout.readline()) > 0
    assert first.poll() is None
    first.send_signal(signal.SIGTERM)
    rest, _ = first.communicate(timeout=60)
    assert first.returncode == 0
    done = json.loads(rest.splitlines()[-1])["consumed"]
    assert sum(topics.group_offsets(arguments["group"]).values()) == done
    second = process(**arguments, until_caught_up=True)
    second.communicate(timeout=60)
    copies = outputs(settings, target)
    assert set(copies) == set(expected(settings, source))
    assert {len(values) for values in copies.values()} == {1}


def test_members_that_come_and_go_lose_nothing_and_never_commit_backwards(
    settings: KafkaSettings, topic: Make, topics: Topics
) -> None:
    source, target, group = topic(6, "in"), topic(3, "out"), uuid.uuid4().hex
    produce(settings, source, INPUTS)
    seen: dict[tuple[str, int], int] = {}
    backwards = []
    reached = {name: threading.Event() for name in ("first", "second")}
    errors = []

    def watch() -> None:
        for place, offset in topics.group_offsets(group, [source]).items():
            if offset < seen.get(place, 0):
                backwards.append(place)
            seen[place] = offset

    def member(name: str) -> tuple[Republisher, threading.Thread]:
        republisher = Republisher(
            split,
            source=InputTopics.of(source, "raw"),
            target=target,
            name="split",
            group=group,
            settings=settings,
            batch_size=20,
            max_wait=0.05,
        )

        def work() -> None:
            try:
                republisher.run(progress=lambda counts: reached[name].set())
            except Exception as error:
                errors.append(error)
                reached[name].set()

        thread = threading.Thread(target=work)
        thread.start()
        return republisher, thread

    first, first_thread = member("first")
    assert reached["first"].wait(60)
    second, second_thread = member("second")
    while not reached["second"].is_set() and not errors:
        produce(settings, source, INPUTS[:200])
        watch()
    first.stop()
    first_thread.join(60)
    produce(settings, source, INPUTS[:200])
    ends = {place: marks.high for place, marks in topics.marks([source]).items()}
    while seen != ends and not errors:
        watch()
    second.stop()
    second_thread.join(60)
    assert not errors
    assert not backwards
    assert first.statistics.rebalances > 1
    copies, wanted = outputs(settings, target), expected(settings, source)
    assert set(copies) == set(wanted)
    assert all(len(set(values)) == 1 for values in copies.values())


def test_chains_grow_hop_by_hop_and_keep_what_they_carry(settings: KafkaSettings, topic: Make, topics: Topics) -> None:
    one, two, three = (topic(2, name) for name in ("one", "two", "three"))
    start = Envelope(b"payload", key=b"k", event_id="e", traceparent="00-a-b-01", unknown=b"\xc0\x3e\x07")
    produce(settings, one, [(b"k", encode(start))])
    run(settings, source=one, target=two, name="first")
    run(settings, lambda r: [OutputRecord(key=b"x"), OutputRecord(key=b"y")], source=two, target=three, name="second")
    ids = topics.topic_ids([one, two])
    got = sorted((decode(m.value()) for m in read_all(settings, three)), key=lambda e: e.chain[-1].index or 0)
    assert [e.key for e in got] == [b"x", b"y"]
    for index, envelope in enumerate(got):
        first, second = envelope.chain
        assert (first.topic, first.via, first.index, first.count, first.rekeyed) == (one, "first", 0, 1, False)
        assert (second.topic, second.via, second.index, second.count, second.rekeyed) == (two, "second", index, 2, True)
        assert (first.topic_id, second.topic_id) == (ids[one], ids[two])
        assert None not in (first.leader_epoch, first.timestamp_ms, second.timestamp_ms)
        assert envelope == Envelope(
            b"payload", (first, second), envelope.key, "e", traceparent="00-a-b-01", unknown=b"\xc0\x3e\x07"
        )
