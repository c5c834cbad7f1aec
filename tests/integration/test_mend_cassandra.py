"""Mends of states in Cassandra, alone and with an upstream stage in Redis: they die at every kind of effect."""

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from aggregations.definition.flow import Flow
from aggregations.run.mend import Mending
from persistence.cassandra import apply_schema
from persistence.commit.faults import use
from persistence.errors import Fenced
from tests.support.mends import Site, same_as_its_log
from tests.support.pure import FLEET, bare, batch, leg
from tests.support.replays import CrashAt, dies
from tests.support.runs import BUCKETS, EVERY

pytestmark = [pytest.mark.integration, pytest.mark.slow]

STAGES = ("aircraft", "carrier")
KEYS = (b"N0", b"N1", b"N9")
MENDED = {b"N0": Mending.CHANGED, b"N1": Mending.PUT_BACK, b"N9": Mending.EMPTIED}


class Cassandra:
    """A keyspace, and flows with states in it."""

    def __init__(self, address: str, redis: str, session: Any, directory: Path) -> None:
        self._session = session
        self._directory = directory
        self._url = f"{address}/mends?replication=1&buckets={BUCKETS}"
        self._redis = redis
        apply_schema(self._url)

    def site(self, *, mixed: bool) -> Site:
        """A flow with a wrong state, a lost one, and one too many, all of them in Cassandra."""
        name = f"fleet-{uuid.uuid4().hex[:8]}"
        flow: Flow[Any] = Flow(name).source(bare()).aggregate("carrier", "carrier", FLEET)
        flow = flow.aggregate("aircraft", "tail", FLEET)
        redis = f"{self._redis}?prefix={name}"
        made = Site(flow, self._directory, stores={"aircraft": self._url, "carrier": redis if mixed else self._url})
        made.run(batch(*range(1, 20)))
        made.spoil("aircraft", b"N0", n=-1)
        self.lose(name, b"N1")
        made.spoil("aircraft", b"N9", made.held("aircraft")[b"N2"], n=3, m=3)
        return made

    def lose(self, flow: str, key: bytes) -> None:
        """Delete a row."""
        where = "WHERE flow = %s AND generation = 1 AND stage = 'aircraft' AND bucket = %s AND key = %s IF EXISTS"
        done = self._session.execute(f"DELETE FROM mends.state {where}", (flow, crc32(key) % BUCKETS, key))
        assert done.was_applied


@pytest.fixture
def cassandra(cassandra_url: str, redis_url: str, tmp_path: Path) -> Iterator[Cassandra]:
    from cassandra.cluster import Cluster

    host, _, port = cassandra_url.removeprefix("cassandra://").partition(":")
    with Cluster([host], port=int(port), protocol_version=5) as cluster, cluster.connect() as session:
        yield Cassandra(cassandra_url, redis_url, session, tmp_path)


def kinds(cassandra: Cassandra, *, mixed: bool) -> list[int]:
    """The first and the last effect of each kind."""
    trial = cassandra.site(mixed=mixed)
    with use(CrashAt(0, applied=False)) as counted:
        assert trial.mend("aircraft", *KEYS) == MENDED
    same_as_its_log(trial, STAGES)
    points = counted.points
    assert {"epoch", "pointer", "mend", "write:aircraft"} <= {*points}
    last = {point: number for number, point in enumerate(points, start=1)}
    return sorted({*last.values(), *(1 + points.index(point) for point in last)})


@pytest.mark.parametrize("applied", [pytest.param(False, marks=pytest.mark.kills), True])
@pytest.mark.parametrize("mixed", [False, pytest.param(True, marks=pytest.mark.kills)], ids=["alone", "behind redis"])
@pytest.mark.parametrize("every", EVERY)
def test_a_mend_in_cassandra_that_dies_is_repeated_or_the_flow_goes_on_first(
    cassandra: Cassandra, every: int, mixed: bool, applied: bool
) -> None:
    for number in kinds(cassandra, mixed=mixed)[::every]:
        site = cassandra.site(mixed=mixed)
        assert dies(lambda site=site: site.mend("aircraft", *KEYS), number, applied=applied)  # type: ignore[misc]
        if number % 2:
            run = site.run([leg(20, "N2", carrier="AA", minutes=1), leg(21, "N9", carrier="UA", minutes=1)])
            assert not run.run.crashed
            site.mend("aircraft", *KEYS)
        else:
            assert site.mend("aircraft", *KEYS) in ({}, MENDED)
        same_as_its_log(site, STAGES)
        assert site.mend("aircraft", *KEYS) == {}


def test_what_was_frozen_before_a_mend_writes_nothing_afterwards(cassandra: Cassandra) -> None:
    site = cassandra.site(mixed=False)
    frozen = site.runner()
    frozen.run.finish()
    assert site.mend("aircraft", *KEYS) == MENDED
    with pytest.raises(Fenced):
        frozen.process(batch(20, 21))
    same_as_its_log(site, STAGES)
