"""The LMDB store: one transaction per call."""

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import msgspec

from persistence.cas import check_distinct, check_epoch, check_is_epoch, check_manifest, resolve
from persistence.commit.faults import effect, write_of
from persistence.errors import Fenced, InvalidUrl
from persistence.lmdb.environment import SYNC, Transaction, shared
from persistence.lmdb.layout import (
    HEAD,
    OWNER,
    SHORT,
    Owner,
    StageEntry,
    encode,
    epoch_key,
    is_cut,
    manifest_key,
    place,
    read_epoch,
    read_owner,
    read_stage,
    read_state,
    read_states,
    stage_key,
    written,
)
from persistence.manifest import Manifest, decode_manifest, encode_manifest
from persistence.marks import (
    NONE,
    Acknowledged,
    Bucket,
    Mark,
    Marks,
    check_held,
    encode_downstream,
)
from persistence.protocol import Capabilities, FlowRef, StageRef, Stored, Write
from persistence.urls import choice, options, redact

_PAGE: Final = 1000
"""States per page of a scan, about 300 KB."""

_PART: Final = 1000
"""Writes that are compared, then applied, before the next ones: what they touch stays in the processor's cache."""

_BUCKET: Final = "0"

_Page = tuple[list[tuple[bytes, Stored]], bytes | None]


class _Unusual(Exception):
    """A save differs from the usual one: the condition of a write does not hold."""


class LmdbStore:
    """Keeps states in one LMDB environment, safe for several processes of one machine.

    With `sync=full` (the default), acknowledged writes survive a loss of power, at two waits for the disk per call.
    With `nometasync`, a loss of power may lose the last call, but never an earlier call without the later ones. With
    `nosync`, it may damage the environment. With any of them, a killed process loses nothing. The directory must be on
    a local disk, and all its processes in one PID namespace: LMDB works neither on network shares nor between containers
    that do not share their processes.

    Writers take turns, without a limit of time: a writer that is frozen in the middle of a call blocks the others, one
    that is killed does not. The data file grows as far as states need it, is never shortened, and its free pages are
    used again. No program may truncate it or copy over it while a flow runs: LMDB's processes would end with SIGBUS.

    Args:
        path: The directory. The first write creates it if it is missing; reading creates nothing.
        sync: `full`, `nometasync` or `nosync`, LMDB's MDB_NOMETASYNC and MDB_NOSYNC.
    """

    def __init__(self, path: Path, *, sync: str = "full") -> None:
        self._environment = shared(path, sync)
        self._capabilities = Capabilities(
            durable=sync == "full",
            ordered_durability=sync != "nosync",
            shared=True,
            atomic_save=True,
            ordered_scan=True,
            marked=True,
            counted=True,
        )

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def acquire_epoch(self, flow: FlowRef, *, above: int = 0) -> int:
        def acquire(transaction: Transaction) -> int:
            epoch = max(_epoch(transaction, flow), above) + 1
            transaction.put(epoch_key(flow), b"%d" % epoch)
            return epoch

        return self._environment.write(self, flow, acquire)

    def install_epoch(self, flow: FlowRef, epoch: int) -> None:
        check_is_epoch(flow, epoch)

        def install(transaction: Transaction) -> None:
            installed = _epoch(transaction, flow)
            if installed > epoch:
                raise Fenced.by(flow, epoch, installed)
            transaction.put(epoch_key(flow), b"%d" % epoch)

        self._environment.write(self, flow, install)

    def installed_epoch(self, flow: FlowRef) -> int:
        return self._environment.read(self, flow, lambda transaction: _epoch(transaction, flow), 0)

    def load(self, stage: StageRef, keys: Sequence[bytes]) -> dict[bytes, Stored]:
        return self._environment.read(self, stage, lambda transaction: _load(transaction, stage, keys), {})

    def save(
        self,
        stage: StageRef,
        writes: Sequence[Write],
        *,
        epoch: int,
        batch: int,
        known: Marks = NONE,
        downstream: Acknowledged = NONE,
    ) -> Marks:
        check_distinct(stage, writes)
        if not writes:
            return {}
        note = encode_downstream(epoch, downstream)

        def write(transaction: Transaction, apply: Callable[..., int] = _replace) -> Mark:
            check_epoch(stage, epoch, _epoch(transaction, stage.flow_ref))
            entry = _stage(transaction, stage) or _new_stage(transaction, stage)
            check_held(stage, _BUCKET, Mark(entry.mark), known)
            if apply(transaction, stage, entry.prefix, writes, epoch, batch):
                entry.mark += 1
                entry.downstream = msgspec.Raw(note) if note else None
                transaction.put(stage_key(stage), encode(entry))
            return Mark(entry.mark)

        def run() -> Mark:
            try:
                return self._environment.write(self, stage, write)
            except _Unusual:  # some writes are retries, or their states have changed: the stored states decide which
                return self._environment.write(self, stage, lambda transaction: write(transaction, _resolve))

        return {_BUCKET: effect(write_of(stage.stage), run)}

    def marks(self, stage: StageRef) -> Mapping[str, Bucket]:
        def read(transaction: Transaction) -> Bucket:
            entry = _stage(transaction, stage)
            return entry.bucket if entry else Bucket()

        return {_BUCKET: self._environment.read(self, stage, read, Bucket())}

    def load_manifest(self, flow: FlowRef) -> Manifest | None:
        return self._environment.read(self, flow, lambda transaction: _manifest(transaction, flow), None)

    def save_manifest(self, flow: FlowRef, manifest: Manifest, *, after: tuple[int, int] = (0, 0)) -> None:
        def write(transaction: Transaction) -> None:
            check_manifest(flow, manifest, _manifest(transaction, flow), _epoch(transaction, flow), after)
            transaction.put(manifest_key(flow), encode_manifest(manifest))

        self._environment.write(self, flow, write)

    def scan(self, stage: StageRef) -> Iterator[tuple[bytes, Stored]]:
        # By pages: while a read transaction is open, no page that it may see is used again, and the file grows.
        last: bytes | None = b""
        while last is not None:
            page, last = self._page(stage, last)
            yield from page

    def close(self) -> None:
        self._environment.release(self)

    def _page(self, stage: StageRef, last: bytes) -> _Page:
        """The states after the place `last`, and the last place among them; None after the last page."""
        nothing: _Page = [], None
        return self._environment.read(self, stage, lambda transaction: _page(transaction, stage, last), nothing)


def open_store(url: str) -> LmdbStore:
    """Open `lmdb:///absolute/directory` or `lmdb://relative/directory`.

    Option: `sync` (full, nometasync, nosync).

    Raises:
        Terminal: The URL has no path, or an unknown option.
    """
    parts = urlsplit(url)
    path = unquote(parts.netloc + parts.path)
    if not path:
        raise InvalidUrl(f"{redact(url)} names no directory", "Write lmdb:///absolute/path or lmdb://relative/path")
    return LmdbStore(Path(path).absolute(), **options(url, {"sync": choice(*SYNC)}))


def _epoch(transaction: Transaction, flow: FlowRef) -> int:
    return read_epoch(transaction.get(epoch_key(flow)), flow)


def _manifest(transaction: Transaction, flow: FlowRef) -> Manifest | None:
    value = transaction.get(manifest_key(flow))
    return None if value is None else decode_manifest(value, flow)


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
    prefix = entry.prefix
    # In the order of places: neighbours are on one page, which is then searched once.
    found = transaction.cursor().getmulti(sorted({place(prefix, key) for key in keys}))
    return read_states(stage, found)


def _replace(
    transaction: Transaction, stage: StageRef, prefix: bytes, writes: Sequence[Write], epoch: int, batch: int
) -> int:
    """Apply the writes, part by part, if the condition of each holds, and return their number.

    Raises:
        _Unusual: A condition does not hold; the transaction must be rolled back.
    """
    unpack = HEAD.unpack_from
    heads: dict[int, bytes] = {}
    placed = sorted([(place(prefix, write.key), write) for write in writes], key=itemgetter(0))
    cursor = transaction.cursor()
    for start in range(0, len(placed), _PART):
        part = placed[start : start + _PART]
        stored = dict(cursor.getmulti([one for one, _ in part]))
        rows = []
        for one, write in part:
            expected = write.expected
            if one in stored:
                try:
                    version, writer, _ = unpack(stored[one])
                except struct.error:
                    raise _Unusual from None
                if version != expected or writer > epoch:
                    raise _Unusual
            elif expected:
                raise _Unusual
            head = heads.get(expected) or heads.setdefault(expected, HEAD.pack(expected + 1, epoch, batch))
            rows.append((one, written(write.key, head, write.value)))
        cursor.putmulti(rows)
    return len(writes)


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


def _page(transaction: Transaction, stage: StageRef, last: bytes) -> _Page:
    entry = _stage(transaction, stage)
    if entry is None:
        return [], None
    prefix = entry.prefix
    page: list[tuple[bytes, Stored]] = []
    before = last
    cursor = transaction.cursor()
    if not cursor.set_range(last or prefix):
        return [], None
    for found, value in cursor:
        if not found.startswith(prefix):
            return sorted(page, key=itemgetter(0)), None
        if found == last:
            continue
        # A page ends between keys that differ within their first bytes: only those are stored in order.
        if len(page) >= _PAGE and not (
            is_cut(before) and found[: len(prefix) + SHORT] == before[: len(prefix) + SHORT]
        ):
            return sorted(page, key=itemgetter(0)), before
        page.append(read_state(stage, found, value))
        before = found
    return sorted(page, key=itemgetter(0)), None
