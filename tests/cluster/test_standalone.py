"""A flow on a standalone cluster whose machine has headwater without the packages it needs; executors and drivers die."""

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from aggregations.run.binding import bind
from jobs import views
from jobs.demo import audit, flights
from jobs.loading import load_flow
from persistence.cassandra import apply_schema
from persistence.kafka import AcknowledgedProducer, KafkaSettings
from tests.support import redis_server
from tests.support.legs import republished
from tests.support.spark import FAST, JAVA_OPTIONS
from tests.support.standalone import Standalone, standalone

pytestmark = [pytest.mark.spark, pytest.mark.integration, pytest.mark.slow]

ROOT = Path(load_flow.__code__.co_filename).parents[1]
FLIGHTS = 1_200
# A module that `--py-files` sends beside the flow's own.
RULES = """
def has_a_carrier(leg):
    return bool(leg["carrier"])
"""
FLEET = """
import rules
from aggregations import Flow, Topic
from jobs.demo.flow import flow as demo
from jobs.submit import run

source = Flow("fleet").source(Topic({topic!r}, payload=demo.topic.payload)).filter(rules.has_a_carrier)
flow = Flow("fleet", (*source.steps, *demo.steps), source.inputs)

if __name__ == "__main__":
    run(flow)
"""


def needed(name: str, extras: set[str], found: dict[str, importlib.metadata.Distribution]) -> None:
    """Add the distributions that a package needs, without Spark's own, which a cluster has."""
    for text in importlib.metadata.requires(name) or ():
        one = Requirement(text)
        if one.marker and not any(one.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            continue
        if one.name != "pyspark" and one.name not in found:
            found[one.name] = importlib.metadata.distribution(one.name)
            needed(one.name, one.extras, found)


def packed(archive: Path) -> Path:
    """An archive with the packages that headwater needs, as `pip install --target` would place them."""
    found: dict[str, importlib.metadata.Distribution] = {}
    needed("headwater", set(), found)
    with tarfile.open(archive, "w") as tar:
        for one in found.values():
            for file in one.files or ():
                if file.parts[0] != ".." and file.suffix != ".pyc":
                    tar.add(str(one.locate_file(file)), str(file))
    return archive


class Driver:
    """spark-submit of the flow, as a process whose lines are read as it goes."""

    def __init__(self, cluster: Standalone, archive: Path, options: list[str], cwd: Path, **env: str) -> None:
        conf = {
            "spark.executor.cores": "1",
            "spark.executor.memory": "512m",
            "spark.executor.extraJavaOptions": JAVA_OPTIONS,
            "spark.executorEnv.PYTHONPATH": f"packages:{ROOT}",
            # An interpreter without a virtual environment: what it imports comes with the archive.
            "spark.pyspark.python": os.path.realpath(sys.executable),
            "spark.pyspark.driver.python": sys.executable,
            "spark.default.parallelism": "2",
            **FAST,
        }
        submit = [str(Path(importlib.import_module("pyspark").__file__ or "").parent / "bin" / "spark-submit")]
        given = [text for name, value in conf.items() for text in ("--conf", f"{name}={value}")]
        self._process = subprocess.Popen(
            [*submit, "--master", cluster.master, "--py-files", "rules.py", "--archives", f"{archive}#packages"]
            + [*given, "fleet.py", *options],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(ROOT), "SPARK_LOCAL_IP": "127.0.0.1", **env},
            stdout=subprocess.PIPE,
            stderr=(cwd / "driver.log").open("ab"),
            text=True,
        )
        self.lines: list[dict[str, Any]] = []
        self.texts: list[str] = []

    def read(self, batches: int | None = None) -> list[dict[str, Any]]:
        """Read until so many batches are done, or to the end."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.startswith("{"):
                self.texts.append(line)  # spark-submit joins the program's two streams
                continue
            self.lines.append(json.loads(line))
            if batches is not None and sum("batch" in one for one in self.lines) == batches:
                break
        return self.lines

    def wait(self) -> int:
        self.read()
        return self._process.wait()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def test_a_flow_is_exact_on_a_cluster_that_gets_its_packages_and_loses_executors_and_drivers(
    kafka: str,
    topic: Callable[..., str],
    cassandra_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, dead = topic(partitions=2, name="legs"), topic(name="dead")
    with AcknowledgedProducer(KafkaSettings(kafka)) as producer:
        producer.send_many(name, republished(flights.messages(flights.load(FLIGHTS))))
        producer.flush()
    (tmp_path / "fleet.py").write_text(FLEET.format(topic=name))
    (tmp_path / "rules.py").write_text(RULES)
    archive = packed(tmp_path / "packages.tar")
    carriers = f"{cassandra_url}/standalone?replication=1&buckets=4"
    apply_schema(carriers)
    with redis_server.server(*redis_server.DURABLE) as redis, standalone(tmp_path) as cluster:
        stores = {"aircraft": redis.url, "carrier": carriers}
        options = ["--bootstrap", kafka, "--dead-letters", dead, "--until-caught-up", "--max-records", "250", "--json"]
        options += ["--accept", "replication-1"]
        options += [text for stage, url in stores.items() for text in ("--store", f"{stage}={url}")]

        first = Driver(cluster, archive, options, tmp_path, HEADWATER_FAULT="manifest:aircraft.before@6")
        try:
            for done in (1, 3):  # one executor, then all of them
                first.read(done)
                killed = cluster.executors()
                assert killed, "".join(first.texts[-20:])
                for pid in killed[: 1 if done == 1 else None]:
                    os.kill(pid, signal.SIGKILL)
            assert first.wait() == 128 + signal.SIGKILL, "".join(first.texts[-20:])
        finally:
            first.kill()
        [plan, *batches] = first.lines
        lag = sum(plan["plan"]["lag"])
        assert 0 < sum(batch["records"] for batch in batches) < lag

        again = Driver(cluster, archive, options, tmp_path)
        try:
            assert again.wait() == 0, "".join(again.texts[-20:])
        finally:
            again.kill()
        assert again.lines[-1]["done"] is True
        assert 0 < again.lines[-1]["records"] < lag

        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.chdir(tmp_path)
        flow = load_flow("fleet:flow")
        for stage, column in (("aircraft", "tailnum"), ("carrier", "carrier")):
            truth = flights.expected(flights.load(FLIGHTS), column)
            states = views.states(flow, stage, bind(flow, stores, redis.url))
            assert not audit.differences(truth, {view.key.decode(): view.state for view in states}, stage)
