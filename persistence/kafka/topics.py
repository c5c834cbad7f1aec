"""Facts about topics and consumer groups, and operations to create, change and delete them."""

import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final, TypeVar

import confluent_kafka
from confluent_kafka import (
    Consumer,
    ConsumerGroupTopicPartitions,
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
)
from confluent_kafka.admin import (
    AclOperation,
    AdminClient,
    ConfigResource,
    ListOffsetsResultInfo,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from envelope import TopicPartition
from envelope.limits import MAX_EPOCH
from persistence.kafka.errors import (
    NOT_YET,
    STALE_EPOCH,
    BrokerError,
    BrokerRefused,
    BrokerUnavailable,
    TopicMissing,
    broker_error,
    connection_trouble,
    is_any,
    unreachable,
)
from persistence.kafka.facts import TopicFacts, Watermarks
from persistence.kafka.reading import epoch_ends
from persistence.kafka.settings import KafkaSettings, SettingsError

T = TypeVar("T")

MAX_MESSAGE_BYTES: Final = 1_048_588
"""Kafka's own default of max.message.bytes."""
_URL_SAFE: Final = str.maketrans("+/", "-_")
_PAUSE_SECONDS: Final = 0.05


class Topics:
    """Administrative requests to the cluster. Nothing here runs in the hot path.

    Every method raises `BrokerUnavailable` when no broker answers in time and `BrokerRefused` when a
    topic, a permission or a setting prevents the request.

    Args:
        settings: Settings of the Kafka cluster.
        timeout: Seconds to wait for an answer.

    Attributes:
        settings: As given.
    """

    def __init__(self, settings: KafkaSettings, *, timeout: float = 10) -> None:
        self.settings = settings
        self._timeout = timeout
        self._connection = ""
        try:
            self._admin = self._client()
        except KafkaException as error:
            raise SettingsError(f"Kafka's settings: {error.args[0].str()}. The names are librdkafka's") from error

    def _client(self) -> AdminClient:
        return AdminClient(self.settings.client(on_error=self._on_error))

    def check(self) -> None:
        """Return when a broker has answered."""
        try:
            self._admin.list_topics(timeout=self._timeout)
        except KafkaException as error:
            raise self._unreachable(error) from error

    def names(self) -> list[str]:
        """Names of all topics that this user may see, sorted."""
        try:
            return sorted(self._admin.list_topics(timeout=self._timeout).topics)
        except KafkaException as error:
            raise self._unreachable(error) from error

    def create(
        self, name: str, partitions: int = 1, config: Mapping[str, str] | None = None, *, replication: int = -1
    ) -> TopicFacts:
        """Create a topic and wait until it can be used; an existing topic is not changed.

        Args:
            name: Its name.
            partitions: Number of its partitions.
            config: Topic settings by Kafka's names.
            replication: Replicas of each partition; -1 for the broker's default.

        Raises:
            BrokerRefused: It exists with another number of partitions, or Kafka refuses it.
        """
        topic = NewTopic(name, partitions, replication, config=dict(config or {}))
        try:
            self._done(self._admin.create_topics([topic]), f"creating topic {name}")
        except BrokerRefused as error:
            if not is_any(error, KafkaError.TOPIC_ALREADY_EXISTS):
                raise
        facts = self._until(lambda: self.describe([name])[name], KafkaError.UNKNOWN_TOPIC_OR_PART)
        self._until(lambda: self.marks([name]), KafkaError.UNKNOWN_TOPIC_OR_PART)  # every partition has a leader
        if facts.partitions != partitions:
            raise BrokerRefused(
                f"topic {name} exists with {facts.partitions} partitions, not {partitions}",
                "Choose another name, add partitions, or delete the topic",
            )
        return facts

    def add_partitions(self, name: str, partitions: int) -> None:
        """Increase the number of partitions to `partitions`. Keys may then map to other partitions than before."""
        wanted = NewPartitions(name, partitions)
        self._done(self._admin.create_partitions([wanted]), f"adding partitions to topic {name}")
        deadline = time.monotonic() + self._timeout
        while self.describe([name])[name].partitions < partitions and time.monotonic() < deadline:
            time.sleep(_PAUSE_SECONDS)

    def delete(self, names: Sequence[str]) -> None:
        """Delete topics and wait until they are gone; a missing topic counts as deleted."""
        for name, future in self._admin.delete_topics(list(names)).items() if names else ():
            try:
                self._result(future, f"deleting topic {name}")
            except BrokerRefused as error:
                if not is_any(error, KafkaError.UNKNOWN_TOPIC_OR_PART):
                    raise
        deadline = time.monotonic() + self._timeout
        while set(names) & set(self.names()) and time.monotonic() < deadline:
            time.sleep(_PAUSE_SECONDS)

    def describe(self, names: Iterable[str]) -> dict[str, TopicFacts]:
        """Return name, id and number of partitions of each topic.

        Raises:
            BrokerRefused: A topic does not exist, or this user may not see it.
        """
        wanted = list(dict.fromkeys(names))
        if not wanted:
            return {}
        return self._twice(lambda patience: self.ask(wanted, patience)())

    def ask(self, names: Collection[str], patience: float | None = None) -> Callable[[], dict[str, TopicFacts]]:
        """Send the request of `describe`; the function that is returned waits for the answer, and raises its errors."""
        futures = self._admin.describe_topics(TopicCollection(list(names)))

        def facts(name: str) -> TopicFacts:
            topic = self._result(futures[name], f"topic {name}", patience)
            return TopicFacts(name, str(topic.topic_id).rstrip("=").translate(_URL_SAFE), len(topic.partitions))

        return lambda: {name: facts(name) for name in names}

    def missing(self, names: Iterable[str]) -> list[str]:
        """Return the topics that do not exist, in the given order.

        Raises:
            BrokerRefused: This user may not see one of them.
        """
        found = []
        for name in dict.fromkeys(names):
            try:
                self.describe([name])
            except TopicMissing:
                found.append(name)
        return found

    def check_rights(self, *, read: Iterable[str] = (), write: Iterable[str] = ()) -> None:
        """Check that this user has the permissions for the topics; a cluster without ACLs grants all of them.

        Args:
            read: Topics that will be read.
            write: Topics that will be produced to.

        Raises:
            BrokerRefused: A permission is missing; the text names it and the topic.
        """
        wanted = [(name, AclOperation.READ) for name in read] + [(name, AclOperation.WRITE) for name in write]
        if not wanted:
            return
        asked = TopicCollection(list(dict.fromkeys(name for name, _ in wanted)))

        def ask(patience: float) -> dict[str, Any]:
            futures = self._admin.describe_topics(asked, include_authorized_operations=True)
            return {name: self._result(one, f"topic {name}", patience) for name, one in futures.items()}

        found = self._twice(ask)
        for name, right in wanted:
            granted = found[name].authorized_operations
            if granted is not None and right not in granted:
                verb = right.name.capitalize()
                raise BrokerRefused(
                    f"topic {name}: this user may not {verb.lower()} it",
                    f"Grant it {verb} on the topic (kafka-acls), or use another user",
                )

    def topic_ids(self, names: Iterable[str]) -> dict[str, str]:
        """Return the current id of each topic."""
        return {name: facts.topic_id for name, facts in self.describe(names).items()}

    def partitions(self, names: Iterable[str]) -> dict[str, int]:
        """Return the number of partitions of each topic."""
        return {name: facts.partitions for name, facts in self.describe(names).items()}

    def marks(self, names: Iterable[str]) -> dict[TopicPartition, Watermarks]:
        """Return the ends of every partition of the topics, as a `read_committed` consumer sees them."""
        parts = [TopicPartition(name, part) for name, count in self.partitions(names).items() for part in range(count)]
        low = self._until(lambda: self._list_offsets(parts, OffsetSpec.earliest()))  # type: ignore[no-untyped-call]
        high = self._until(lambda: self._list_offsets(parts, OffsetSpec.latest()))  # type: ignore[no-untyped-call]
        return {part: Watermarks(low[part].offset, high[part].offset, high[part].leader_epoch) for part in parts}

    def leader_epochs(self, parts: Iterable[TopicPartition]) -> dict[TopicPartition, int | None]:
        """Return the epoch of the leader of each partition; None if the broker gives none."""
        asked = list(parts)
        found = self._until(lambda: self._list_offsets(asked, OffsetSpec.latest()))  # type: ignore[no-untyped-call]
        return {part: one.leader_epoch for part, one in found.items()}

    def epoch_ends(self, epochs: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Return where the records of a leader epoch and of earlier ones end in a partition's log; -1 if it has none (KIP-320).

        Args:
            epochs: The epoch by partition.
        """
        return epoch_ends(self.settings, epochs, self._timeout)

    def offsets_at(self, name: str, time_ms: int) -> dict[int, int]:
        """Return by partition the first offset whose record has this timestamp or a later one; -1 if there is none.

        Args:
            name: The topic.
            time_ms: Time in milliseconds since 1970; earlier ones count as 1970, because no record has one.
        """
        parts = [TopicPartition(name, part) for part in range(self.partitions([name])[name])]
        found = self._until(lambda: self._list_offsets(parts, OffsetSpec.for_timestamp(max(time_ms, 0))))
        return {part.partition: one.offset for part, one in found.items()}

    def ends(self, names: Iterable[str]) -> dict[TopicPartition, int]:
        """Return the offset that the next record of every partition of the topics will get."""
        return {part: one.offset for part, one in self._latest(names).items()}

    def heads(self, names: Iterable[str]) -> dict[TopicPartition, tuple[int, int]]:
        """Return `ends` with the epoch of each partition's leader; the highest one if the broker gives none."""
        found = self._latest(names)
        return {
            part: (one.offset, MAX_EPOCH if one.leader_epoch is None else one.leader_epoch)
            for part, one in found.items()
        }

    def _latest(self, names: Iterable[str]) -> dict[TopicPartition, ListOffsetsResultInfo]:
        parts = [TopicPartition(name, part) for name, count in self.partitions(names).items() for part in range(count)]
        return self._until(lambda: self._list_offsets(parts, OffsetSpec.latest(), committed=False))  # type: ignore[no-untyped-call]

    def max_message_bytes(self, names: Iterable[str], unknown: int = MAX_MESSAGE_BYTES) -> dict[str, int]:
        """Return the largest record that can be produced to each topic, in bytes.

        It is the topic's max.message.bytes, or `unknown`, Kafka's default, if this user may not read it; but no more than
        the settings' own message.max.bytes.
        """
        found = self._settings_of(names, "max.message.bytes")
        own = self.settings.options.get("message.max.bytes", "")
        most = int(own) if own.isdecimal() else sys.maxsize  # a producer refuses what is not a number
        return {name: min(most, unknown if value is None else int(value)) for name, value in found.items()}

    def cleanup_policies(self, names: Iterable[str]) -> dict[str, str | None]:
        """Return each topic's cleanup.policy, as `delete` or `compact,delete`; None if this user may not read it."""
        return self._settings_of(names, "cleanup.policy")

    def _settings_of(self, names: Iterable[str], setting: str) -> dict[str, str | None]:
        """One setting of each topic, its own or the broker's default; None if this user may not read it."""
        asked = [ConfigResource(ResourceType.TOPIC, name) for name in dict.fromkeys(names)]

        def ask(patience: float) -> dict[str, str | None]:
            found: dict[str, str | None] = {one.name: None for one in asked}
            for resource, future in self._admin.describe_configs(asked).items():
                try:
                    config = self._result(future, f"settings of topic {resource.name}", patience)
                except BrokerRefused as error:
                    if not is_any(error, KafkaError.TOPIC_AUTHORIZATION_FAILED):
                        raise
                else:
                    found[resource.name] = str(config[setting].value)
            return found

        return self._twice(ask) if asked else {}

    def group_offsets(self, group: str, topics: Iterable[str] | None = None) -> dict[TopicPartition, int]:
        """Return the committed offsets of a consumer group; empty for one that has none.

        Args:
            group: The group.
            topics: Topics to ask for; None for all that this user may see.
        """
        if topics is None:  # one of them may be deleted before it is described
            counts = self._until(lambda: self.partitions(self.names()), KafkaError.UNKNOWN_TOPIC_OR_PART)
        else:
            counts = self.partitions(topics)
        parts = [confluent_kafka.TopicPartition(name, part) for name, count in counts.items() for part in range(count)]
        found = self._until(lambda: self._committed(group, parts)) if parts else []
        return {TopicPartition(part.topic, part.partition): part.offset for part in found if part.offset >= 0}

    def _committed(
        self, group: str, parts: Sequence[confluent_kafka.TopicPartition]
    ) -> list[confluent_kafka.TopicPartition]:
        """Ask as a consumer that never joins its group.

        The admin client's own call ends the process (SIGSEGV) when the group's coordinator is not ready
        yet, as on a new broker: librdkafka issue 5040.
        """
        doing = f"reading the offsets of group {group}"
        config = self.settings.client(on_error=self._on_error) | {"group.id": group, "enable.auto.commit": False}
        consumer = Consumer(config)
        try:
            found = consumer.committed(list(parts), timeout=self._timeout)
        except KafkaException as error:
            # The coordinator's refusal comes as a message; the call itself only times out.
            told = consumer.poll(0)
            refusal = told.error() if told is not None else None
            if refusal is not None and refusal.code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
                raise broker_error(refusal, doing) from error
            raise broker_error(error.args[0], doing, self._connection) from error
        finally:
            consumer.close()
        _check_each(found, doing)
        return found

    def static_member(self, group: str, instance: str) -> str | None:
        """Return the id of the member that a consumer group knows by a `group.instance.id`; None when there is none."""
        doing = f"describing group {group}"

        def members() -> Any:
            (future,) = self._admin.describe_consumer_groups([group], request_timeout=self._timeout).values()
            return self._result(future, doing).members

        try:
            found = self._until(members)
        except BrokerRefused as error:
            if not is_any(error, KafkaError.GROUP_ID_NOT_FOUND):
                raise
            found = []
        return next((str(one.member_id) for one in found if one.group_instance_id == instance), None)

    def alter_group_offsets(self, group: str, offsets: Mapping[TopicPartition, int]) -> None:
        """Set committed offsets of a consumer group that has no running member.

        Raises:
            BrokerRefused: The group has running members, or a partition does not exist.
        """
        if not offsets:
            return
        parts = [confluent_kafka.TopicPartition(topic, part, offset) for (topic, part), offset in offsets.items()]
        self._until(lambda: self._alter(group, parts))

    def _alter(self, group: str, parts: Sequence[confluent_kafka.TopicPartition]) -> None:
        doing = f"setting the offsets of group {group}"
        asked = [ConsumerGroupTopicPartitions(group, list(parts))]
        (future,) = self._admin.alter_consumer_group_offsets(asked).values()
        # With a running member the call succeeds and every partition carries an error.
        _check_each(self._result(future, doing).topic_partitions, doing)

    def _list_offsets(
        self, parts: Sequence[TopicPartition], at: OffsetSpec, *, committed: bool = True
    ) -> dict[TopicPartition, ListOffsetsResultInfo]:
        if not parts:
            return {}
        asked = {confluent_kafka.TopicPartition(topic, part): at for topic, part in parts}
        isolation = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED

        def ask(patience: float) -> dict[TopicPartition, ListOffsetsResultInfo]:
            return {
                TopicPartition(part.topic, part.partition): self._result(
                    future, f"the end of {part.topic}:{part.partition}", patience
                )
                for part, future in self._admin.list_offsets(asked, isolation_level=isolation).items()
            }

        return self._twice(ask)

    def _done(self, futures: Mapping[Any, "Future[Any]"], doing: str) -> None:
        for future in futures.values():
            self._result(future, doing)

    def _twice(self, ask: Callable[[float], T]) -> T:
        """Ask for at most half of the timeout, and then by a new client. For requests that change nothing."""
        try:
            return ask(self._timeout / 2)
        except BrokerUnavailable as error:
            if not isinstance(error.__cause__, TimeoutError):
                raise
            return ask(self._timeout / 2)

    def _result(self, future: "Future[Any]", doing: str, patience: float | None = None) -> Any:
        try:
            return future.result(patience or self._timeout)
        except TimeoutError as error:
            self._renew()
            hint = f" ({self._connection})" if self._connection else ""
            what = f"{doing}: no answer from Kafka at {self.settings.bootstrap} within {self._timeout:g} s{hint}"
            raise unreachable(what, self._connection) from error
        except KafkaException as error:
            raise broker_error(error.args[0], doing, self._connection) from error

    def _until(self, action: Callable[[], T], *also: int) -> T:
        """Retry while a new topic is not yet known to every broker, or a group has no coordinator yet."""
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                return action()
            except BrokerError as error:
                if not is_any(error, *NOT_YET, *also) or time.monotonic() > deadline:
                    raise
                if is_any(error, *STALE_EPOCH):  # requests for offsets keep the epochs that the client has
                    with suppress(KafkaException):
                        self._admin.list_topics(timeout=self._timeout)
                time.sleep(_PAUSE_SECONDS)

    def _renew(self) -> None:
        # A client that is told of no brokers, as by one that was suspended, never finds one again: librdkafka issue 5301.
        self._admin.poll(0)  # serves `_on_error`: why nobody answers
        with suppress(KafkaException):
            self._admin = self._client()

    def _unreachable(self, error: KafkaException) -> BrokerError:
        self._renew()
        return broker_error(error.args[0], f"no answer from Kafka at {self.settings.bootstrap}", self._connection)

    def _on_error(self, error: KafkaError) -> None:
        self._connection = connection_trouble(error, self._connection)


def former_ends(
    topics: Topics, read: Mapping[TopicPartition, int | None], now: Mapping[TopicPartition, int | None]
) -> dict[TopicPartition, int]:
    """Return `Topics.epoch_ends` of the epochs as of which partitions were read, for those whose leader has another one.

    Only these logs may have lost records that were read.

    Args:
        topics: Access to the topics.
        read: The epoch by partition; None, or below 0, if it is not known.
        now: Epoch of each partition's leader; None if the broker gives none.
    """
    asked = {
        place: epoch
        for place, epoch in read.items()
        if epoch is not None and epoch >= 0 and now[place] not in (None, epoch)
    }
    return topics.epoch_ends(asked) if asked else {}


def _check_each(parts: Iterable[confluent_kafka.TopicPartition], doing: str) -> None:
    for part in parts:
        if part.error:
            raise broker_error(part.error, f"{doing}, {part.topic}:{part.partition}") from KafkaException(part.error)
