"""The sequence ids of one producer session: which id a message gets, and what the session has reached.

Each producer has a name, and numbers its messages in ascending order. A reader, or the producer itself after a crash,
then knows from the highest id which messages are in the topic (Kafka's proposal "Idempotent Producer"; Pulsar's PIP-6).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Self

MAX_SEQUENCE: Final = 2**63 - 1
TOPIC: Final = -1
"""Stands for all partitions where one numbering covers the topic."""
_ADDED: Final = ("leader_epochs", "former")
_BY_PARTITION: Final = ("last", "offsets", *_ADDED)
"""Fields of a state by partition; the added ones are left out of its JSON if they are empty."""


class SequenceError(ValueError):
    """A message that a producer session refuses because of its sequence id. The text names the rule and the remedy."""


class SequenceRange(NamedTuple):
    """The sequence ids of one message: both are the same, unless it holds a batch.

    Attributes:
        first: Its first id.
        last: Its last id.
    """

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class SequenceState:
    """What a producer session has reached: save it in a store of your own, and give it to the next session.

    Attributes:
        producer: Name of the producer.
        topic: The topic.
        topic_id: Kafka's id of the topic.
        epoch: Epoch of the session.
        last: Highest acknowledged sequence id by partition.
        offsets: Offset by partition: `last` covers everything before it, so that only later records have to be read.
        leader_epochs: Epoch of each partition's leader at that time, as far as it is known.
        former: Highest id by partition in former topics of this name: ids go on above them.
    """

    producer: str
    topic: str
    topic_id: str = ""
    epoch: int = -1
    last: Mapping[int, int] = field(default_factory=dict)
    offsets: Mapping[int, int] = field(default_factory=dict)
    leader_epochs: Mapping[int, int] = field(default_factory=dict)
    former: Mapping[int, int] = field(default_factory=dict)

    def as_json(self) -> str:
        """The state as a JSON document."""
        by_partition = {name: getattr(self, name) for name in _BY_PARTITION}
        return json.dumps(
            {
                "producer": self.producer,
                "topic": self.topic,
                "topic_id": self.topic_id,
                "epoch": self.epoch,
                **{
                    name: {str(at): one for at, one in sorted(its.items())}
                    for name, its in by_partition.items()
                    if its or name not in _ADDED
                },
            }
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read what `as_json` wrote.

        Raises:
            ValueError: It is something else.
        """
        try:
            found: dict[str, Any] = {name: {} for name in _ADDED} | json.loads(text)
            by_partition: dict[str, Any] = {
                name: {int(partition): int(one) for partition, one in found.pop(name).items()} for name in _BY_PARTITION
            }
            return cls(**found, **by_partition)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                "this is not the state of a producer session, as SequenceState.as_json writes it"
            ) from error


class Sequences:
    """Assigns sequence ids and remembers, as PIP-6 does, the highest ones that were pushed and that were persisted.

    Args:
        per_partition: Number each partition by itself, without holes. Otherwise one numbering covers the topic.
        initial: Lowest id of the first message; None for 0.
        last: Highest persisted id by partition.
        former: The same in a former topic of this name: ids that are assigned here are above them.
    """

    def __init__(
        self,
        *,
        per_partition: bool = False,
        initial: int | None = None,
        last: Mapping[int, int] | None = None,
        former: Mapping[int, int] | None = None,
    ) -> None:
        if initial is not None and not 0 <= initial <= MAX_SEQUENCE:
            raise SequenceError(f"the initial sequence id {initial} is not between 0 and 2**63 - 1")
        self.per_partition = per_partition
        self._initial = initial or 0
        self.former = dict(former or {})
        self._found = dict(last or {})
        self._pushed = dict(last or {})
        self._persisted = dict(last or {})
        self._sent: int | None = None
        self._own: bool | None = None
        self._last: tuple[bool | None, int | None, int, int | None] = (None, None, TOPIC, None)

    def next(self, partition: int, sequence: int | None, last: int | None, count: int) -> SequenceRange:
        """Return the ids of the next message. `push` notes that it is sent.

        Args:
            partition: Its partition, or `TOPIC` if one numbering covers the topic.
            sequence: Its own id; None for the next one.
            last: Its last id, if it holds a batch with ids of its own.
            count: Number of messages that it holds, if the session numbers them.

        Raises:
            SequenceError: The message has no id although others have, its id does not ascend, or it leaves a hole
                although the numbering has none.
        """
        own = sequence is not None or last is not None
        before = self._before(partition, own=own)
        if self._own is not None and own is not self._own:
            raise SequenceError(
                "every message of this session must carry a sequence id, because the first one did: give sequence="
                if self._own
                else "this session numbers its messages itself: give sequence= for all of them, from the first, or for none"
            )
        if sequence is None:
            if last is not None or count < 1:
                raise SequenceError(
                    "a batch with ids of its own needs sequence= and last=; one without, a count= from 1"
                )
            first = self._initial if before is None else before + 1
            if (former := _highest(self.former, partition if self.per_partition else TOPIC)) is not None:
                first = max(first, former + 1)
            first = first if self.per_partition else max(first, self._initial)
            ids = SequenceRange(first, first + count - 1)
        else:
            if count != 1:
                raise SequenceError("a batch with ids of its own is given by sequence= and last=, not by count=")
            ids = SequenceRange(sequence, sequence if last is None else last)
        self._check(ids, before, partition)
        return ids

    def _before(self, partition: int, *, own: bool) -> int | None:
        """The id that the next one has to be above.

        Over several partitions an earlier session may have left a message out that is below one of another partition: the
        application sends it now. So its own ids are above that session's ids in their partition, and above all of this one.
        """
        if self.per_partition or not own:
            return self.pushed(partition if self.per_partition else TOPIC)
        known = (_highest(self._found, partition), self._sent)
        return max((one for one in known if one is not None), default=None)

    def _check(self, ids: SequenceRange, before: int | None, partition: int) -> None:
        if not 0 <= ids.first <= ids.last <= MAX_SEQUENCE:
            raise SequenceError(f"sequence ids {ids.first} to {ids.last} do not ascend between 0 and 2**63 - 1")
        place = f" to partition {partition}" if self.per_partition else ""
        if before is not None and ids.first <= before:
            raise SequenceError(
                f"sequence id {ids.first} does not ascend: {before} was sent{place} before it. Continue after "
                "last_sequence_id()"
            )
        if self.per_partition and before is not None and ids.first != before + 1:
            raise SequenceError(
                f"sequence id {ids.first} leaves a hole: {before} was sent{place} before it, and this session declares a "
                "numbering without holes in each partition. Give the next id, or number by topic"
            )
        if before is None and ids.first < self._initial:
            raise SequenceError(f"sequence id {ids.first} is below the initial id {self._initial}")

    def push(self, partition: int, ids: SequenceRange, *, own: bool) -> None:
        """Note that a message is sent: its ids count as pushed, not yet as persisted.

        Args:
            partition: The partition that it is sent to.
            ids: Its ids.
            own: They are the application's own.
        """
        self._last = self._own, self._sent, partition, self._pushed.get(partition)
        self._own = own
        self._pushed[partition] = self._sent = ids.last

    def take_back(self) -> None:
        """Note that the last message that was pushed is not sent: its ids are free."""
        self._own, self._sent, partition, before = self._last
        if before is None:
            del self._pushed[partition]
        else:
            self._pushed[partition] = before

    def acknowledge(self) -> None:
        """Note that everything that was pushed is persisted."""
        self._persisted = dict(self._pushed)

    def pushed(self, partition: int = TOPIC) -> int | None:
        """The highest id that was sent, to a partition or in all; None if there is none."""
        return _highest(self._pushed, partition)

    def persisted(self, partition: int = TOPIC) -> int | None:
        """The highest id that is acknowledged, in a partition or in all; None if there is none."""
        return _highest(self._persisted, partition)

    @property
    def last(self) -> dict[int, int]:
        """The highest acknowledged id by partition."""
        return dict(self._persisted)


def _highest(by_partition: Mapping[int, int], partition: int) -> int | None:
    return max(by_partition.values(), default=None) if partition == TOPIC else by_partition.get(partition)
