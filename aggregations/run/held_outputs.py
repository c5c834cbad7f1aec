"""Outputs of a rebuild, held in its store until the swap.

Until then the live generation has outputs of its own. The swap sends what is held, in the order in which it was made,
and then lets the next run begin. A crash leaves what an attempt held before it persisted anything: like outputs that
were sent, it is kept, and readers drop the copies.

An entry has up to 256 KB of messages, so memory does not depend on their number. Its key contains the epoch, the number
of the attempt within the run, the record of its first message, and a digest: the same outputs have the same key, and a
task that is repeated replaces nothing.
"""

import base64
import zlib
from collections.abc import Iterator, Sequence
from hashlib import sha256
from struct import Struct
from typing import Final

import msgspec

from aggregations.per_message.publishing import OutputMessage
from persistence.errors import Corrupt
from persistence.names import FlowRef
from persistence.protocol import StateStore, Write
from persistence.seal import DamagedError, seal, unseal

HELD_OUTPUTS: Final = "headwater.held-outputs"
"""The stage of a rebuild that has its outputs, in the store of the flow's first stage."""
_BYTES: Final = 256 << 10
"""Keys and values in one entry, before compression; an entry with one message may be larger."""
_FIRST: Final = Struct(">QQ")
_LAST: Final = Struct(">QI")


class HeldOutput(msgspec.Struct, frozen=True, array_like=True):
    """A message that is not sent yet.

    Attributes:
        topic: Its topic.
        key: Its key.
        value: Its value.
        headers: Its headers.
    """

    topic: str
    key: bytes | None
    value: bytes
    headers: list[tuple[str, bytes | None]] = []


class _Entry(msgspec.Struct, frozen=True):
    packed: str


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(list[HeldOutput]).decode
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Entry).decode


def hold_outputs(
    store: StateStore, flow: FlowRef, outputs: Sequence[OutputMessage], *, epoch: int, batch: int, attempt: int
) -> None:
    """Hold outputs, in order. Repeated with the same outputs, it changes nothing.

    Args:
        store: The store of the flow's first stage.
        flow: The generation.
        outputs: The messages.
        epoch: Epoch of the run.
        batch: Number of the batch.
        attempt: Number of the attempt within the run: later outputs of a key have a higher one.

    Raises:
        StoreError: The store does not answer, or a newer rebuild has begun.
    """
    writes = []
    for number, part in enumerate(_parts(outputs)):
        packed = zlib.compress(_pack([HeldOutput(one.topic, one.key, one.value, list(one.headers)) for one in part]), 1)
        key = _key(epoch, attempt, outputs[0], number) + sha256(packed).digest()[:8]
        # It is due with this epoch, so that it can be removed when it is sent.
        writes.append(Write(key, 0, seal(_encode(_Entry(base64.b85encode(packed).decode()))), due=epoch))
    store.save(flow.stage(HELD_OUTPUTS), writes, epoch=epoch, batch=batch)


def held_outputs(store: StateStore, flow: FlowRef) -> Iterator[HeldOutput]:
    """The outputs that a rebuild holds, in the order in which they were made.

    Raises:
        Corrupt: An entry cannot be read.
    """
    ref = flow.stage(HELD_OUTPUTS)
    if store.capabilities.ordered_scan:
        entries = ((key, stored.value) for key, stored in store.scan(ref))
    else:
        keys = sorted(key for key, _ in store.scan(ref))
        entries = ((key, store.load(ref, [key])[key].value) for key in keys)
    for key, value in entries:
        try:
            yield from _unpack(zlib.decompress(base64.b85decode(_decode(unseal(value)).packed)))
        except (DamagedError, msgspec.DecodeError, UnicodeDecodeError, ValueError, zlib.error) as error:
            raise Corrupt(f"held outputs cannot be read: {error}", ref=ref, key=key) from error


def _parts(outputs: Sequence[OutputMessage]) -> Iterator[list[OutputMessage]]:
    part, size = list[OutputMessage](), 0
    for one in outputs:
        length = len(one.value) + len(one.key or b"")
        if part and size + length > _BYTES:
            yield part
            part, size = [], 0
        part.append(one)
        size += length
    if part:
        yield part


def _key(epoch: int, attempt: int, first: OutputMessage, number: int) -> bytes:
    topic, partition, offset = (
        ("", 0, 0) if first.own is None else (first.own.topic, first.own.partition, first.own.offset)
    )
    return _FIRST.pack(epoch, attempt) + f"{topic}:{partition}:".encode() + _LAST.pack(offset, number)
