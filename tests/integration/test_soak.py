"""A slice of the soak: real processes and servers, killed, frozen and cut by a fixed seed, exact after every round."""

import os
from pathlib import Path

import pytest

from persistence.kafka import KafkaSettings, Topics
from tests.soak.orders import Feed, Truth, orders
from tests.soak.report import Soak, show
from tests.soak.run import soak
from tests.support.republish import Make, read_all

pytestmark = [pytest.mark.spark, pytest.mark.integration, pytest.mark.slow]

SEED = int(os.environ.get("SOAK_SEED", "11"))


@pytest.mark.kills
def test_a_chain_whose_processes_and_servers_are_killed_frozen_and_cut_stays_exact(tmp_path: Path) -> None:
    plan = Soak(seed=SEED, messages=10_000, keys=400, kills=2, stores=["redis", "redis"])
    done = soak(plan, tmp_path, minutes=10)
    show(done)
    assert not done.violations
    assert done.finished
    assert done.counts == done.wanted
    assert done.sent >= 10_000
    assert Soak.load(tmp_path) == done


def test_orders_of_a_soak_that_was_killed_are_known_to_the_next_one_and_sent_once(
    settings: KafkaSettings, topic: Make, topics: Topics
) -> None:
    sold = topic(3, "orders")

    def feed(sent: int) -> Feed:
        return Feed(settings, seed=SEED, keys=50, sent=sent, since=since, topic=sold)

    since: dict[int, int] = {}
    feed(0).send(100)
    since = {partition: one.high for (_, partition), one in topics.marks([sold]).items()}
    feed(100).send(900)  # of which nobody is told
    truth = Truth()
    for order, _ in zip(orders(SEED, 50), range(1000), strict=False):
        truth.add(order)
    again = feed(100)
    assert (again.sent, again.truth.sums) == (1000, truth.sums)
    assert len(read_all(settings, sold)) == 1000
