"""Kafka with TLS, SCRAM and ACLs: everything works, refusals give the reason, and no password is shown."""

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from confluent_kafka.admin import AclOperation, ResourceType

from aggregations.engine.options import RunOptions
from aggregations.local import run_local
from aggregations.run.binding import bind
from jobs import views
from jobs.cli.errors import Exit
from jobs.stack import topics
from persistence.compaction import compaction
from persistence.kafka import AcknowledgedProducer, BrokerRefused, KafkaSettings, TopicMissing, Topics
from persistence.pointer import load_pointer
from persistence.protocol import FlowRef
from persistence.registry import open_store
from tests.messages import Leg
from tests.support.cli import run as in_process
from tests.support.flows import fleet, totals
from tests.support.secured_kafka import SecuredKafka, certificate, encrypted, secured_kafka
from tests.support.spark import FAST
from tests.support.world import Sent, alone, legs

pytestmark = [pytest.mark.integration, pytest.mark.spark, pytest.mark.slow]

PASSWORD = f"hunter2-{uuid.uuid4().hex}"
WRONG = f"wrong-{uuid.uuid4().hex}"
IN, LEGS, DEAD = "fleet.in", "fleet.legs", "fleet.dead"
READER, WRITER, PILOT = "reader", "writer", "pilot"
FLOW = "from tests.support.flows import fleet\n\nflow = fleet({topic!r})\n"
LOGGING = """
appender.err.type = Console
appender.err.name = err
appender.err.target = SYSTEM_ERR
appender.err.layout.type = PatternLayout
appender.err.layout.pattern = %p %c: %m%n%ex
rootLogger.level = info
rootLogger.appenderRef.err.ref = err
logger.kafka.name = org.apache.kafka
logger.kafka.level = info
logger.spark.name = org.apache.spark
logger.spark.level = info
"""


@dataclass
class Command:
    """A command that runs, with what it has written so far in files."""

    process: "subprocess.Popen[bytes]"
    output: Path

    def finished(self) -> tuple[int, str]:
        """Wait for it; return its exit code and all that it wrote."""
        code = self.process.wait(SECONDS)
        return code, self.output.read_text(errors="replace")


@pytest.fixture(scope="module")
def pilot(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Key, with a password, and certificate of a client."""
    key, made = certificate(tmp_path_factory.mktemp("pilot"), PILOT)
    return encrypted(key, PASSWORD), made


@pytest.fixture(scope="module")
def broker(pilot: tuple[Path, Path]) -> Iterator[SecuredKafka]:
    """A broker with users who may do what a flow and a republisher need, one who only reads and one who only writes."""
    with secured_kafka({"fleet": PASSWORD, READER: PASSWORD, WRITER: PASSWORD}, pilot[1]) as broker:
        for name in (IN, LEGS, DEAD):
            topics.create(broker.inside, name, 2)
        for user, right in (
            ("fleet", AclOperation.READ),
            ("fleet", AclOperation.WRITE),
            (f"CN={PILOT}", AclOperation.READ),
            (f"CN={PILOT}", AclOperation.WRITE),
            (READER, AclOperation.READ),
            (WRITER, AclOperation.WRITE),
        ):
            broker.allow(user, right, ResourceType.TOPIC, "fleet.")
        for user in ("fleet", f"CN={PILOT}"):
            broker.allow(user, AclOperation.READ, ResourceType.GROUP, "fleet")
        broker.allow(READER, AclOperation.READ, ResourceType.GROUP, "fleet.kit")
        yield broker


@pytest.fixture
def password(tmp_path: Path) -> Path:
    """The file that the settings name."""
    file = tmp_path / "password"
    file.write_text(f"{PASSWORD}\n")
    return file


def headwater(*arguments: str, at: Path, name: str, topic: str = LEGS, **environment: str) -> Command:
    """Start a command in the directory `at`, where `fleet:flow` reads `topic`."""
    root = Path(__file__).parents[2]
    (at / "fleet.py").write_text(FLOW.format(topic=topic))
    output = at / f"{name}.txt"
    with output.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "jobs.cli", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=at,
            env=os.environ | {"PYTHONPATH": str(root), "NO_COLOR": "1"} | environment,
        )
    return Command(process, output)


SECONDS = 300
"""Longest that a command may take: without it one that hangs would hang the test."""
REPUBLISH = (
    "republish jobs.republish.record:identity --via fleet.kit --to fleet.legs --from fleet.in --until-caught-up"
).split()
RUN = "run fleet:flow --until-caught-up --dead-letters fleet.dead".split()


def test_republisher_flow_and_redrive_work_over_sasl_ssl_and_show_no_secret(
    broker: SecuredKafka, password: Path, tmp_path: Path
) -> None:
    sent = legs(60)
    with AcknowledgedProducer(KafkaSettings(broker.inside)) as producer:
        for one in map(alone, [*sent, Leg(tail="N1", carrier="AA", minutes=-5)]):
            producer.send(IN, one.value, one.key)
        producer.flush()
    environment = broker.environment("fleet", password)
    shown = []

    code, said = headwater("--debug", *REPUBLISH, at=tmp_path, name="republish", **environment).finished()
    assert code == 0, said
    shown.append(said)

    (tmp_path / "log4j2.properties").write_text(LOGGING)
    (tmp_path / "events").mkdir()
    conf = {
        "spark.driver.extraJavaOptions": f"{FAST['spark.driver.extraJavaOptions']} "
        f"-Dlog4j2.configurationFile={tmp_path / 'log4j2.properties'}",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": f"file://{tmp_path / 'events'}",
        "spark.eventLog.compress": "false",
        "spark.eventLog.rolling.enabled": "false",
    }
    options = [part for name, value in conf.items() for part in ("--conf", f"{name}={value}")]
    run = headwater("--debug", *RUN, *options, at=tmp_path, name="run", **environment)
    while run.process.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            run.process.wait(0.5)
        shown += command_lines()
    code, said = run.finished()
    assert code == 0, said[-3000:]
    shown.append(said)
    assert "DAGScheduler" in said, "Spark's own log is shown"
    (events,) = [file for file in (tmp_path / "events").rglob("*") if file.is_file() and not file.name.startswith(".")]
    shown.append(events.read_text())
    assert "SparkListenerEnvironmentUpdate" in shown[-1]

    flow = fleet(LEGS)
    stores = bind(flow, {}, f"lmdb://{tmp_path / '.headwater' / 'states'}")
    assert {view.key: view.state for view in views.states(flow, "carrier", stores)} == totals(sent, "carrier")

    settings = tmp_path / "headwater.toml"
    settings.write_text(
        f'[kafka]\nbootstrap = "{broker.bootstrap}"\nsecurity.protocol = "SASL_SSL"\nsasl.mechanism = "SCRAM-SHA-512"\n'
        f'sasl.username = "fleet"\nsasl.password.file = "{password}"\nssl.ca.location = "{broker.authority}"\n'
    )
    redrive = ["redrive", "--from", DEAD, "--json", "--kafka-settings", str(settings)]
    code, said = headwater(*redrive, at=tmp_path, name="redrive").finished()
    assert code == 0, said
    shown.append(said)
    assert json.loads(said.splitlines()[-1])["dead_letters"] == 1

    assert not [text[:200] for text in shown if PASSWORD in text]


@pytest.mark.parametrize("way", [pytest.param("SCRAM-SHA-256", marks=pytest.mark.kills), "certificate"])
def test_a_client_s_certificate_and_the_shorter_scram_reach_republisher_and_flow_as_well(
    broker: SecuredKafka, pilot: tuple[Path, Path], password: Path, tmp_path: Path, way: str
) -> None:
    raw, out = f"fleet.{way}.in", f"fleet.{way}.out"
    sent = legs(30)
    for name in (raw, out):
        topics.create(broker.inside, name, 2)
    with AcknowledgedProducer(KafkaSettings(broker.inside)) as producer:
        for one in [*map(alone, sent), Sent(b"poison", b"N1")]:
            producer.send(raw, one.value, one.key)
        producer.flush()
    if way == "certificate":
        environment = broker.certified(pilot[1], pilot[0], password)
    else:
        environment = broker.environment("fleet", password, way)
    republish = ["republish", "jobs.republish.record:identity", "--via", "fleet.kit", "--group", f"fleet.{way}"]
    republish += ["--from", raw, "--to", out, "--dead-letters", DEAD, "--until-caught-up"]
    for name, command in (("republish", republish), ("run", RUN)):
        code, said = headwater("--debug", *command, at=tmp_path, name=name, topic=out, **environment).finished()
        assert code == 0, said[-3000:]
        assert PASSWORD not in said
    flow = fleet(out)
    stores = bind(flow, {}, f"lmdb://{tmp_path / '.headwater' / 'states'}")
    assert {view.key: view.state for view in views.states(flow, "carrier", stores)} == totals(sent, "carrier")


def test_a_client_without_a_certificate_is_refused_in_one_line(
    broker: SecuredKafka, pilot: tuple[Path, Path], password: Path, tmp_path: Path
) -> None:
    environment = broker.certified(pilot[1], pilot[0], password)
    environment = {
        name: value for name, value in environment.items() if "_CERTIFICATE_" not in name and "_KEY" not in name
    }
    code, said = headwater(*REPUBLISH, at=tmp_path, name="republish", **environment).finished()
    assert code == 1, said
    assert "Check" in the_line(said)


def test_a_wrong_password_and_a_wrong_authority_end_in_one_line_without_the_secret(
    broker: SecuredKafka, password: Path, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text(WRONG)
    _, stranger = certificate(tmp_path, "stranger")
    bad_password = broker.environment("fleet", wrong)
    bad_authority = broker.environment("fleet", password) | {"HEADWATER_KAFKA_SSL_CA_LOCATION": str(stranger)}
    running = [
        ("invalid credentials", headwater(*REPUBLISH, at=tmp_path, name="republish", **bad_password)),
        ("certificate verify failed", headwater(*RUN, at=tmp_path, name="run", **bad_authority)),
    ]
    for what, command in running:
        code, said = command.finished()
        assert code == 1, said
        line = the_line(said)
        assert what in line
        assert "Check security.protocol, the credentials and the CA certificate" in line
        assert PASSWORD not in said
        assert WRONG not in said
        assert "Trying again" not in said


def test_a_denied_topic_is_named_with_the_right_that_is_missing(
    broker: SecuredKafka, password: Path, tmp_path: Path
) -> None:
    reader, writer = (broker.environment(user, password) for user in (READER, WRITER))
    cases = [
        (REPUBLISH, reader, f"topic {LEGS}: this user may not write it. Grant it Write"),
        (RUN, reader, f"topic {DEAD}: this user may not write it. Grant it Write"),
        (RUN, writer, f"topic {LEGS}: this user may not read it. Grant it Read"),
    ]
    running = [
        (wanted, headwater(*command, at=tmp_path, name=f"denied-{i}", **environment))
        for i, (command, environment, wanted) in enumerate(cases)
    ]
    for wanted, command in running:
        code, said = command.finished()
        assert code == 1, said
        assert wanted in the_line(said)
        assert "kafka-acls" in the_line(said)
        assert PASSWORD not in said


@dataclass
class Denied:
    """A flow that has run, and how a user who lacks a right runs a command on it."""

    url: str
    run: Callable[..., int]

    def kept(self) -> tuple[object, ...]:
        """The states, and the epoch."""
        with closing(open_store(self.url)) as store:
            states = [[*store.scan(FlowRef("fleet").stage(name))] for name in ("aircraft", "carrier")]
            ref, pointer = FlowRef("fleet"), load_pointer([store], "fleet")
            return states, store.load_manifest(ref), store.installed_epoch(ref), pointer


@pytest.fixture
def denied(broker: SecuredKafka, password: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Denied:
    """Two legs were folded, and one is a dead letter."""
    inside, url = KafkaSettings(broker.inside), f"sqlite:///{tmp_path}/states.db"
    for name in (READ, REJECTED):
        if Topics(inside).missing([name]):
            topics.create(broker.inside, name, 1)
    flow = fleet(READ, "messages")
    with AcknowledgedProducer(inside) as producer:
        for one in map(alone, [*legs(5), Leg(tail="N1", carrier="broken", minutes=5)]):
            producer.send(READ, one.value, one.key)
        producer.flush()
    run_local(flow, RunOptions(kafka=inside, stores=bind(flow, {}, url), dead_letters=REJECTED, until_caught_up=True))
    (tmp_path / "denied.py").write_text(
        f"from tests.support.flows import fleet\n\nflow = fleet({READ!r}, 'messages')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "denied", raising=False)

    def run(user: str, words: str) -> int:
        for name, value in broker.environment(user, password).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("HEADWATER_STORE", url)
        return in_process(monkeypatch, *words.split())

    return Denied(url, run)


READ, REJECTED = "fleet.read", "fleet.rejected"
NO_READ = (
    f"explain denied:flow {READ}:0:0",
    "explain denied:flow --event-id e1",
    "blame denied:flow",
    f"trace {READ}:0:0",
    "audit denied:flow",
    "rehearse denied:flow --against denied:flow",
    "replay denied:flow --apply --runner local --reason why",
    "replay denied:flow --stage carrier --key UA --apply --reason why",
    "plan denied:flow",
    f"redrive --from {REJECTED}",
    f"discard denied:flow --from {REJECTED} --apply",
)


@pytest.mark.parametrize("words", NO_READ)
def test_a_command_that_may_not_read_a_topic_names_it_and_the_right_and_changes_nothing(
    words: str, denied: Denied, capsys: pytest.CaptureFixture[str]
) -> None:
    before = denied.kept()
    assert denied.run(WRITER, words) == Exit.FAILED
    line = the_line(capsys.readouterr().err)
    assert f"topic {REJECTED if '--from' in words else READ}: this user may not read it. Grant it Read" in line
    assert "kafka-acls" in line
    assert denied.kept() == before


def test_a_command_that_may_not_write_a_topic_names_it_and_the_right_and_changes_nothing(
    denied: Denied, capsys: pytest.CaptureFixture[str]
) -> None:
    before = denied.kept()
    for words, name in (
        (f"redrive --from {REJECTED} --apply", READ),
        (f"run denied:flow --runner local --until-caught-up --journal {IN}", IN),
        (f"replay denied:flow --apply --runner local --reason why --dead-letters {DEAD}", DEAD),
    ):
        assert denied.run(READER, words) == Exit.FAILED
        line = the_line(capsys.readouterr().err)
        assert f"topic {name}: this user may not write it. Grant it Write" in line
        assert "kafka-acls" in line
    assert denied.kept() == before


def test_a_topic_that_may_not_be_seen_and_a_group_that_may_not_be_used_are_refused_by_name(
    broker: SecuredKafka, password: Path
) -> None:
    topics.create(broker.inside, "payroll", 1)
    known = Topics(KafkaSettings.load(env=broker.environment(READER, password)), timeout=3)
    with pytest.raises(BrokerRefused, match=r"topic payroll: .*authorization failed.*kafka-acls"):
        known.check_rights(read=["payroll"])
    with pytest.raises(BrokerRefused, match=r"the offsets of group fleet: .*authorization failed.*kafka-acls"):
        known.group_offsets("fleet", [LEGS])


def test_settings_that_may_not_be_read_are_not_taken_for_those_of_a_topic_that_is_not_compacted(
    broker: SecuredKafka, password: Path
) -> None:
    known = Topics(KafkaSettings.load(env=broker.environment("fleet", password)))
    [finding] = compaction(known.cleanup_policies([LEGS]))
    assert (finding.risk, finding.unsafe) == ("cleanup-policy-unknown", False)
    assert Topics(KafkaSettings(broker.inside)).cleanup_policies([LEGS]) == {LEGS: "delete"}


def test_a_topic_that_may_not_be_seen_is_not_taken_for_one_that_does_not_exist(
    broker: SecuredKafka, password: Path
) -> None:
    topics.create(broker.inside, "payroll", 1)
    known = Topics(KafkaSettings.load(env=broker.environment("fleet", password)))
    assert known.missing([LEGS, "fleet.nowhere"]) == ["fleet.nowhere"]
    with pytest.raises(BrokerRefused, match=r"topic payroll: .*authorization failed.*kafka-acls") as refused:
        known.missing(["payroll"])
    assert not isinstance(refused.value, TopicMissing)


def the_line(said: str) -> str:
    """The one line of an error."""
    (line,) = [line for line in said.splitlines() if line.startswith("headwater: ")]
    assert "Traceback" not in said
    return line


def command_lines() -> list[str]:
    """Of every process on this machine that can be seen."""
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            lines.append(file.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return lines
