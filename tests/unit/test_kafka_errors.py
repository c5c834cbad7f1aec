"""Kafka's errors, sorted by what the caller does next."""

import pickle
from contextlib import nullcontext
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from jobs.republish.client_watch import ClientLost, ClientWatch
from persistence.kafka import (
    AcknowledgedProducer,
    BrokerError,
    BrokerRefused,
    BrokerUnavailable,
    KafkaSettings,
    SettingsError,
    TopicMissing,
    Topics,
)
from persistence.kafka.errors import broker_error, connection_trouble, rejects_login, unreachable


@pytest.mark.parametrize(
    ("code", "kind", "remedy"),
    [
        (KafkaError.UNKNOWN_TOPIC_OR_PART, TopicMissing, "Create the topic"),
        (KafkaError._UNKNOWN_TOPIC, TopicMissing, "Create the topic"),
        (KafkaError.UNKNOWN_TOPIC_ID, TopicMissing, "Create the topic"),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, BrokerRefused, "kafka-acls"),
        (KafkaError.SASL_AUTHENTICATION_FAILED, BrokerRefused, "credentials"),
        (KafkaError.MSG_SIZE_TOO_LARGE, BrokerRefused, "max.message.bytes"),
        (KafkaError._FATAL, BrokerRefused, "start again"),
        (KafkaError._TRANSPORT, BrokerUnavailable, "bootstrap address"),
        (KafkaError._MSG_TIMED_OUT, BrokerUnavailable, "bootstrap address"),
        (KafkaError._WAIT_COORD, BrokerUnavailable, "bootstrap address"),
        (KafkaError.NOT_LEADER_FOR_PARTITION, BrokerUnavailable, "try again"),
        (KafkaError.FENCED_LEADER_EPOCH, BrokerUnavailable, "try again"),
        (KafkaError._NOENT, BrokerUnavailable, "try again"),
        (KafkaError.UNKNOWN_LEADER_EPOCH, BrokerUnavailable, "try again"),
        (KafkaError.INVALID_REQUEST, BrokerRefused, "INVALID_REQUEST"),
    ],
)
def test_an_error_says_what_was_tried_and_what_to_do(code: int, kind: type[BrokerError], remedy: str) -> None:
    error = broker_error(KafkaError(code), "producing to t")
    assert type(error) is kind
    assert str(error).startswith("producing to t: ")
    assert remedy in str(error)
    assert "\n" not in str(error)


def test_errors_survive_pickling() -> None:
    error = broker_error(KafkaError(KafkaError._TRANSPORT), "reading t", "connection refused")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy)) == (type(error), str(error))


def test_a_broker_that_is_not_there_is_one_line_with_the_remedy() -> None:
    with pytest.raises(
        BrokerUnavailable, match=r"no answer from Kafka at 127\.0\.0\.1:1.*Connection refused.*Check that"
    ):
        Topics(KafkaSettings("127.0.0.1:1"), timeout=1).check()


@pytest.mark.parametrize("arrays", [False, True])
def test_records_for_a_broker_that_is_not_there_are_reported_by_flush_with_their_topic(arrays: bool) -> None:
    with AcknowledgedProducer(KafkaSettings("127.0.0.1:1"), delivery_timeout=1, arrays=arrays) as producer:
        producer.send("orders", b"value")
        with pytest.raises(
            BrokerUnavailable,
            match=r"producing to orders: no acknowledgement within 1 s.*1 records must be sent again",
        ):
            producer.flush()


@pytest.mark.parametrize("arrays", [False, True])
def test_what_waited_too_long_is_dropped_and_the_producer_goes_on(arrays: bool) -> None:
    with AcknowledgedProducer(KafkaSettings("127.0.0.1:1"), delivery_timeout=60, arrays=arrays) as producer:
        for count in (3, 2):
            for _ in range(count):
                producer.send("orders", b"value")
            with pytest.raises(BrokerUnavailable, match=rf"no acknowledgement within 0\.5 s.*{count} records"):
                producer.flush(0.5)
        producer.flush(0.5)


def test_what_waits_is_dropped_although_no_new_client_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    clients: list[Producer] = []

    def connected(config: dict[str, Any]) -> Producer:
        if clients:
            raise KafkaException(KafkaError(KafkaError._CRIT_SYS_RESOURCE))
        clients.append(Producer(config))
        return clients[0]

    monkeypatch.setattr("persistence.kafka.producer.Producer", connected)
    with AcknowledgedProducer(KafkaSettings("127.0.0.1:1")) as producer:
        producer.send("orders", b"value")
        with pytest.raises(BrokerError, match="setting up the producer"):
            producer.flush(0)
        # Sent later, it could arrive after records that another process has produced since.
        assert len(clients[0]) == 0


class Slow:
    """A client whose broker acknowledges one record a minute, and its clock."""

    def __init__(self, config: object) -> None:
        self.now = 0.0
        self.left = 0

    def monotonic(self) -> float:
        return self.now

    def poll(self, seconds: float) -> int:
        return 0

    def produce(self, *record: object, headers: object) -> None:
        self.left += 1

    def purge(self) -> None:
        self.left = 0

    def flush(self, seconds: float) -> int:
        self.now += 60 if self.left else 0
        self.left = max(self.left - 1, 0)
        return self.left


@pytest.mark.parametrize(("timeout", "records", "ends"), [(None, 50, True), (100.0, 2, True), (100.0, 4, False)])
def test_flush_waits_as_long_as_acknowledgements_arrive_unless_it_is_told_how_long(
    monkeypatch: pytest.MonkeyPatch, timeout: float | None, records: int, ends: bool
) -> None:
    monkeypatch.setattr("persistence.kafka.producer.Producer", Slow)
    producer = AcknowledgedProducer(KafkaSettings("k:1"), delivery_timeout=100)
    monkeypatch.setattr("persistence.kafka.producer.time", producer._producer)
    for _ in range(records):
        producer.send("orders", b"value")
    with nullcontext() if ends else pytest.raises(BrokerUnavailable, match="no acknowledgement within 100 s"):
        producer.flush(timeout)


def test_settings_cannot_let_a_producer_leave_records_out(monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[dict[str, Any]] = []
    monkeypatch.setattr("persistence.kafka.producer.Producer", configs.append)
    loose = {"enable.gapless.guarantee": "false", "enable.idempotence": "false", "acks": "1"}
    for more in (
        {"message.timeout.ms": "500", "retries": "3", "max.in.flight.requests.per.connection": "5"},
        {"delivery.timeout.ms": "500", "message.send.max.retries": "3", "max.in.flight": "5"},
    ):
        producer = AcknowledgedProducer(KafkaSettings("k:1", {**loose, **more}))
        assert producer._delivery_timeout == 0.5
    for config in configs:
        assert config["enable.gapless.guarantee"] is config["enable.idempotence"] is True
        assert (config["message.timeout.ms"], config["acks"]) == (0, "all")
        assert (config["retries"], config["max.in.flight.requests.per.connection"]) == (2**31 - 1, 1)
        assert not config.keys() & {"delivery.timeout.ms", "message.send.max.retries", "max.in.flight"}


def test_a_setting_that_is_no_number_is_refused_by_its_name() -> None:
    with pytest.raises(BrokerRefused, match=r"message\.timeout\.ms is not an integer"):
        AcknowledgedProducer(KafkaSettings("k:1", {"message.timeout.ms": "soon"}))


def test_a_setting_that_the_client_does_not_know_is_refused_and_no_secret_is_shown() -> None:
    for arrays in (False, True):
        with pytest.raises(BrokerRefused, match="Correct the setting") as caught:
            AcknowledgedProducer(
                KafkaSettings("k:1", {"security.protocol": "hugo", "sasl.password": "hunter2"}), arrays=arrays
            )
        assert "hunter2" not in str(caught.value)


def test_a_setting_that_no_client_knows_is_wrong_usage_for_every_command() -> None:
    with pytest.raises(SettingsError, match=r'No such configuration property: "no\.such".*librdkafka'):
        Topics(KafkaSettings("k:1", {"no.such": "1"}))


@pytest.mark.parametrize("more", ["", ", 30 identical error(s) suppressed"])
def test_trouble_with_a_connection_is_reported_without_its_time(more: str) -> None:
    said = f"k:9092/bootstrap: Connection refused (after 0ms in state CONNECT{more})"
    for before in ("", "an earlier one"):
        found = connection_trouble(KafkaError(KafkaError._TRANSPORT, said), before)
        assert found == "k:9092/bootstrap: Connection refused"


def test_that_all_brokers_are_down_hides_no_reason() -> None:
    down = KafkaError(KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down")
    assert connection_trouble(down, "") == "1/1 brokers are down"
    assert connection_trouble(down, "SASL authentication error") == "SASL authentication error"


def test_a_rejected_login_is_told_apart_from_a_broker_that_is_away() -> None:
    assert rejects_login(unreachable("no answer", "SASL authentication error: invalid credentials"))
    assert rejects_login(unreachable("no answer", "SSL handshake failed: certificate verify failed"))
    for hint in ("SASL SCRAM-SHA-256 mechanism handshake failed: Broker: Unsupported SASL mechanism",
                 "Failed to acquire SASL OAUTHBEARER token"):  # fmt: skip
        assert rejects_login(unreachable("no answer", hint))
    assert not rejects_login(unreachable("no answer", "Connection refused"))
    broken = "SSL handshake failed: Disconnected: connecting to a PLAINTEXT broker listener?"
    assert not rejects_login(unreachable(f"no answer ({broken})", broken)), "a broker may be starting"
    assert not rejects_login(ValueError())


class WithoutReason:
    """A client as confluent-kafka's once was while a broker refused records."""

    def flush(self, _: float) -> int:
        raise SystemError("<built-in method flush> returned NULL without setting an exception")

    def purge(self) -> None: ...


def test_a_client_that_fails_without_a_reason_is_replaced_and_everything_must_be_sent_again() -> None:
    with AcknowledgedProducer(KafkaSettings("127.0.0.1:1")) as producer:
        producer.send("t", b"1")
        producer.send("t", b"2")
        producer._producer = WithoutReason()  # type: ignore[assignment]
        with pytest.raises(
            BrokerUnavailable, match=r"producing to t: .* without a reason \(2 records must be sent again"
        ):
            producer.flush()
        assert isinstance(producer._producer, Producer)


def test_a_request_without_an_answer_is_followed_by_a_new_client() -> None:
    """The old one may have forgotten all brokers, which librdkafka does when it is told of none."""
    topics = Topics(KafkaSettings("127.0.0.1:1"), timeout=0.1)
    for ask in (lambda: topics.describe(["t"]), topics.names):
        before = topics._admin
        with pytest.raises(BrokerUnavailable, match="no answer from Kafka"):
            ask()
        assert topics._admin is not before


def test_a_topic_is_described_by_a_second_client_if_the_first_is_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    topics, made = Topics(KafkaSettings("127.0.0.1:1"), timeout=0.2), []

    def client() -> AdminClient:
        made.append(Topics._client(topics))
        return made[-1]

    monkeypatch.setattr(topics, "_client", client)
    with pytest.raises(BrokerUnavailable, match=r"within 0\.2 s"):
        topics.describe(["t"])
    assert len(made) == 2, "one for the second attempt, and one for the next call"


def test_a_consumer_that_reaches_no_broker_twice_in_a_row_while_others_do_is_lost() -> None:
    consumer = Consumer({"bootstrap.servers": "127.0.0.1:1", "group.id": "g", "log_level": 0})
    watch = ClientWatch(consumer, ["t"], 0.1)
    watch.check()
    with pytest.raises(ClientLost, match=r"the consumer of t reaches no broker.*Start again; nothing is lost"):
        watch.check()
    consumer.close()
