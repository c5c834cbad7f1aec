"""One shard of the LMDB store: an environment, and one transaction per call."""

from collections.abc import Callable, Iterator, Sequence
from itertools import compress, islice
from operator import gt, itemgetter
from pathlib import Path
from typing import Final

import msgspec

from persistence.cas import check_epoch, check_manifest, check_not_removed, later, resolve
from persistence.commit.faults import DROP, effect, write_of
from persistence.errors import Fenced
from persistence.lmdb.dues import due_page, due_prefixes, remove_due, set_dues
from persistence.lmdb.environment import Transaction, shared
from persistence.lmdb.layout import (
    HEAD,
    OWNER,
    SCHEMA,
    SHORT,
    SHORTENED,
    Owner,
    StageEntry,
    encode,
    epoch_key,
    is_cut,
    key_of,
    manifest_key,
    place,
    places,
    read_epoch,
    read_owner,
    read_stage,
    read_states,
    stage_key,
    stages_key,
    texts_key,
    written,
)
from persistence.lmdb.texts import Texts, decode_texts, encode_texts, prepare
from persistence.manifest import Manifest, decode_manifest, encode_manifest
from persistence.marks import (
    Acknowledged,
    Bucket,
    Mark,
    Marks,
    check_held,
    encode_downstream,
)
from persistence.protocol import FlowRef, StageRef, Stored, Write

_PAGE: Final = 1000
"""States per page of a scan, about 300 KB."""

_PART: Final = 1000
"""Writes that are compared, then applied, before the next ones: what they touch stays in the processor's cache."""

MANY: Final = 250
"""Writes from which on a save is looked through for texts. With fewer, reading them costs more than it saves."""

_REMOVED: Final = 20_000
"""States that one transaction removes: other writers of the shard wait for it."""

_Page = tuple[list[tuple[bytes, Stored]], bytes | None]


class _Unusual(Exception):
    """A save differs from the usual one: the condition of a write does not hold."""


class Shard:
    """One environment: it keeps the epoch, the manifest if it is the first one, and states; one transaction per call.

    Its methods are those of `persistence.protocol.StateStore`, for the keys of this shard.

    Args:
        path: Its directory. The first write creates it if it is missing; reading creates nothing.
        sync: `full`, `nometasync` or `nosync`.
        bucket: Name of its bucket of marks.
    """

    def __init__(self, path: Path, sync: str, bucket: str) -> None:
        self._environment = shared(path, sync)
        self._bucket = bucket

    def acquire_epoch(self, flow: FlowRef, above: int) -> int:
        """Install an epoch that is higher than the installed one and than `above`, and return it."""

        def acquire(transaction: Transaction) -> int:
            epoch = max(_epoch(transaction, flow), above) + 1
            transaction.put(epoch_key(flow), b"%d" % epoch)
            return epoch

        return self._environment.write(self, flow, acquire)

    def install_epoch(self, flow: FlowRef, epoch: int, *, refuse: bool = True) -> None:
        """Install an epoch; if a higher one is installed, raise `Fenced`, or with `refuse` False change nothing."""

        def install(transaction: Transaction) -> None:
            installed = _epoch(transaction, flow)
            if installed > epoch:
                if refuse:
                    raise Fenced.by(flow, epoch, installed)
                return
            transaction.put(epoch_key(flow), b"%d" % epoch)

        self._environment.write(self, flow, install)

    def installed_epoch(self, flow: FlowRef) -> int:
        """The installed epoch, 0 if there is none."""
        return self._environment.read(self, flow, lambda transaction: _epoch(transaction, flow), 0)

    def load(self, stage: StageRef, keys: Sequence[bytes]) -> dict[bytes, Stored]:
        """The states of keys."""
        return self._environment.read(self, stage, lambda transaction: _load(transaction, stage, keys), {})

    def save(
        self,
        stage: StageRef,
        writes: Sequence[Write],
        *,
        epoch: int,
        batch: int,
        known: Marks,
        downstream: Acknowledged,
    ) -> Mark:
        """Replace states, all of them or none, and return the mark."""
        note = encode_downstream(epoch, downstream)
        prepare(len(writes))

        def write(transaction: Transaction, apply: Callable[..., int] = _replace) -> Mark:
            check_epoch(stage, epoch, _epoch(transaction, stage.flow_ref))
            entry = _stage(transaction, stage) or _new_stage(transaction, stage)
            check_held(stage, self._bucket, Mark(entry.mark), known)
            check_not_removed(stage, writes, entry.removed)
            if apply(transaction, stage, entry.prefix, writes, epoch, batch):
                set_dues(
                    transaction, [(place(entry.prefix, one.key), one.due) for one in writes if one.due is not None]
                )
                entry.mark += 1
                entry.downstream = msgspec.Raw(note) if note else None
                transaction.put(stage_key(stage), encode(entry))
            return Mark(entry.mark)

        def run() -> Mark:
            try:
                return self._environment.write(self, stage, write)
            except _Unusual:  # some writes are retries, or their states have changed: the stored states decide which
                return self._environment.write(self, stage, lambda transaction: write(transaction, _resolve))

        return effect(write_of(stage.stage), run)

    def remove(self, stage: StageRef, until: int, *, epoch: int, known: Marks) -> tuple[Mark, int]:
        """Remove the states that are due, and return the mark and their number."""

        def write(transaction: Transaction) -> tuple[Mark, int]:
            check_epoch(stage, epoch, _epoch(transaction, stage.flow_ref))
            entry = _stage(transaction, stage) or _new_stage(transaction, stage)
            check_held(stage, self._bucket, Mark(entry.mark), known)
            gone = remove_due(transaction, entry.prefix, until, _REMOVED)
            entry.mark += bool(gone)
            entry.removed = later(entry.removed, until)
            transaction.put(stage_key(stage), encode(entry))
            return Mark(entry.mark), gone

        states = 0
        while True:
            mark, gone = effect(write_of(stage.stage), lambda: self._environment.write(self, stage, write))
            states += gone
            if gone < _REMOVED:
                return mark, states

    def due(self, stage: StageRef, until: int, after: int | None) -> Iterator[bytes]:
        """The keys of the states that are due after a time and at or before another."""
        last: int | bytes | None = after
        while page := self._due_page(stage, last, until):
            last = page[-1][0]
            yield from (key for _, key in page)

    def mark(self, stage: StageRef) -> Bucket:
        """Its mark of a stage."""

        def read(transaction: Transaction) -> Bucket:
            entry = _stage(transaction, stage)
            return entry.bucket if entry else Bucket()

        return self._environment.read(self, stage, read, Bucket())

    def load_manifest(self, flow: FlowRef) -> Manifest | None:
        """The manifest."""
        return self._environment.read(self, flow, lambda transaction: _manifest(transaction, flow), None)

    def save_manifest(self, flow: FlowRef, manifest: Manifest, *, after: tuple[int, int]) -> None:
        """Replace the manifest."""

        def write(transaction: Transaction) -> None:
            check_manifest(flow, manifest, _manifest(transaction, flow), _epoch(transaction, flow), after)
            transaction.put(manifest_key(flow), encode_manifest(manifest))

        self._environment.write(self, flow, write)

    def drop_states(self, flow: FlowRef) -> None:
        """Remove the states and the stages of a generation."""
        while effect(DROP, lambda: self._environment.write(self, flow, lambda transaction: _drop(transaction, flow))):
            pass

    def drop_flow(self, flow: FlowRef) -> None:
        """Remove the manifest and the epoch of a generation."""

        def write(transaction: Transaction) -> None:
            transaction.delete(manifest_key(flow))
            transaction.delete(epoch_key(flow))

        effect(DROP, lambda: self._environment.write(self, flow, write))

    def scan(self, stage: StageRef, begin: bytes, end: bytes | None) -> Iterator[tuple[bytes, Stored]]:
        """The states of a stage from the key `begin` up to but not including `end`, in the order of their keys."""
        # By pages: while a read transaction is open, no page that it may see is used again, and the file grows.
        last: bytes | None = b""
        while last is not None:
            page, last = self._page(stage, last, begin)
            for key, stored in page:
                if end is not None and key >= end:
                    return
                if key >= begin:  # keys that are cut in the environment begin at the same place
                    yield key, stored

    def close(self) -> None:
        """Close the environment, unless another handle uses it."""
        self._environment.release(self)

    def _due_page(self, stage: StageRef, last: int | bytes | None, until: int) -> list[tuple[bytes, bytes]]:
        """Entries of states that are due after `last`, a time or an entry, and the keys of these states."""

        def read(transaction: Transaction) -> list[tuple[bytes, bytes]]:
            if (entry := _stage(transaction, stage)) is None:
                return []
            found = due_page(transaction, entry.prefix, last, until, _PAGE)
            return [(one, key_of(stage, at, transaction.get(at, b""))[0]) for one, at in found]

        return self._environment.read(self, stage, read, [])

    def _page(self, stage: StageRef, last: bytes, begin: bytes) -> _Page:
        """The states after the place `last`, or from about `begin`, and the last place; None after the last page."""
        nothing: _Page = [], None
        return self._environment.read(self, stage, lambda transaction: _page(transaction, stage, last, begin), nothing)


def _drop(transaction: Transaction, flow: FlowRef) -> bool:
    """Remove some states of a generation, and each stage that has none left; return whether there are more."""
    begin, left = stages_key(flow), _REMOVED
    cursor = transaction.cursor()
    while cursor.set_range(begin) and cursor.key().startswith(begin):
        name = cursor.key()
        if (entry := read_stage(cursor.value(), flow)) is None:
            break
        for prefix in (*due_prefixes(entry.prefix), entry.prefix):
            while left and cursor.set_range(prefix) and cursor.key().startswith(prefix):
                cursor.delete()
                left -= 1
        if not left:
            return True
        transaction.delete(texts_key(flow.stage(name.removeprefix(begin).decode())))
        transaction.delete(name)
    return False


def _epoch(transaction: Transaction, flow: FlowRef) -> int:
    return read_epoch(transaction.get(epoch_key(flow)), flow)


def _manifest(transaction: Transaction, flow: FlowRef) -> Manifest | None:
    value = transaction.get(manifest_key(flow))
    return None if value is None else decode_manifest(value, flow)


def _texts(transaction: Transaction, stage: StageRef) -> Texts:
    return decode_texts(transaction.get(texts_key(stage)), stage)


def _more_texts(transaction: Transaction, stage: StageRef, writes: Sequence[Write]) -> Texts:
    """The texts of a stage, with new ones that many writes have in common."""
    texts = _texts(transaction, stage)
    if len(writes) < MANY or (more := texts.with_those_of([write.value for write in writes])) is texts:
        return texts
    transaction.put(texts_key(stage), encode_texts(more))
    owner = read_owner(transaction.get(OWNER), stage) or Owner()
    if owner.schema < SCHEMA:
        owner.schema = SCHEMA  # earlier releases cannot read shortened records
        transaction.put(OWNER, encode(owner))
    return more


def _stage(transaction: Transaction, stage: StageRef) -> StageEntry | None:
    return read_stage(transaction.get(stage_key(stage)), stage)


def _new_stage(transaction: Transaction, stage: StageRef) -> StageEntry:
    """The entry of a stage that is new to the environment; not stored yet."""
    owner = read_owner(transaction.get(OWNER), stage) or Owner()
    owner.stages += 1
    transaction.put(OWNER, encode(owner))
    return StageEntry(owner.stages)


def _load(transaction: Transaction, stage: StageRef, keys: Sequence[bytes]) -> dict[bytes, Stored]:
    entry = _stage(transaction, stage)
    if entry is None:
        return {}
    # In the order of places: neighbours are on one page, which is then searched once.
    found = transaction.cursor().getmulti(sorted(places(entry.prefix, keys)))
    return dict(read_states(stage, found, _texts(transaction, stage)))


def _replace(
    transaction: Transaction, stage: StageRef, prefix: bytes, writes: Sequence[Write], epoch: int, batch: int
) -> int:
    """Apply the writes, part by part, if the condition of each holds, and return their number.

    Raises:
        _Unusual: A condition does not hold; the transaction must be rolled back.
    """
    where = places(prefix, [write.key for write in writes])
    if any(map(gt, where, islice(where, 1, None))):
        placed = sorted(zip(where, writes, strict=True), key=itemgetter(0))
        where, writes = [one for one, _ in placed], [write for _, write in placed]
    cursor, texts = transaction.cursor(), _more_texts(transaction, stage, writes)
    for start in range(0, len(writes), _PART):
        part, values = where[start : start + _PART], writes[start : start + _PART]
        versions, whole = [write.expected for write in values], [write.value for write in values]
        _check(cursor.getmulti(part), part, versions, epoch)
        records = texts.shortened(whole)
        note = batch if records is None else batch | SHORTENED
        heads = {version: HEAD.pack(version + 1, epoch, note) for version in set(versions)}
        cursor.putmulti(
            [
                (one, written(one, heads[write.expected], write.key, record))
                for one, write, record in zip(part, values, records or whole, strict=True)
            ]
        )
    return len(writes)


def _check(found: Sequence[tuple[bytes, bytes]], where: Sequence[bytes], versions: Sequence[int], epoch: int) -> None:
    """Check that the entries found are those of writes which expect a version, and have these versions.

    Raises:
        _Unusual: They are not, or a higher epoch has written one of them.
    """
    if [one for one, _ in found] != list(compress(where, versions)):
        raise _Unusual
    heads = b"".join([value[: HEAD.size] for _, value in found])
    if len(heads) != HEAD.size * len(found):
        raise _Unusual
    stored = list(HEAD.iter_unpack(heads))
    if [version for version, _, _ in stored] != list(filter(None, versions)):
        raise _Unusual
    if any(writer > epoch for _, writer, _ in stored):
        raise _Unusual


def _resolve(
    transaction: Transaction, stage: StageRef, prefix: bytes, writes: Sequence[Write], epoch: int, batch: int
) -> int:
    """Apply the writes that were not applied before and return their number.

    Raises:
        Fenced: A state was written by a higher epoch.
        Conflict: States have other versions.
    """
    stored = _load(transaction, stage, [write.key for write in writes])
    todo = resolve(stage, writes, stored, epoch=epoch, batch=batch)
    return _replace(transaction, stage, prefix, todo, epoch, batch)


def _page(transaction: Transaction, stage: StageRef, last: bytes, begin: bytes) -> _Page:
    entry = _stage(transaction, stage)
    if entry is None:
        return [], None
    prefix = entry.prefix
    page: list[tuple[bytes, bytes]] = []
    before = last
    cursor = transaction.cursor()
    if not cursor.set_range(last or prefix + begin[:SHORT]):
        return [], None
    for found, value in cursor:
        if not found.startswith(prefix):
            break
        if found == last:
            continue
        # A page ends between keys that differ within their first bytes: only those are stored in order.
        if len(page) >= _PAGE and not (
            is_cut(before) and found[: len(prefix) + SHORT] == before[: len(prefix) + SHORT]
        ):
            return _sorted(transaction, stage, page), before
        page.append((found, value))
        before = found
    return _sorted(transaction, stage, page), None


def _sorted(
    transaction: Transaction, stage: StageRef, page: Sequence[tuple[bytes, bytes]]
) -> list[tuple[bytes, Stored]]:
    """The states of a page, in the order of their keys."""
    return sorted(read_states(stage, page, _texts(transaction, stage)), key=itemgetter(0))
