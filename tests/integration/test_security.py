"""Kafka with TLS, SCRAM and ACLs: everything works, refusals give the reason, and no password is shown."""

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from confluent_kafka.admin import AclOperation, ResourceType

from aggregations.local import run_local
from aggregations.run.binding import bind
from jobs import views
from jobs.replay import pointer_of
from jobs.stack import topics
from persistence.compaction import compaction
from persistence.kafka import AcknowledgedProducer, BrokerRefused, KafkaSettings, TopicMissing, Topics
from persistence.pointer import Pointer
from tests.messages import Leg
from tests.support.cli import run
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


@pytest.mark.parametrize("way", ["SCRAM-SHA-256", "certificate"])
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


def test_commands_over_recorded_history_name_the_right_that_is_missing(
    broker: SecuredKafka,
    password: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name, dead = f"fleet.history-{uuid.uuid4().hex[:8]}", ["--dead-letters", DEAD]
    topics.create(broker.inside, name, 2)
    with AcknowledgedProducer(KafkaSettings(broker.inside)) as producer:
        for one in map(alone, legs(20)):
            producer.send(name, one.value, one.key)
        producer.flush()
    monkeypatch.chdir(tmp_path)
    module, url = f"flows_{uuid.uuid4().hex}", f"sqlite://{tmp_path}/states.db"
    Path(f"{module}.py").write_text(FLOW.format(topic=name))
    flow = fleet(name)
    stores = bind(flow, {}, url)
    run_local(flow, kafka=KafkaSettings(broker.inside), stores=stores, until_caught_up=True)
    apply = ["--apply", "--reason", "a test", "--runner", "local"]
    for user, verb, options, wanted in [
        (WRITER, "replay", [], f"{name}: this user may not read it. Grant it Read"),
        (WRITER, "replay", [*apply, *dead], f"{name}: this user may not read it. Grant it Read"),
        (READER, "replay", [*apply, *dead], f"{DEAD}: this user may not write it. Grant it Write"),
        (
            WRITER,
            "rehearse",
            ["--against", f"{module}:flow", "--range", f"{name}:0:0-1"],
            f"{name}: this user may not read it",
        ),
        (WRITER, "audit", [], f"{name}: this user may not read it. Grant it Read"),
    ]:
        for variable, value in broker.environment(user, password).items():
            monkeypatch.setenv(variable, value)
        store = [] if verb == "rehearse" else ["--store", url]
        code, said = run(monkeypatch, verb, f"{module}:flow", *options, *store), capsys.readouterr().err
        assert code == 1, f"{verb} {options}: {said}"
        assert wanted in the_line(said), f"{verb} {options}"
        assert "kafka-acls" in the_line(said)
    assert pointer_of(flow, stores) == Pointer()


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
