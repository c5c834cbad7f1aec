"""Republishers that are static members of their group: fenced by themselves, and by a successor."""

import signal
import subprocess
import threading
import uuid
from contextlib import nullcontext
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError

from envelope import decode
from jobs.republish import InputTopics, Republisher, identity
from jobs.republish.offsets import MemberFenced, failure
from jobs.republish.place import await_place
from persistence.commit.faults import REPUBLISH_COMMIT, NoFaults, use
from persistence.kafka import KafkaSettings, Topics
from tests.support.republish import INPUTS, Make, process, produce, read_all

pytestmark = pytest.mark.integration


def test_a_process_that_was_frozen_and_overtaken_ends_and_commits_nothing(
    settings: KafkaSettings, topic: Make, topics: Topics
) -> None:
    source, target, group = topic(1, "in"), topic(1, "out"), uuid.uuid4().hex
    produce(settings, source, INPUTS[:50])
    # One that sleeps for longer than its session joins anew when it wakes, and it is the successor that ends.
    static = settings.with_options(group_instance_id="one", session_timeout_ms="20000")
    arguments: dict[str, Any] = {"target": target, "name": "r", "group": group, "max_wait": 0.1}
    frozen = process(
        stderr=subprocess.PIPE,
        bootstrap=static.bootstrap,
        options=dict(static.options),
        source=source,
        kind="raw",
        **arguments,
    )
    successor = Republisher(identity, source=InputTopics.of(source, "raw"), settings=static, **arguments)
    thread = threading.Thread(target=successor.run)
    try:
        while topics.group_offsets(group, [source]) != {(source, 0): 50}:
            assert frozen.poll() is None
        frozen.send_signal(signal.SIGSTOP)
        thread.start()
        produce(settings, source, INPUTS[50:80])
        while topics.group_offsets(group, [source]) != {(source, 0): 80}:
            assert thread.is_alive()
        frozen.send_signal(signal.SIGCONT)
        _, errors = frozen.communicate(timeout=60)
        assert frozen.returncode == 1
        assert "Static consumer fenced: another process has taken the place of one" in errors
        produce(settings, source, INPUTS[80:100])
        while topics.group_offsets(group, [source]) != {(source, 0): 100}:
            assert thread.is_alive()
    finally:
        frozen.kill()
        successor.stop()
        thread.join(60)


@pytest.mark.parametrize("by", ["a commit without a member id", "a join that was never answered"])
def test_a_member_that_was_fenced_by_itself_takes_its_place_again(
    by: str, settings: KafkaSettings, topic: Make, topics: Topics, caplog: pytest.LogCaptureFixture
) -> None:
    source, target, group = topic(1, "in"), topic(1, "out"), uuid.uuid4().hex
    produce(settings, source, INPUTS[:50])
    static = settings.with_options(group_instance_id="one", session_timeout_ms="6000")
    republisher = Republisher(
        identity,
        source=InputTopics.of(source, "raw"),
        target=target,
        name="r",
        group=group,
        settings=static,
        max_wait=0.1,
    )
    refused = threading.Event()

    class Refuses(NoFaults):
        def effect(self, point: str, action: Any) -> Any:
            if point == REPUBLISH_COMMIT and not refused.is_set():
                refused.set()
                raise failure(KafkaError(KafkaError.FENCED_INSTANCE_ID), "committing the input offsets")
            return action()

    def work() -> None:
        with use(Refuses()) if by == "a commit without a member id" else nullcontext():
            republisher.run()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        while topics.group_offsets(group, [source]) != {(source, 0): 50}:
            assert thread.is_alive()
        if by == "a join that was never answered":
            first = topics.static_member(group, "one")
            ghost = Consumer(static.client(group_id=group, partition_assignment_strategy="cooperative-sticky"))
            ghost.subscribe([source])
            while topics.static_member(group, "one") == first:
                ghost.poll(0.1)
            ghost.close()  # does not notify the group: a static member does not leave
        produce(settings, source, INPUTS[50:80])
        while topics.group_offsets(group, [source]) != {(source, 0): 80}:
            assert thread.is_alive()
    finally:
        republisher.stop()
        thread.join(60)
    offsets = [decode(message.value()).chain[0].offset for message in read_all(settings, target)]
    assert sorted(set(offsets)) == list(range(80))
    assert "no other process has taken its place in the group, so it rejoins" in caplog.text


def test_a_place_that_nobody_holds_may_be_taken(settings: KafkaSettings, topics: Topics) -> None:
    group = uuid.uuid4().hex
    assert topics.static_member(group, "one") is None
    await_place(settings.with_options(group_instance_id="one"), group, set(), MemberFenced("what", "remedy"))
