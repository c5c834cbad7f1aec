r"""Entries of the LMDB environments.

A store's directory has four directories, `0` to `3`, each with an environment, a shard. The state of a key is in the
shard with the number of its hash modulo four (`persistence.murmur2`), the manifest in shard 0, every other entry in
each shard. All entries are in the main database. For flow `fleet`, generation 1, stage `aircraft`, key `N14228`:

| key | value |
|---|---|
| `headwater` | JSON: `{"schema":1,"stages":2}`, the version of this layout and the number of stages that it has counted |
| `epoch/fleet/1` | the installed epoch, in digits |
| `manifest/fleet/1` | the manifest, JSON |
| `stage/fleet/1/aircraft` | JSON: `{"number":1,"mark":17,"downstream":{...}}`, the stage's number and its mark |
| `texts/fleet/1/aircraft` | JSON: a list of texts that its state records have in common |
| `\0\0\0\1N14228` | version, epoch and batch in 8 bytes each, then the state record, JSON |
| `\x40\0\0\1N14228` | only of a state with a due time: this time |
| `\x80\0\0\1`, the due time, `N14228` | the key of the state's entry: the states that are due first come first |

Numbers are unsigned and big-endian; a due time is in seconds since 1970, plus 2^63, in 8 bytes. If the highest bit of
the batch is set, the record is shortened: each byte n below 32 in it stands for text n of the stage, counted from 1.
Environments of schema 1, of earlier releases, have no such records; the first one makes it schema 2.

A state's key is the number of its stage in 4 bytes, then the key, so the states of a stage are neighbours and in the
order of their keys. LMDB's keys have at most 511 bytes. A key of more than 475 bytes is cut there and its SHA-256
follows: 511 bytes, which no shorter key has. Its value contains the whole key, with its length in 4 bytes, between the
batch and the record. Read an environment with `mdb_dump -p DIRECTORY`; never write to it.
"""

from collections.abc import Sequence
from hashlib import sha256
from itertools import compress
from operator import not_
from struct import Struct
from typing import Any, Final

import msgspec

from persistence.errors import Corrupt
from persistence.lmdb.texts import Texts
from persistence.marks import Bucket, Mark, bucket_of_parts
from persistence.names import FlowRef, StageRef
from persistence.protocol import Stored

SCHEMA: Final = 2
SHARDS: Final = 4
OWNER: Final = b"headwater"

HEAD: Final = Struct(">QQQ")
"""Version, epoch and batch."""
SHORTENED: Final = 1 << 63
"""The bit of the batch that is set if the record is shortened."""
_FLAG: Final = 16
"""The byte of an entry with this bit."""
_NUMBER: Final = Struct(">I")
_LONGEST: Final = 511
"""Bytes of the longest key of LMDB."""
SHORT: Final = _LONGEST - _NUMBER.size - sha256().digest_size
"""Bytes of the longest key that is stored as it is."""


encode = msgspec.json.Encoder().encode


class Owner(msgspec.Struct):
    """The entry that identifies an environment.

    Attributes:
        schema: Version of the layout.
        stages: Number of stages counted so far; numbers are not used again.
    """

    schema: int = SCHEMA
    stages: int = 0


class StageEntry(msgspec.Struct, omit_defaults=True):
    """What is stored for a stage.

    Attributes:
        number: Its number, the beginning of the keys of its states.
        mark: Count of the saves that changed it.
        downstream: Marks of the stages downstream that the last of them brought, as `encode_downstream` returns them.
        removed: Event time up to which states were removed, in seconds since 1970; None if none was.
    """

    number: int
    mark: int = 0
    downstream: Any = None
    removed: int | None = None

    @property
    def bucket(self) -> Bucket:
        """Its mark and notes. A shard goes back as a whole, so it is one bucket with one life."""
        return bucket_of_parts(Mark(self.mark), encode(self.downstream) if self.downstream else None, self.removed)

    @property
    def prefix(self) -> bytes:
        """Beginning of the keys of its states."""
        return _NUMBER.pack(self.number)


_owner = msgspec.json.Decoder(Owner)
_stage = msgspec.json.Decoder(StageEntry)


def epoch_key(flow: FlowRef) -> bytes:
    """Key of a flow's epoch."""
    return f"epoch/{flow.flow}/{flow.generation}".encode()


def manifest_key(flow: FlowRef) -> bytes:
    """Key of a flow's manifest."""
    return f"manifest/{flow.flow}/{flow.generation}".encode()


def texts_key(stage: StageRef) -> bytes:
    """Key of the texts of a stage."""
    return f"texts/{stage.flow}/{stage.generation}/{stage.stage}".encode()


def stages_key(flow: FlowRef) -> bytes:
    """Beginning of the keys of the entries of all stages of a generation."""
    return f"stage/{flow.flow}/{flow.generation}/".encode()


def stage_key(stage: StageRef) -> bytes:
    """Key of the entry of a stage."""
    return stages_key(stage.flow_ref) + stage.stage.encode()


def read_owner(value: bytes | None, ref: FlowRef | StageRef) -> Owner | None:
    """Parse the entry that identifies an environment.

    Raises:
        Corrupt: It is not what was written.
    """
    try:
        return None if value is None else _owner.decode(value)
    except msgspec.DecodeError as error:
        raise Corrupt(f"the entry {OWNER.decode()} of the environment cannot be read: {error}", ref=ref) from error


def read_epoch(value: bytes | None, flow: FlowRef) -> int:
    """Parse an installed epoch, 0 when there is none.

    Raises:
        Corrupt: It is not what was written.
    """
    try:
        return int(value or b"0")
    except ValueError as error:
        raise Corrupt("the installed epoch is not a number", ref=flow) from error


def read_stage(value: bytes | None, stage: FlowRef | StageRef) -> StageEntry | None:
    """Parse the entry of a stage.

    Raises:
        Corrupt: It is not what was written.
    """
    try:
        return None if value is None else _stage.decode(value)
    except msgspec.DecodeError as error:
        raise Corrupt(f"the entry of the stage cannot be read: {error}", ref=stage) from error


def place(prefix: bytes, key: bytes) -> bytes:
    """The key in the environment of a state; the order of places is that of keys up to `SHORT` bytes."""
    return prefix + key if len(key) <= SHORT else prefix + key[:SHORT] + sha256(key).digest()


def places(prefix: bytes, keys: Sequence[bytes]) -> list[bytes]:
    """The same for each key."""
    if max(map(len, keys), default=0) <= SHORT:
        return [prefix + key for key in keys]
    return [place(prefix, key) for key in keys]


def is_cut(found: bytes) -> bool:
    """Whether this place is of a key that is longer than `SHORT`."""
    return len(found) == _LONGEST


def written(found: bytes, head: bytes, key: bytes, record: bytes) -> bytes:
    """The value in the environment of a state at place `found`, with its record as it is stored."""
    if len(found) < _LONGEST:
        return head + record
    return b"".join([head, _NUMBER.pack(len(key)), key, record])


def read_states(stage: StageRef, found: Sequence[tuple[bytes, bytes]], texts: Texts) -> list[tuple[bytes, Stored]]:
    """The keys and the states in entries.

    Raises:
        Corrupt: An entry is not what was written.
    """
    kinds = [len(value) >= HEAD.size and value[_FLAG] > 127 and len(one) < _LONGEST for one, value in found]
    usual, others = [*compress(found, kinds)], [*compress(found, map(not_, kinds))]
    try:
        records = texts.restored([value for _, value in usual], HEAD.size)
    except LookupError:
        usual, others, records = [], list(found), []  # `read_state` names the entry
    heads = HEAD.iter_unpack(b"".join([value[: HEAD.size] for _, value in usual]))
    states = [
        (one[_NUMBER.size :], Stored(version, epoch, batch ^ SHORTENED, record))
        for (one, _), (version, epoch, batch), record in zip(usual, heads, records, strict=True)
    ]
    states += [read_state(stage, *one, texts) for one in others]
    return states


def read_state(stage: StageRef, found: bytes, value: bytes, texts: Texts) -> tuple[bytes, Stored]:
    """The key and the state in an entry.

    Raises:
        Corrupt: It is not what was written.
    """
    key, begin = key_of(stage, found, value)
    version, epoch, batch = HEAD.unpack_from(value)
    if not batch & SHORTENED:
        return key, Stored(version, epoch, batch, value[begin:])
    try:
        (record,) = texts.restored([value], begin)
    except LookupError as error:
        raise Corrupt("the stored state has a text that is not stored", ref=stage, key=key) from error
    return key, Stored(version, epoch, batch ^ SHORTENED, record)


def key_of(stage: StageRef, found: bytes, value: bytes) -> tuple[bytes, int]:
    """The key of the state in an entry, and where the record begins in its value.

    Raises:
        Corrupt: It is not what was written.
    """
    key, begin = found[_NUMBER.size :], HEAD.size
    if is_cut(found):
        begin += _NUMBER.size
        key = value[begin:][: int.from_bytes(value[HEAD.size : begin])]
        begin += len(key)
    if len(value) < begin or (is_cut(found) and place(found[: _NUMBER.size], key) != found):
        raise Corrupt("the stored state is incomplete", ref=stage, key=found[_NUMBER.size :])
    return key, begin
