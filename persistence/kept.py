"""JSON values in a store, each together with the positions that it covers, for programs that are not flows.

    {"schema":1,"kind":"SequenceFilter","positions":{"orders":{"0":18}},"value":{"seen":17},"crc32c":"8f3a01bc"}

Value and positions are written as one state, so neither is ever ahead of the other.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from envelope import TopicPartition
from envelope.limits import OFFSET_BITS, OFFSET_MASK, root_number
from persistence.errors import Corrupt, Terminal
from persistence.manifest import Manifest, Progress, unread
from persistence.marks import KnownMarks
from persistence.names import check_generation
from persistence.protocol import FlowRef, StageRef, StateStore, Write
from persistence.registry import open_store
from persistence.seal import DamagedError, seal, unseal

SCHEMA: Final = 1
_SHARED_EPOCH: Final = 1


class _Record(msgspec.Struct, omit_defaults=True, gc=False):
    schema: int
    kind: str
    positions: dict[str, dict[int, int]]
    value: Any
    topic_ids: dict[str, str] = {}


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(_Record)


@dataclass(slots=True)
class Kept:
    """A value and the positions that it covers.

    Attributes:
        value: A JSON value; None before the first.
        positions: Position by topic and partition (`envelope.limits.root_number`): the value contains every record below it
            and none from it on.
        version: Number of writes to it in the store.
        topic_ids: Id of each topic that the positions belong to, if it is known.
    """

    value: Any = None
    positions: dict[TopicPartition, int] = field(default_factory=dict)
    version: int = 0
    topic_ids: dict[str, str] = field(default_factory=dict)

    def covers(self, record: Any) -> bool:
        """Whether the value contains a record, or has judged it.

        A record of a later leader epoch than the one of the position is new, wherever it stands: the log was cut, and the
        offsets are used again. Without a `leader_epoch` the offset alone decides.
        """
        done, epoch = self._position(record), getattr(record, "leader_epoch", None)
        return bool(record.offset < done & OFFSET_MASK if epoch is None else root_number(record.offset, epoch) < done)

    def advance(self, record: Any) -> None:
        """Note that the value contains a record."""
        epoch = getattr(record, "leader_epoch", None)
        known = self._position(record) >> OFFSET_BITS if epoch is None else epoch
        self.positions[TopicPartition(record.topic, record.partition)] = root_number(record.offset + 1, known)

    def _position(self, record: Any) -> int:
        return self.positions.get(TopicPartition(record.topic, record.partition), 0)


def encode_kept(kept: Kept, kind: str) -> bytes:
    """Serialize a value with its positions, checksum included."""
    return seal(_encoder.encode(_Record(SCHEMA, kind, _nested(kept.positions), kept.value, kept.topic_ids)))


def decode_kept(value: bytes, kind: str, version: int, ref: StageRef, key: bytes) -> Kept:
    """Parse what `encode_kept` wrote.

    Raises:
        Corrupt: It is damaged, is something else, or was written by a newer version.
        Terminal: It is of another kind.
    """
    try:
        record = _decoder.decode(unseal(value))
    except (DamagedError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(f"the state cannot be read: {error}", ref=ref, key=key) from error
    if record.schema > SCHEMA:
        raise Corrupt(f"the state has schema {record.schema}; this code reads {SCHEMA}", "Upgrade headwater", ref, key)
    if record.kind != kind:
        raise Terminal(f"the state is of kind {record.kind}, not {kind}", "Use another name or generation", ref, key)
    return Kept(record.value, _flat(record.positions), version, record.topic_ids)


def merged_topic_ids(known: Mapping[str, str], records: Iterable[Any], ref: FlowRef) -> dict[str, str]:
    """The topics' ids, with those of these records.

    Raises:
        Terminal: A topic was created again: its offsets begin anew, and the positions do not belong to them.
    """
    merged = dict(known)
    for record in records:
        topic_id = getattr(record, "topic_id", "")
        if topic_id and merged.setdefault(record.topic, topic_id) != topic_id:
            raise Terminal(
                f"topic {record.topic} was deleted and created again: it had the id {merged[record.topic]}, and has {topic_id}",
                "Read it into a new generation (`generation=`), which begins without states",
                ref,
            )
    return merged


class KeptValues:
    """The values of one owner in a store: fenced by an epoch, and written conditionally.

    A new owner of the same name fences the one before it: whatever that one still writes is refused. Owners that share
    a name run at the same time, each with values of its own, and `claim` fences the owner of single values.

    Args:
        store: A store, or its URL.
        name: Name of the owner: the values' flow and stage in the store.
        kind: What the values are; values of another kind are refused.
        generation: Another generation begins without values.
        stage: Name of the values; that of the owner when empty.
        shared: Whether other owners of this name may run at the same time.

    Attributes:
        manifest: Progress as of the last `save_manifest`; None before the first, and for owners that share a name.
    """

    def __init__(
        self,
        store: StateStore | str,
        name: str,
        kind: str,
        *,
        generation: int = 1,
        stage: str = "",
        shared: bool = False,
    ) -> None:
        self.store = open_store(store) if isinstance(store, str) else store
        self.ref = FlowRef(name, check_generation(name, generation))
        self.stage = self.ref.stage(stage or name)
        self.kind = kind
        self.manifest: Manifest | None = None
        if shared:
            self.epoch = _SHARED_EPOCH
            self.store.install_epoch(self.ref, self.epoch)
        else:
            self.epoch = self.store.acquire_epoch(self.ref)
            self.manifest = self.store.load_manifest(self.ref)
        self._known = KnownMarks(self.ref, [self.stage.stage])

    @property
    def batch(self) -> int:
        """Number of the next batch."""
        return 1 + (self.manifest.batch if self.manifest else 0)

    @property
    def start(self) -> dict[TopicPartition, int]:
        """Offset to read next, by topic and partition; a partition that is not there is read from its beginning."""
        found = self.manifest.positions if self.manifest else {}
        return {
            TopicPartition(topic, partition): progress.next_offset
            for topic, partitions in found.items()
            for partition, progress in partitions.items()
        }

    @property
    def unfinished(self) -> dict[TopicPartition, int]:
        """Next offset, by topic and partition, after a batch that was begun and has not ended; empty for none."""
        found = unread(self.manifest.unfinished, self.manifest.positions) if self.manifest else {}
        return {TopicPartition(topic, at): end for topic, ends in found.items() for at, end in ends.items()}

    def load(self, keys: Iterable[bytes]) -> dict[bytes, Kept]:
        """The values of these keys; a new one for a key without a value."""
        wanted = list(dict.fromkeys(keys))
        found = self.store.load(self.stage, wanted)
        return {
            key: decode_kept(found[key].value, self.kind, found[key].version, self.stage, key)
            if key in found
            else Kept()
            for key in wanted
        }

    def claim(self, keys: Iterable[bytes]) -> dict[bytes, Kept]:
        """Take values over, and return them: an owner that has loaded one of them before can no longer write it.

        Raises:
            Conflict: Another owner took some of them over at the same moment; a retry is safe.
            StoreError: The store failed.
        """
        found = self.load(keys)
        self.save(found)
        return found

    def scan(self) -> Iterator[tuple[bytes, Kept]]:
        """Every value."""
        for key, stored in self.store.scan(self.stage):
            yield key, decode_kept(stored.value, self.kind, stored.version, self.stage, key)

    def save(self, values: Mapping[bytes, Kept]) -> None:
        """Write values, each only if nobody else has written it since it was loaded.

        Raises:
            Fenced: A newer owner has begun.
            Conflict: A value has changed since it was loaded.
            StoreError: The store failed.
        """
        writes = [Write(key, kept.version, encode_kept(kept, self.kind)) for key, kept in values.items()]
        known = self._known.of(self.stage.stage)
        marks = self.store.save(self.stage, writes, epoch=self.epoch, batch=self.batch, known=known)
        self._known.note(self.stage.stage, marks)
        for kept in values.values():
            kept.version += 1

    def begin_batch(self, ends: Mapping[TopicPartition, int], topic_ids: Mapping[str, str] = {}) -> None:
        """Note where a batch ends before anything of it is published, so that it can be repeated as it was."""
        before = self.manifest or Manifest(self.epoch, 0)
        self._save(Manifest(self.epoch, before.batch, before.positions, topic_ids, unfinished=_nested(ends)))

    def save_manifest(self, positions: Mapping[TopicPartition, int], topic_ids: Mapping[str, str] = {}) -> None:
        """Write the positions to resume from, and end the batch."""
        merged = {**self.start, **positions}
        progress = {
            topic: {partition: Progress(offset) for partition, offset in partitions.items()}
            for topic, partitions in _nested(merged).items()
        }
        self._save(Manifest(self.epoch, self.batch, progress, topic_ids))

    def _save(self, manifest: Manifest) -> None:
        self.store.save_manifest(self.ref, manifest)
        self.manifest = manifest

    def close(self) -> None:
        """Release the store's connections."""
        self.store.close()


def _nested(positions: Mapping[TopicPartition, int]) -> dict[str, dict[int, int]]:
    found: dict[str, dict[int, int]] = {}
    for (topic, partition), offset in sorted(positions.items()):
        found.setdefault(topic, {})[partition] = offset
    return found


def _flat(positions: Mapping[str, Mapping[int, int]]) -> dict[TopicPartition, int]:
    return {
        TopicPartition(topic, partition): offset
        for topic, partitions in positions.items()
        for partition, offset in partitions.items()
    }
