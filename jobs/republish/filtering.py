"""The filter of a republisher: it drops duplicates before the transform sees them. Its states are in a store.

Each partition has one state, written with the position that it covers, after the outputs are acknowledged and before
the offsets are committed. A crash before the write leaves the state as it was: the same records are judged again with
the same result, and are sent again with the same lineage, so that readers drop the copies. After the write, a record
below the position is skipped, because its outputs are acknowledged.

A member of the group that is assigned a partition takes over its state by a conditional write. From then on the member
that had the partition before can no longer write the state, and so it does not commit.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any, Final

from google.protobuf.message import Message

from envelope import EnvelopeError, Reason, Verdict
from envelope.codec import redriven_payload
from envelope.filters.arrival import (
    REDRIVEN,
    UNIDENTIFIED,
    Filter,
    Ruling,
    Scope,
    judge_late,
    place_of,
    rejected,
    tracking,
)
from envelope.filters.producers import Gaps, ProducerFilter, Stamp
from envelope.filters.sequence_maps import EVERYWHERE, DedupPolicy
from envelope.redrive import Redrive, read_via
from jobs.environment import UsageError
from jobs.republish.offsets import patiently
from jobs.republish.partition import InputPartition
from jobs.republish.record import InputRecord
from jobs.republish.topic_check import TopicReplaced
from persistence.commit.faults import FILTER_CLAIM, FILTER_SAVE, effect
from persistence.errors import Conflict, Transient
from persistence.kafka import BrokerRefused
from persistence.kept import Kept, KeptValues
from persistence.protocol import StateStore

_LOG = logging.getLogger("headwater.republish")

OWNER: Final = "republisher."
"""Begins the name under which a store keeps the states of a consumer group's filter."""

_COVERED: Final = Ruling(Verdict.DUPLICATE, forward=False)
_OUT_OF_PLACE: Final = frozenset({None, Reason.OUT_OF_SEQUENCE, Reason.UNPROVEN})
"""Why a filter does not pass on a record that it passed on at its place."""
_METHODS: Final = ("scope", "zero", "judge", "dump", "load")


class Overtaken(BrokerRefused):
    """Another member of the group has taken over the filter's state of a partition."""


def check_rule(rule: Any) -> None:
    """Check that a filter can work in a republisher.

    Raises:
        UsageError: It is not a filter, or its states are not those of partitions.
    """
    lacking = [method for method in _METHODS if not callable(getattr(rule, method, None))]
    if isinstance(rule, type) or lacking or not isinstance(getattr(rule, "name", None), str):
        raise UsageError(f"deduplicate= takes a filter, such as SequenceFilter(from_value('id')); got {short(rule)}")
    if getattr(rule, "partitions", 0):
        raise UsageError(
            f"filter {rule.name!r} looks for ids over all partitions, and the members of a republisher's group read "
            "different ones: look for ids in the partition, or use a flow with deduplicate() and publish()"
        )
    if getattr(rule, "scope_by", Scope.PARTITION) is not Scope.PARTITION:
        raise UsageError(
            f"filter {rule.name!r} has a state for each key, and a republisher keeps one for each partition: "
            "use Scope.PARTITION, or a flow with deduplicate() and publish()"
        )
    if isinstance(rule, ProducerFilter) and rule.gaps is Gaps.HOLD:
        raise UsageError(
            "gaps=Gaps.HOLD changes the order of records, and readers recognise copies by the order of the source: an output "
            "that comes after many later ones would count as a copy. Use Gaps.REPORT or Gaps.REFUSE, or a StoredFilter"
        )


class Subject:
    """An input record as a filter sees it: its value is the payload. All other attributes are those of the record.

    Attributes:
        value: The parsed payload, with its fields by name, if the source declares it; otherwise its bytes.
        timestamp_ms: Time of the record in milliseconds since 1970, or 0; of a redriven record that of the rejected one.
    """

    def __init__(self, record: InputRecord, timestamp_ms: int) -> None:
        self._record = record
        self.topic = record.topic
        self.partition = record.partition
        self.offset = record.offset
        self.key = record.key
        self.timestamp_ms = timestamp_ms
        data = record.data
        self.value = record.payload if data is None else _Fields(data) if isinstance(data, Message) else data

    @property
    def chained(self) -> bool:
        """Whether it was republished; a record that is only redriven was not."""
        record = self._record
        return bool(record.message.chain) and len(record.lineage.reduced().nodes) > 1

    @property
    def stamp(self) -> Stamp | None:
        """What its envelope says about its producer; None without a sequence number."""
        message = self._record.message
        if not message.HasField("sequence"):
            return None
        last = message.last_sequence if message.HasField("last_sequence") else None
        return Stamp(message.producer, message.sequence, last, message.producer_epoch, message.sequence_per_partition)

    def __getattr__(self, name: str) -> Any:
        try:
            return getattr(self._record, name)
        except AttributeError:
            return getattr(self._record.envelope, name)


class _Fields(Mapping[str, Any]):
    """The fields of a protobuf message by name; None for one that is not set."""

    def __init__(self, message: Message) -> None:
        self._message = message

    def __getitem__(self, name: str) -> Any:
        field = self._message.DESCRIPTOR.fields_by_name[name]
        if field.has_presence and not self._message.HasField(name):
            return None
        return getattr(self._message, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._message.DESCRIPTOR.fields_by_name)

    def __len__(self) -> int:
        return len(self._message.DESCRIPTOR.fields)


@dataclass(slots=True)
class _Judging:
    """The state of a partition while this member has it.

    Attributes:
        part: The partition, as it was assigned.
        kept: The state as stored, with the position that it covers.
        state: The state.
        changed: It has judged records since it was written.
    """

    part: InputPartition
    kept: Kept
    state: Any
    changed: bool = False


class RecordFilter:
    """Judges the records of the partitions that a member of a group reads. Used by one thread.

    Args:
        rule: The filter; see `check_rule`.
        store: A store, or its URL.
        group: The consumer group. All members share the states.
        topic_ids: Asks the broker for the current ids of topics.
        policy: Topics whose records the filter judges.
        generation: Another generation begins without states.
        cluster: Name of the Kafka cluster, when there is more than one.

    Raises:
        StoreError: The store cannot be opened.
    """

    def __init__(
        self,
        rule: Filter[Any],
        store: StateStore | str,
        group: str,
        topic_ids: Callable[[Iterable[str]], Mapping[str, str]],
        *,
        policy: DedupPolicy = EVERYWHERE,
        generation: int = 1,
        cluster: str = "",
    ) -> None:
        self._rule = rule
        self._policy = policy
        self._topic_ids = topic_ids
        self._cluster = cluster
        self._kept = KeptValues(
            store, OWNER + group, type(rule).__name__, generation=generation, stage=rule.name, shared=True
        )
        self._judging: dict[tuple[str, int], _Judging] = {}

    @property
    def name(self) -> str:
        """Name of the filter."""
        return self._rule.name

    def begin(self, parts: Collection[InputPartition]) -> None:
        """Take over the states of partitions that were assigned since the last call.

        Args:
            parts: The partitions that are assigned now.

        Raises:
            Overtaken: Other members have taken them over all the time.
            TopicReplaced: The records that were read are those of a topic that was created again since.
            BrokerError: The broker does not say which topic is the current one.
            StoreError: The store failed.
        """
        self._forget_others(parts)
        judged = [part for part in parts if self._policy.enabled(part.topic)]
        new = {self._key(part): part for part in judged if (part.topic, part.partition) not in self._judging}
        if not new:
            return
        try:
            claimed = patiently(
                lambda left: effect(FILTER_CLAIM, lambda: self._kept.claim(new)), on=(Transient, Conflict)
            )
        except Conflict as error:  # this process was suspended for longer than it may wait
            raise self._overtaken(new[error.keys[0]]) from error
        for key, kept in claimed.items():
            part = new[key]
            if kept.topic_ids.get(part.topic, part.topic_id) != part.topic_id:
                self._check_current(part)
                _LOG.warning("%s:%d was created again: its filter begins anew", part.topic, part.partition)
                kept.value, kept.positions = None, {}
            elif kept.value is None and part.done > part.begin:
                _LOG.warning(
                    "%s:%d: the group has read it up to offset %d, and the store has no state of filter %s: copies of these "
                    "records are passed on",
                    *(part.topic, part.partition, part.done, self.name),
                )
            kept.topic_ids = {part.topic: part.topic_id} if part.topic_id else {}
            state = self._rule.zero() if kept.value is None else self._rule.load(kept.value)
            self._judging[part.topic, part.partition] = _Judging(part, kept, state)

    def judge(self, record: InputRecord) -> Ruling:
        """Decide about a record that was opened. Its partition must have begun.

        Raises:
            UsageError: The filter is one of the user, and its state is not that of the partition.
        """
        if not self._policy.enabled(record.topic):
            return UNIDENTIFIED
        one = self._judging[record.topic, record.partition]
        if one.kept.covers(record):
            return _COVERED
        back = _redrive_of(record)
        ruling = self._ruled(one, Subject(record, _time_of(record, back)), back)
        one.kept.advance(record)
        one.changed = True
        if ruling.reason is not None:
            one.state = tracking(self._rule, one.state, on=True)
        if ruling.warning:
            _LOG.warning("%s:%d: %s", record.topic, record.partition, ruling.warning)
        # Unless the filter had rejected it, the filter had passed it on: it is missing.
        passed = back is not None and back.stage != self.name and not ruling.forward
        return REDRIVEN if passed and ruling.reason in _OUT_OF_PLACE else ruling

    def miss(self, record: InputRecord) -> str:
        """Note that a record is missing which the filter has not passed on: redriven, the filter judges it.

        Returns:
            The stage in its dead letter. The dead letter of a redriven record has the stage of the one before: the filter
            may have passed it on then.
        """
        if (one := self._judging.get((record.topic, record.partition))) is not None:
            one.state, one.changed = tracking(self._rule, one.state, on=True), True
        unread = None if record.wrapped is not None else redriven_payload(record.value)
        back = read_via(unread.chain[-1].via) if unread is not None else _redrive_of(record)
        return self.name if back is None else back.stage

    def save(self, parts: Collection[InputPartition]) -> None:
        """Write the states that have changed. All outputs of their records must be acknowledged.

        Args:
            parts: The partitions that are assigned now. The states of others are forgotten.

        Raises:
            Overtaken: Another member has taken over a state. Nothing may be committed.
            StoreError: The store failed.
        """
        self._forget_others(parts)
        changed = {self._key(one.part): one for one in self._judging.values() if one.changed}
        if not changed:
            return
        for one in changed.values():
            one.kept.value = self._rule.dump(one.state)
        values = {key: one.kept for key, one in changed.items()}
        try:
            patiently(lambda left: effect(FILTER_SAVE, lambda: self._kept.save(values)), on=Transient)
        except Conflict as error:
            raise self._overtaken(changed[error.keys[0]].part) from error
        for one in changed.values():
            one.changed = False

    def _check_current(self, part: InputPartition) -> None:
        """Check which of two topics of a name is the current one: this process may have been suspended meanwhile.

        The state is claimed before: if the topic is created once more, whoever reads it then can write the state, and this
        process cannot.
        """
        if self._topic_ids([part.topic])[part.topic] != part.topic_id:
            raise TopicReplaced(
                f"{part.topic}:{part.partition} belongs to a topic that was deleted and created again",
                "Nothing is lost: the new topic is read from its beginning",
            )

    def _overtaken(self, part: InputPartition) -> Overtaken:
        return Overtaken(
            f"{part.topic}:{part.partition}: another process has taken over the state of filter {self._rule.name!r}",
            "Nothing is lost: that process reads the partition",
        )

    def close(self) -> None:
        """Release the store's connections."""
        self._kept.close()

    def _forget_others(self, parts: Collection[InputPartition]) -> None:
        """Forget partitions that were revoked or lost, even if they have been assigned again since."""
        present = {id(part) for part in parts}
        self._judging = {place: one for place, one in self._judging.items() if id(one.part) in present}

    def _key(self, part: InputPartition) -> bytes:
        place = place_of(part)
        return (f"{self._cluster}/{place}" if self._cluster else place).encode()

    def _ruled(self, one: _Judging, subject: Subject, back: Redrive | None) -> Ruling:
        try:
            scope = self._rule.scope(subject)
            if scope is None:
                return UNIDENTIFIED
            if scope != place_of(subject).encode():
                raise UsageError(
                    f"filter {self._rule.name!r} has a scope other than TOPIC:PARTITION, and a republisher keeps a state for "
                    "each partition: use a flow with deduplicate() and publish()"
                )
            if back is not None and back.stage == self.name:
                ruling, one.state = judge_late(self._rule, one.state, subject, asserted=back.asserted)
            else:
                ruling, one.state = self._rule.judge(one.state, subject)
        except EnvelopeError as error:
            return rejected(error)
        return ruling


def _redrive_of(record: InputRecord) -> Redrive | None:
    chain = record.message.chain if hasattr(record, "message") else ()
    last = chain[-1] if chain else None
    return read_via(last.via) if last is not None and last.pass_through else None


def _time_of(record: InputRecord, back: Redrive | None) -> int:
    if back is not None and len(record.message.chain) > 1:
        return record.message.chain[-2].timestamp_ms or 0
    return record.timestamp_ms or 0
