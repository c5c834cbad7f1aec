"""Flows run by the real spark-submit, with executors as separate processes, states in Redis, and a driver that dies."""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyspark
import pytest

from aggregations.run.binding import bind
from jobs import views
from jobs.demo import audit, flights
from jobs.loading import load, load_flow
from persistence.commit.faults import STREAM_BEGIN, STREAM_PLAN, Fault, FaultOutcome
from persistence.commit.steps import CommitStep
from persistence.kafka import AcknowledgedProducer, KafkaSettings
from tests.support import redis_server
from tests.support.legs import republished
from tests.support.spark import FAST, python_path

pytestmark = [pytest.mark.spark, pytest.mark.integration]

ROOT = Path(load.__code__.co_filename).parents[1]
SUBMIT = Path(pyspark.__file__).parent / "bin" / "spark-submit"
MASTER = "local-cluster[2,1,1024]"
FLIGHTS = 600
FLEET = """
from aggregations import Flow, Topic
from jobs.demo.flow import flow as demo
from jobs.submit import run


def has_a_carrier(leg):
    return bool(leg["carrier"])


source = Flow("fleet").source(Topic({topic!r}, payload=demo.topic.payload)).filter(has_a_carrier)
flow = Flow("fleet", (*source.steps, *demo.steps), source.inputs)

if __name__ == "__main__":
    run(flow)
"""
NOTED = """
import os
from aggregations import Fields, Flow, Topic, count
from jobs.demo.leg_pb2 import Leg
from jobs.submit import run


def noted(leg):
    with open(os.environ["NOTES"], "ab", buffering=0) as notes:
        notes.write(b"%d %d %d\\n" % (leg.partition, os.getpid(), os.getppid()))
    return True


flow = (
    Flow("noted").source(Topic({topic!r}, payload=Leg, stable=["_partition"])).filter(noted)
    .aggregate("aircraft", key="tail", fold=Fields(legs=count()))
)

if __name__ == "__main__":
    run(flow)
"""


@pytest.fixture
def redis() -> Iterator[str]:
    with redis_server.server(*redis_server.DURABLE) as server:
        yield server.url


@pytest.fixture
def fleet(kafka: str, topic: Callable[..., str], tmp_path: Path) -> list[str]:
    """A topic of legs, and a file with a flow of it; the options to run it with."""
    name, dead = topic(partitions=2, name="legs"), topic(name="dead")
    with AcknowledgedProducer(KafkaSettings(kafka)) as producer:
        producer.send_many(name, republished(flights.messages(flights.load(FLIGHTS))))
        producer.flush()
    (tmp_path / "fleet.py").write_text(FLEET.format(topic=name))
    (tmp_path / "noted.py").write_text(NOTED.format(topic=name))
    return ["--bootstrap", kafka, "--dead-letters", dead, "--until-caught-up", "--max-records", "200", "--json"]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": python_path(ROOT), **more}


def submit(*arguments: str, cwd: Path, **more: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [str(SUBMIT), *arguments], cwd=cwd, env=environment(**more), capture_output=True, text=True, check=False
    )


def lines(ended: "subprocess.CompletedProcess[str]") -> list[dict[str, Any]]:
    """JSON lines among what spark-submit passes on: it joins the program's two streams."""
    return [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]


KILLED = (
    Fault(CommitStep.PERSIST.of("aircraft"), FaultOutcome.BEFORE, 2),
    Fault(STREAM_PLAN, FaultOutcome.AFTER, 2),
    Fault(STREAM_BEGIN, FaultOutcome.BEFORE, 2),
    Fault(CommitStep.MANIFEST.of("aircraft"), FaultOutcome.AFTER, 2),
    Fault(CommitStep.RETURN, FaultOutcome.BEFORE, 2),
)


@pytest.mark.slow
@pytest.mark.kills
@pytest.mark.parametrize("checkpoint", ["lost", "kept"])
@pytest.mark.parametrize("fault", KILLED, ids=str)
def test_a_submitted_driver_that_is_killed_and_submitted_again_is_exact(
    fleet: list[str], redis: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault, checkpoint: str
) -> None:
    options = [*fleet, "--store", redis]
    if checkpoint == "kept":
        options[:0] = ["--checkpoint", str(tmp_path / "checkpoint")]
    fast = FAST["spark.driver.extraJavaOptions"]
    given = [("spark.driver.extraJavaOptions", fast), ("spark.executor.extraJavaOptions", fast)]
    # Executors find headwater there, and the flow's own file only if it is sent to them.
    given += [("spark.executorEnv.PYTHONPATH", str(ROOT))]
    conf = [text for name, value in given for text in ("--conf", f"{name}={value}")]
    killed = submit(
        *("--master", MASTER),
        *(*conf, "fleet.py", *options),
        cwd=tmp_path,
        HEADWATER_FAULT=str(fault),
    )
    assert killed.returncode == 128 + signal.SIGKILL, killed.stdout + killed.stderr
    [plan, *batches] = lines(killed)
    lag = sum(plan["plan"]["lag"])
    assert 0 < sum(batch["records"] for batch in batches) < lag

    line = subprocess.run(
        [sys.executable, "-m", "jobs.cli", "submit-command", "fleet:flow", "--master", MASTER, *conf]
        + [*options[:-3], "--store", redis, "--", "--json"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    again = subprocess.run(
        ["bash", "-c", line], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert again.returncode == 0, again.stdout + again.stderr
    [plan, *_, done] = lines(again)
    assert done["done"] is True
    assert 0 < sum(plan["plan"]["lag"]) == done["records"] < lag
    if fault.point == CommitStep.PERSIST.of("aircraft"):
        dropped = done["verdicts"]["carrier"].keys() & {"duplicate", "below_floor"}
        assert dropped, "nothing was dropped of the killed batch"

    monkeypatch.delitem(sys.modules, "fleet", raising=False)  # another test may have imported a flow of this name
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    flow = load_flow("fleet:flow")
    for stage, column in (("aircraft", "tailnum"), ("carrier", "carrier")):
        states = views.states(flow, stage, bind(flow, {}, redis))
        truth = flights.expected(flights.load(FLIGHTS), column)
        assert not audit.differences(truth, {view.key.decode(): view.state for view in states}, stage)


def test_a_slot_is_read_by_one_resident_of_one_executor_from_batch_to_batch(
    fleet: list[str], redis: str, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    conf = {"spark.executorEnv.PYTHONPATH": str(ROOT), "spark.executorEnv.NOTES": str(notes), **FAST}
    conf["spark.locality.wait"] = "10m"  # on a busy machine an executor may answer late
    options = [text for name, value in conf.items() for text in ("--conf", f"{name}={value}")]
    ended = submit("--master", MASTER, *options, "noted.py", *fleet, "--store", redis, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout
    batches = [line for line in lines(ended) if "batch" in line]
    found = [tuple(line.split()) for line in notes.read_text().splitlines()]
    assert len(batches) > 5
    assert sum(batch["records"] for batch in batches) == len(found)
    # The first batches may be read before Spark knows all executors.
    readers = set(found[-sum(batch["records"] for batch in batches[-3:]) :])
    assert sorted(partition for partition, _, _ in readers) == ["0", "1"]
    assert len({daemon for _, _, daemon in readers}) == 2, "one executor read both partitions"


def test_a_file_of_this_machine_is_no_store_for_the_submitted_master(fleet: list[str], tmp_path: Path) -> None:
    refused = submit("--master", "spark://127.0.0.1:1", "fleet.py", *fleet, cwd=tmp_path)
    assert refused.returncode == 2, refused.stdout
    assert "Spark's workers (spark://127.0.0.1:1) may run on others" in refused.stdout


def test_the_line_itself_can_be_run(fleet: list[str], tmp_path: Path) -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "jobs.cli", "submit-command", "fleet:flow", "--json", *fleet[:-1]]
        + [text for name, value in FAST.items() for text in ("--conf", f"{name}={value}")],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    command = json.loads(printed.stdout)["command"]
    assert command[0] == str(SUBMIT), "another Spark than the one that is tested"
    assert shlex.split(shlex.join(command)) == command
    ended = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / ".headwater" / "states").exists()
