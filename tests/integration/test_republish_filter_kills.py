"""A republisher with a filter on a real broker, killed at every step of its commit: the oracle is the filter alone."""

import json
import random
import signal
import uuid
from pathlib import Path
from typing import Any

import pytest

from envelope import decode
from envelope.deadletter import DeadLetterHeaders
from envelope.filters import Arrival, FilterStates
from persistence.kafka import KafkaSettings
from tests.support import filters
from tests.support.republish import Make, process, produce, read_all

pytestmark = pytest.mark.integration

FAULTS = [
    "filter:claim.after@1",
    "republish:produce.after@1",
    "republish:flush.before@1",
    "republish:flush.after@1",
    "republish:dead_letter.after@1",
    "filter:save.before@1",
    "filter:save.after@1",
    "republish:commit.before@1",
    "republish:commit.after@1",
]


FORWARDING = ["event_ids", "keys_and_ids"]
"""Filters that pass on what has no id: nothing is rejected."""
OTHERS = [*FORWARDING, "sessions", "desks"]


@pytest.mark.parametrize("name", ["by_id", *(pytest.param(one, marks=pytest.mark.kills) for one in OTHERS)])
def test_a_republisher_with_a_filter_that_is_killed_loses_nothing_and_passes_on_no_duplicate(
    name: str, settings: KafkaSettings, topic: Make, tmp_path: Path
) -> None:
    rule = getattr(filters, name)
    source, target, dead = topic(2, "in"), topic(2, "out"), topic(1, "dead")
    arguments: dict[str, Any] = {
        "bootstrap": settings.bootstrap,
        "options": {"group.instance.id": "one"},  # the next run takes the place of the killed one at once
        "source": source,
        "kind": "json",
        "target": target,
        "dead_letter": dead,
        "name": "once",
        "group": uuid.uuid4().hex,
        "until_caught_up": True,
        "transform": "jobs.republish.record:identity",
        "deduplicate": f"tests.support.filters:{name}",
        "store": f"sqlite://{tmp_path}/states.db",
    }
    draw, number, last = random.Random(5), 0, list[tuple[bytes, bytes]]()
    verdicts: dict[str, int] = {}
    faults = [one for one in FAULTS if name not in FORWARDING or "dead_letter" not in one]
    for fault in [*faults, ""]:
        new = [(draw.choice([b"A", b"B", b"C"]), b'{"id": %d}' % n) for n in range(number, number + 12)]
        number += 12
        produce(settings, source, [*last, *new, (b"A", b"{}")])  # it sends again what it is not sure of
        last = new[-5:]
        run = process(fault, **arguments)
        out, _ = run.communicate(timeout=60)
        assert run.returncode == (0 if not fault else -signal.SIGKILL), fault
        if not fault:
            verdicts = json.loads(out.splitlines()[-1])["verdicts"]

    alone, wanted, unusable, reasons = FilterStates(rule), set(), set(), set()
    for one in sorted(read_all(settings, source), key=lambda one: (one.partition(), one.offset())):
        ruling = alone.judge(Arrival(source, one.partition(), one.offset(), one.key(), one.value()))
        place = one.partition(), one.offset()
        if ruling.forward:
            wanted.add(place)
        elif ruling.verdict.diverts:
            unusable.add(place)
            reasons.add((rule.name, ruling.reason))
    hops = [decode(one.value()).chain[0] for one in read_all(settings, target)]
    assert {(hop.partition, hop.offset) for hop in hops} == wanted
    unidentified = [one for one in read_all(settings, source) if one.value() == b"{}"]
    assert len(wanted) == number + (len(unidentified) - len(unusable))
    letters = [DeadLetterHeaders.read(one.headers()) for one in read_all(settings, dead)]
    assert {(one.partition, one.offset) for one in letters if one} == unusable
    assert {(one.stage, one.reason) for one in letters if one} == reasons
    assert verdicts["accepted"] >= 12
    assert verdicts["rejected" if reasons else "unidentified"] >= 1
