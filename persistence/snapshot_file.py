"""The file format of a snapshot: the manifest of a flow and all of its states, as of the end of one batch.

    headwater snapshot 1, and a line end
    frame of a header: flow, generation, manifest, stages
    frames of states, of one stage each
    frame of the end: number of states by stage, SHA-256 of everything before it

A frame is its length (4 bytes, big-endian), the CRC32C of its body, and the body: zlib-compressed MessagePack. The file
does not depend on the store that it was made from, and is read and written in bounded memory.
"""

import hashlib
import struct
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import BinaryIO, Final, Protocol, TypeAlias

import google_crc32c
import msgspec

from persistence.manifest import Manifest, decode_manifest, encode_manifest
from persistence.names import FlowRef
from persistence.seal import DamagedError

VERSION: Final = 1
_MAGIC: Final = b"headwater snapshot %d\n" % VERSION
_FRAME: Final = struct.Struct(">II")
_LEVEL: Final = 1
"""Compression: the fastest."""
_LONGEST: Final = 1 << 30
"""No frame is this long: a length above it is damage."""

States: TypeAlias = Sequence[tuple[bytes, bytes]]
"""Key and state record of each state."""


class Header(msgspec.Struct, frozen=True, tag="header"):
    """What a snapshot begins with.

    Attributes:
        flow: Name of the flow.
        generation: Generation of its states.
        sealed: The manifest, as `encode_manifest` writes it.
        stages: Names of the stages that have states, upstream first.
        removed: Due time up to which states had left the store, by stage, in seconds since 1970; see
            `aggregations.run.retire`.
        made_ms: When it was made, in milliseconds since 1970.
    """

    flow: str
    generation: int
    sealed: bytes
    stages: tuple[str, ...]
    removed: dict[str, int] = {}
    made_ms: int = 0

    @property
    def ref(self) -> FlowRef:
        """The flow and the generation."""
        return FlowRef(self.flow, self.generation)

    @property
    def manifest(self) -> Manifest:
        """Progress of the flow.

        Raises:
            Corrupt: It is of a newer version.
        """
        return decode_manifest(self.sealed, self.ref)


class _Block(msgspec.Struct, frozen=True, tag="states"):
    stage: str
    states: list[tuple[bytes, bytes]]


class _End(msgspec.Struct, frozen=True, tag="end"):
    counts: dict[str, int]
    digest: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header | _Block | _End)


class Written(Protocol):
    """What a snapshot is written to."""

    def write(self, data: bytes, /) -> int:
        """Write the next bytes."""
        ...


class SnapshotWriter:
    """Writes a snapshot.

    Args:
        file: Where to; it is not closed.
        ref: The flow and its generation.
        manifest: Its progress.
        stages: Names of the stages that have states, upstream first.
        removed: See `Header.removed`.
        made_ms: The time, in milliseconds since 1970.

    Attributes:
        counts: Number of states written, by stage.
    """

    def __init__(
        self,
        file: Written,
        ref: FlowRef,
        manifest: Manifest,
        *,
        stages: Sequence[str],
        removed: dict[str, int],
        made_ms: int,
    ) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.counts = Counter(dict.fromkeys(stages, 0))
        self._put(_MAGIC)
        self._frame(Header(ref.flow, ref.generation, encode_manifest(manifest), tuple(stages), removed, made_ms))

    def write(self, stage: str, states: States) -> None:
        """Write some states of a stage: up to a few thousand, which are held in memory."""
        self._frame(_Block(stage, list(states)))
        self.counts[stage] += len(states)

    def end(self) -> str:
        """Write the end, and return the checksum of the snapshot as hexadecimal text."""
        digest = self._digest.digest()
        self._frame(_End(dict(self.counts), digest))
        return digest.hex()

    def _frame(self, content: Header | _Block | _End) -> None:
        body = zlib.compress(_encoder.encode(content), _LEVEL)
        self._put(_FRAME.pack(len(body), google_crc32c.value(body)) + body)

    def _put(self, data: bytes) -> None:
        self._digest.update(data)
        self._file.write(data)


class SnapshotReader:
    """Reads a snapshot. The whole file is checked first, so that nothing of a damaged one is used.

    Args:
        file: The file, at its beginning; it is not closed.

    Raises:
        DamagedError: It is not a snapshot, is incomplete or damaged, or was written by another version.

    Attributes:
        header: What it begins with.
        counts: Number of states by stage.
        checksum: SHA-256 of the file up to its end, as hexadecimal text.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        end = self._check()
        self.counts, self.checksum = end.counts, end.digest.hex()
        self.header = self._header()

    def states(self) -> Iterator[tuple[str, States]]:
        """The states, in parts of one stage each."""
        self._header()
        while isinstance(found := _decoded(self._body()), _Block):
            yield found.stage, found.states

    def _check(self) -> _End:
        digest, counts = hashlib.sha256(), Counter[str]()
        self._file.seek(0)
        first = self._file.readline(len(_MAGIC))
        if first != _MAGIC:
            other = first.startswith(_MAGIC[:19])
            raise DamagedError(f"a snapshot of another version: {first[:32]!r}" if other else "it is not a snapshot")
        digest.update(first)
        begun = False
        while True:
            head, body = self._read()
            found = _decoded(body)
            if isinstance(found, Header) is begun:
                raise DamagedError("a snapshot has one header, at its beginning")
            begun = True
            if isinstance(found, _End):
                break
            digest.update(head)
            digest.update(body)
            if isinstance(found, _Block):
                counts[found.stage] += len(found.states)
        if found.digest != digest.digest() or +Counter(found.counts) != +counts or self._file.read(1):
            raise DamagedError("the snapshot does not match its checksum")
        return found

    def _header(self) -> Header:
        self._file.seek(len(_MAGIC))
        found = _decoded(self._body())
        assert isinstance(found, Header)
        return found

    def _body(self) -> bytes:
        return self._read()[1]

    def _read(self) -> tuple[bytes, bytes]:
        """Head and body of the next frame."""
        head = self._file.read(_FRAME.size)
        length, checksum = _FRAME.unpack(head) if len(head) == _FRAME.size else (_LONGEST, 0)
        body = self._file.read(length) if length < _LONGEST else b""
        if len(body) != length:
            raise DamagedError("the snapshot is incomplete")
        if google_crc32c.value(body) != checksum:
            raise DamagedError("the snapshot is damaged")
        return head, body


def _decoded(body: bytes) -> Header | _Block | _End:
    try:
        found: Header | _Block | _End = _decoder.decode(zlib.decompress(body))
    except (zlib.error, msgspec.DecodeError) as error:
        raise DamagedError("the snapshot is damaged") from error
    return found
