"""The commands as processes, on a real broker."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from aggregations.run.binding import bind
from jobs import views
from jobs.demo import audit, flights
from jobs.demo.flow import flow as demo_flow
from jobs.demo.flow import legs
from jobs.loading import load
from jobs.stack import ports
from persistence.kafka import AcknowledgedProducer, KafkaSettings
from persistence.protocol import FlowRef
from persistence.registry import open_store
from tests.soak.clock import Clock
from tests.soak.servers import until
from tests.support.legs import republished
from tests.support.proxy import Proxy

pytestmark = pytest.mark.integration

FLIGHTS = 600
FLEET = """
from dataclasses import replace

from aggregations.definition.flow import Input
from aggregations import Fields, Flow, Topic, count
from jobs.demo.flow import flow as demo, legs

flow = replace(demo, name="fleet", inputs=(Input(Topic({topic!r}, payload=demo.topic.payload)),))
changed = replace(flow, steps=()).aggregate("aircraft", key="tail", fold=Fields(seen=count()))
"""


def headwater(*arguments: str, cwd: Path, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "jobs.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(Path(load.__code__.co_filename).parents[1]), **environment},
    )


def told(run: "subprocess.Popen[str]", code: int = 0) -> list[dict[str, Any]]:
    out, err = run.communicate()
    assert run.returncode == code, err
    return [json.loads(line) for line in out.splitlines()]


def said(run: "subprocess.Popen[str]", code: int) -> str:
    """The one line of an error."""
    out, err = run.communicate()
    assert (run.returncode, out) == (code, ""), err
    [line] = [line for line in err.splitlines() if line.startswith("headwater: ")]
    assert "Traceback" not in err
    return line


def descendants(pid: int) -> list[int]:
    """The process and all that it started."""
    parents = [
        tuple(map(int, line.split()))
        for line in subprocess.run(
            ["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True
        ).stdout.splitlines()
    ]
    found = [pid]
    for one in found:
        found += [child for child, parent in parents if parent == one]
    return found


@pytest.fixture
def fleet(kafka: str, topic: Callable[..., str], tmp_path: Path) -> list[str]:
    """A topic of legs and a module with a flow of it in the directory; the options to run it with."""
    name, dead = topic(partitions=2, name="legs"), topic(name="dead")
    with AcknowledgedProducer(KafkaSettings(kafka)) as producer:
        producer.send_many(name, republished(flights.messages(flights.load(FLIGHTS))))
        producer.flush()
    (tmp_path / "fleet.py").write_text(FLEET.format(topic=name))
    return ["--bootstrap", kafka, "--dead-letters", dead, "--until-caught-up", "--json"]


ON_EVERY_RUNNER = pytest.mark.parametrize("runner", [pytest.param("spark", marks=pytest.mark.spark), "local"])


@pytest.fixture
def away(kafka: str, fleet: list[str]) -> Iterator[tuple[list[str], Proxy]]:
    """The options to run the flow of `fleet` with a broker that is reached through a proxy, and the proxy."""
    host, _, port = kafka.rpartition(":")
    with closing(Proxy((host, int(port)))) as proxy:
        yield ["--bootstrap", f"{ports.LOOPBACK}:{proxy.port}", *fleet[2:]], proxy


def waits(run: "subprocess.Popen[str]") -> str:
    """The line by which it tells that it waits."""
    assert run.stderr is not None
    return next(line for line in run.stderr if "Trying again" in line)


@ON_EVERY_RUNNER
def test_a_run_waits_for_a_broker_that_is_away_when_it_begins(
    away: tuple[list[str], Proxy], tmp_path: Path, runner: str
) -> None:
    options, proxy = away
    with proxy.refusing():
        run = headwater("run", "fleet:flow", "--runner", runner, *options, cwd=tmp_path)
        assert f"no answer from Kafka at {options[1]} within 10 s" in waits(run)
    [plan, *batches, done] = told(run)
    assert sum(plan["plan"]["lag"]) == done["records"] == sum(one["records"] for one in batches) > 0


@ON_EVERY_RUNNER
def test_a_signal_ends_a_run_that_waits_for_its_broker(
    away: tuple[list[str], Proxy], tmp_path: Path, runner: str
) -> None:
    options, proxy = away
    with proxy.refusing():
        run = headwater("run", "fleet:flow", "--runner", runner, *options, cwd=tmp_path)
        waits(run)
        processes = descendants(run.pid)
        run.send_signal(signal.SIGINT)
        [done] = told(run)
    assert (done["done"], done["records"]) == (True, 0)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes), 10, "the end of what it started")


@ON_EVERY_RUNNER
def test_a_flow_runs_goes_on_and_refuses_another_definition(fleet: list[str], tmp_path: Path, runner: str) -> None:
    fleet += ["--runner", runner]
    [plan, *batches, done] = told(headwater("run", "fleet:flow", "--max-records", "300", *fleet, cwd=tmp_path))
    assert done["done"] is True
    assert sum(plan["plan"]["lag"]) == done["records"] == sum(one["records"] for one in batches)
    assert len(batches) == done["batches"] > 1
    url = f"lmdb://{tmp_path}/.headwater/states"
    shown = told(headwater("inspect", "fleet:flow", "--stage", "carrier", "--json", cwd=tmp_path))
    truth = flights.expected(flights.load(FLIGHTS), "carrier")
    assert not audit.differences(truth, {view["key"]: view["state"] for view in shown}, "carrier")
    assert len(list(views.states(demo_flow, "carrier", bind(demo_flow, {}, url)))) == 0  # another flow's name

    [plan, *_, done] = told(headwater("run", "fleet:flow", *fleet, cwd=tmp_path))
    assert (plan["plan"]["lag"], done["records"]) == ([0, 0], 0)

    changed = headwater("run", "fleet:changed", "--accept", "lost-records", *fleet, cwd=tmp_path)
    [refused] = told(changed, 3)
    assert "--accept definition" in refused["refused"]


@ON_EVERY_RUNNER
def test_a_run_whose_processes_are_all_told_to_stop_ends_well(fleet: list[str], tmp_path: Path, runner: str) -> None:
    fleet += ["--runner", runner]
    fleet.remove("--until-caught-up")
    run = headwater("run", "fleet:flow", *fleet, cwd=tmp_path)
    assert run.stdout is not None
    first = [json.loads(run.stdout.readline()) for _ in range(2)]
    assert [next(iter(line)) for line in first] == ["plan", "batch"]
    for process in descendants(run.pid):  # as systemd does: Spark's JVM and the workers too
        with suppress(ProcessLookupError):  # one that Spark's daemon has stopped meanwhile
            os.kill(process, signal.SIGTERM)
    out, err = run.communicate()
    assert run.returncode == 0, err
    done = json.loads(out.splitlines()[-1])
    assert (done["done"], done["records"]) == (True, sum(first[0]["plan"]["lag"]))
    assert "stopping after this batch" in err
    assert not [word for word in ("Traceback", "memory", "ERROR", "headwater: ") if word in err], err
    with closing(open_store(f"lmdb://{tmp_path}/.headwater/states")) as store:
        manifest = store.load_manifest(FlowRef("fleet", 1))
    assert manifest is not None
    assert manifest.clean


def test_a_run_that_waits_for_a_store_without_an_answer_is_stopped_at_once(fleet: list[str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = f"redis://127.0.0.1:{silent.getsockname()[1]}?timeout=300"
        run = headwater("run", "fleet:flow", "--store", store, *fleet, cwd=tmp_path)
        connection, _ = silent.accept()
        with connection:
            run.send_signal(signal.SIGTERM)
            [done] = told(run)
    assert (done["done"], done["records"]) == (True, 0)


@pytest.mark.spark
@pytest.mark.skipif(
    not Clock.is_possible(), reason="there is no C compiler (cc) to mislead a process about the time with"
)
def test_a_run_goes_on_when_the_machine_s_clock_is_set_back(fleet: list[str], kafka: str, tmp_path: Path) -> None:
    fleet.remove("--until-caught-up")
    clock = Clock(tmp_path / "clock")
    run = headwater("run", "fleet:flow", *fleet, cwd=tmp_path, **clock.environment)
    assert run.stdout is not None
    [plan, _] = [json.loads(run.stdout.readline()) for _ in range(2)]
    clock.set(-2)
    with AcknowledgedProducer(KafkaSettings(kafka)) as producer:
        producer.send_many(plan["plan"]["topic"], republished(flights.messages(flights.load(100))))
        producer.flush()
    assert json.loads(run.stdout.readline())["batch"] == 2
    run.send_signal(signal.SIGTERM)
    assert told(run)[-1]["done"] is True


def test_a_republisher_ends_when_it_has_caught_up_and_goes_on_where_it_was(
    kafka: str, topic: Callable[..., str], tmp_path: Path
) -> None:
    raw, out = topic(partitions=2, name="raw"), topic(partitions=2, name="out")
    with AcknowledgedProducer(KafkaSettings(kafka)) as producer:
        producer.send_many(raw, flights.messages(flights.load(FLIGHTS)))
        producer.flush()
    arguments = ["republish", f"{legs.__module__}:legs", "--from", raw, "--input", "json", "--to", out, "--via", raw]
    arguments += ["--bootstrap", kafka, "--until-caught-up", "--json"]
    done = told(headwater(*arguments, cwd=tmp_path))[-1]
    assert (done["done"], done["consumed"]) == (True, FLIGHTS)
    [done] = told(headwater(*arguments, cwd=tmp_path))
    assert (done["done"], done["consumed"]) == (True, 0)


def test_a_broker_that_cannot_be_reached_is_one_line_and_an_exit_code(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        runs = [
            headwater("run", "jobs.demo.flow:flow", "--bootstrap", address, cwd=tmp_path),
            headwater(
                *("republish", "jobs.demo.flow:legs", "--from", "a", "--to", "b", "--via", "v", "--until-caught-up"),
                *("--bootstrap", address),
                cwd=tmp_path,
            ),
        ]
        for run in runs:
            line = said(run, 1)
            assert address in line
            assert "Check that the broker runs and that the bootstrap address is right" in line


def test_a_topic_that_does_not_exist_is_one_line_and_an_exit_code(kafka: str, tmp_path: Path) -> None:
    (tmp_path / "fleet.py").write_text(FLEET.format(topic="never-was"))  # other tests create the demo's topic
    line = said(headwater("run", "fleet:flow", "--bootstrap", kafka, cwd=tmp_path), 1)
    assert "never-was" in line
    assert "Create the topic" in line


def test_a_store_that_cannot_be_opened_is_one_line_and_an_exit_code(kafka: str, tmp_path: Path) -> None:
    (tmp_path / "states.db").write_text("no database " * 100)
    url = f"sqlite://{tmp_path}/states.db"
    line = said(headwater("inspect", "jobs.demo.flow:flow", "--stage", "carrier", "--store", url, cwd=tmp_path), 1)
    assert "states.db" in line


def test_the_stack_comes_up_is_seen_and_goes_down(tmp_path: Path) -> None:
    [up] = told(headwater("stack", "up", "--json", cwd=tmp_path))
    [server] = up["servers"]
    assert server["name"] == "kafka"
    try:
        assert told(headwater("stack", "status", "--json", cwd=tmp_path)) == [up]
        run = headwater("run", "jobs.demo.flow:flow", cwd=tmp_path)  # no --bootstrap: it finds the stack
        assert "flights.legs" in said(run, 1)
    finally:
        assert told(headwater("stack", "down", "--json", cwd=tmp_path)) == [{"stopped": ["kafka"]}]
    assert told(headwater("stack", "status", "--json", cwd=tmp_path), 1) == [{"servers": []}]
