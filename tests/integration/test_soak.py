"""A slice of the soak: real processes and servers, killed, frozen and cut by a fixed seed, exact after every round."""

import os
from pathlib import Path

import pytest

from tests.soak.report import Soak, show
from tests.soak.run import soak

pytestmark = [pytest.mark.spark, pytest.mark.integration, pytest.mark.slow]

SEED = int(os.environ.get("SOAK_SEED", "11"))


def test_a_chain_whose_processes_and_servers_are_killed_frozen_and_cut_stays_exact(tmp_path: Path) -> None:
    plan = Soak(seed=SEED, messages=15_000, keys=400, kills=3, stores=["redis", "redis"])
    done = soak(plan, tmp_path, minutes=10)
    show(done)
    assert not done.violations
    assert done.finished
    assert done.counts == done.wanted
    assert done.sent >= 15_000
    assert Soak.load(tmp_path) == done
