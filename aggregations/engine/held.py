"""Dead letters of a rebuild: held in its store until the swap, since until then the live generation has its own.

A dead letter belongs to the generation that rejected its record, so those of the live generation do not fill the holes of
the rebuild: to drop the rebuild's own means to fill these holes. Outputs need not be held: the rebuild reads no record
beyond the live generation's manifest, and that generation published the outputs of these records before it wrote the
manifest. If the new definition makes other outputs, they can be held as well (`aggregations.run.held_outputs`). States
of windows that have closed always are: the rebuild may have other ones than the live generation.
"""

from collections.abc import Iterator
from typing import Final

import msgspec

from aggregations.engine.clients import store_of
from aggregations.engine.job import Job
from envelope.deadletter import DeadLetterRecord
from persistence.errors import Corrupt
from persistence.names import FlowRef
from persistence.protocol import StageRef, StateStore, Write
from persistence.seal import DamagedError, seal, unseal

HELD: Final = "headwater.held"
"""The stage of a rebuild that has its dead letters, in the store of the flow's first stage."""
_DROPPING: Final = b""
"""Key of the note that the letters are being dropped; no letter has an empty name."""


class HeldLetter(msgspec.Struct, frozen=True):
    """A dead letter that is not sent yet.

    Attributes:
        topic: The dead-letter topic.
        key: Its key.
        value: Its value.
        headers: Its headers.
    """

    topic: str
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(HeldLetter)


def hold(job: Job, topic: str, name: str, letter: DeadLetterRecord) -> None:
    """Hold a dead letter, unless an earlier attempt at the batch has done so.

    Args:
        job: A batch of a rebuild.
        topic: The dead-letter topic.
        name: What distinguishes it from the flow's other dead letters.
        letter: Its content.

    Raises:
        StoreError: The store does not answer, or a newer rebuild has begun.
    """
    progress, store = job.progress, store_of(next(iter(job.options.urls.values())))
    ref = progress.ref.stage(HELD)
    key = name.encode()
    if key not in store.load(ref, [key]):
        held = HeldLetter(topic, letter.key, letter.value, list(letter.headers))
        # It is due with this epoch, so that it can be removed when it is sent.
        write = Write(key, 0, seal(_encoder.encode(held)), due=progress.epoch)
        store.save(ref, [write], epoch=progress.epoch, batch=progress.batch)


def held_letters(store: StateStore, flow: FlowRef, *, after: int = 0) -> Iterator[HeldLetter]:
    """The dead letters that a rebuild holds.

    Args:
        store: The store of the flow's first stage.
        flow: The generation that is rebuilt.
        after: Only those of higher epochs than this.

    Raises:
        Corrupt: One cannot be read.
    """
    ref = flow.stage(HELD)
    for key, stored in store.scan(ref):
        if key == _DROPPING or stored.epoch <= after:
            continue
        try:
            yield _decoder.decode(unseal(stored.value))
        except (DamagedError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Corrupt(f"the dead letter cannot be read: {error}", ref=ref, key=key) from error


def note_dropping(store: StateStore, flow: FlowRef, *, epoch: int) -> None:
    """Note that all letters of lower epochs are being dropped; `forget_held` removes the note with them."""
    ref = flow.stage(HELD)
    before = store.load(ref, [_DROPPING]).get(_DROPPING)
    write = Write(_DROPPING, before.version if before else 0, seal(b""), due=epoch)
    store.save(ref, [write], epoch=epoch, batch=0)


def dropping(store: StateStore, flow: FlowRef) -> int:
    """Epoch of a command that began to drop the letters and was interrupted; 0 if there was none."""
    found = store.load(flow.stage(HELD), [_DROPPING]).get(_DROPPING)
    return found.epoch if found else 0


def forget_held(store: StateStore, ref: StageRef, *, epoch: int) -> None:
    """Remove what a rebuild held in a stage up to an epoch, after it was sent."""
    store.remove(ref, epoch, epoch=epoch, batch=0)
