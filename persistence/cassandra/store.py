"""The Cassandra store: the states of a stage in buckets, replaced by lightweight transactions, fenced by epoch."""

import random
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Final

from persistence.cas import check_distinct, check_is_epoch
from persistence.cassandra.buckets import keys_by_bucket, writes_by_bucket
from persistence.cassandra.client import Client
from persistence.cassandra.epochs import Epochs
from persistence.cassandra.fences import Fences
from persistence.cassandra.flows import Flows
from persistence.cassandra.settings import CONDITIONAL, CassandraSettings
from persistence.cassandra.statements import mark_of
from persistence.cassandra.states import States
from persistence.commit.faults import DROP, effect
from persistence.errors import Conflict, Terminal
from persistence.marks import NONE, Acknowledged, Bucket, Mark, Marks, encode_downstream
from persistence.protocol import Capabilities, FlowRef, Manifest, Removed, StageRef, Stored, Write

MAX_KEY_BYTES: Final = 65_535
"""Cassandra's limit for a clustering column."""


class CassandraStore:
    """Keeps states in a Cassandra cluster, safe for many processes and machines.

    A write is acknowledged when a quorum of the copies has accepted it. Whether it also survives a loss of power
    depends on the nodes' `commitlog_sync`, which `capabilities` queries: with `periodic`, Cassandra's
    default, a node loses up to the last ten seconds.

    Args:
        settings: The settings of the URL.
    """

    def __init__(self, settings: CassandraSettings) -> None:
        self._client = Client(settings)
        self._flows = Flows(self._client)
        fences = Fences(self._client, self._flows)
        self._epochs = Epochs(self._flows, fences, settings)
        self._states = States(self._client, fences)
        self._settings = settings
        self._capabilities: Capabilities | None = None

    @property
    def capabilities(self) -> Capabilities:
        if self._capabilities is None:
            self._capabilities = Capabilities(
                durable=self._syncs_before_it_acknowledges(),
                shared=True,
                fenced=self._settings.mode == CONDITIONAL,
                conditional=self._settings.mode == CONDITIONAL,
                marked=True,
                max_key_bytes=MAX_KEY_BYTES,
                max_value_bytes=self._settings.max_value_bytes,
            )
        return self._capabilities

    def acquire_epoch(self, flow: FlowRef, *, above: int = 0) -> int:
        return self._epochs.acquire(flow, above)

    def install_epoch(self, flow: FlowRef, epoch: int) -> None:
        self._epochs.install(flow, epoch)

    def installed_epoch(self, flow: FlowRef) -> int:
        return self._flows.installed_epoch(flow)

    def load(self, stage: StageRef, keys: Sequence[bytes]) -> dict[bytes, Stored]:
        layout = self._flows.layout(stage) if keys else None
        if layout is None:
            return {}
        wanted = keys_by_bucket(keys, layout.buckets)
        parts = self._client.together(
            stage, [partial(self._states.load, stage, bucket, some) for bucket, some in wanted.items()]
        )
        return {key: state for part in parts for key, state in part.items()}

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
        check_is_epoch(stage, epoch)
        self._check_sizes(stage, writes)
        layout = self._epochs.begin(stage, epoch)
        lanes = list(writes_by_bucket(writes, layout.buckets).items())
        # Tasks of one flow save at the same time; in the same order, they would all wait for the same bucket.
        random.shuffle(lanes)
        save = partial(
            self._states.save,
            stage,
            epoch=epoch,
            batch=batch,
            known=known,
            note=encode_downstream(epoch, downstream).decode(),
        )
        changed = self._client.together(stage, [partial(save, bucket, some) for bucket, some in lanes])
        if keys := {key for part in changed for key in part}:
            raise Conflict(tuple(write.key for write in writes if write.key in keys), ref=stage)
        return {str(bucket): Mark(mark_of(epoch, batch)) for bucket, _ in lanes}

    def remove(self, stage: StageRef, until: int, *, epoch: int, batch: int, known: Marks = NONE) -> Removed:
        check_is_epoch(stage, epoch)
        layout = self._epochs.begin(stage, epoch)
        buckets = range(layout.buckets)
        if not layout.indexed:  # by an earlier version; no run that writes without the index can have this epoch
            index = partial(self._states.index, stage, epoch=epoch)
            self._client.together(stage, [partial(index, bucket) for bucket in buckets])
            self._flows.set_indexed(stage, epoch)
        remove = partial(self._states.remove, stage, until=until, epoch=epoch, batch=batch, known=known)
        found = self._client.together(stage, [partial(remove, bucket) for bucket in buckets])
        marks = {str(bucket): mark for bucket, (mark, _) in zip(buckets, found, strict=True)}
        return Removed(sum(gone for _, gone in found), marks)

    def due(self, stage: StageRef, until: int, *, after: int | None = None) -> Iterator[bytes]:
        layout = self._flows.layout(stage)
        for bucket in range(layout.buckets if layout else 0):
            yield from self._states.due(stage, bucket, until, after, indexed=layout is not None and layout.indexed)

    def marks(self, stage: StageRef) -> Mapping[str, Bucket]:
        layout = self._flows.layout(stage)
        buckets = range(layout.buckets if layout else 0)
        found = self._client.together(stage, [partial(self._states.bucket, stage, bucket) for bucket in buckets])
        return {str(bucket): one for bucket, one in zip(buckets, found, strict=True)}

    def load_manifest(self, flow: FlowRef) -> Manifest | None:
        return self._flows.load_manifest(flow)

    def save_manifest(self, flow: FlowRef, manifest: Manifest, *, after: tuple[int, int] = (0, 0)) -> None:
        self._flows.save_manifest(flow, manifest, after)

    def drop(self, flow: FlowRef) -> None:
        for name, layout in self._flows.layouts(flow).items():
            stage = flow.stage(name)
            # So that an epoch can be installed again after a crash, although buckets have no fence any more.
            self._flows.set_fenced(stage, self._flows.installed_epoch(flow), fenced=False)
            drop = partial(self._states.drop, stage)
            self._client.together(stage, [partial(drop, bucket) for bucket in range(layout.buckets)])
            effect(DROP, partial(self._flows.drop_stage, stage))
        effect(DROP, partial(self._flows.drop, flow))

    def scan(
        self, stage: StageRef, *, bucket: str | None = None, begin: bytes = b"", end: bytes | None = None
    ) -> Iterator[tuple[bytes, Stored]]:
        layout = self._flows.layout(stage)
        for number in range(layout.buckets if layout else 0):
            if bucket in (None, str(number)):
                yield from self._states.scan(stage, number, begin, end)

    def close(self) -> None:
        self._client.close()

    def _check_sizes(self, stage: StageRef, writes: Sequence[Write]) -> None:
        limit = self._settings.max_value_bytes
        for write in writes:
            if len(write.key) > MAX_KEY_BYTES:
                raise Terminal(
                    f"the key has {len(write.key)} bytes; Cassandra's limit is {MAX_KEY_BYTES}", "Use a shorter key",
                    ref=stage, key=write.key,
                )  # fmt: skip
            if len(write.value) > limit:
                raise Terminal(
                    f"the state has {len(write.value)} bytes; the limit is {limit}",
                    "Keep less in the state, or raise the limit with the URL's max_value_bytes, up to 8 MiB",
                    ref=stage,
                    key=write.key,
                )

    def _syncs_before_it_acknowledges(self) -> bool:
        from persistence.cassandra.preflight import commitlog_sync

        return set(self._client.retried(lambda: commitlog_sync(self._client))) <= {"batch", "group"}


def open_store(url: str) -> CassandraStore:
    """Open `cassandra://[user@]host[:port][,host[:port]...]/keyspace`; `CassandraSettings` documents the options.

    The first call connects, in each process that uses the handle.

    Raises:
        Terminal: The URL is invalid.
    """
    return CassandraStore(CassandraSettings.parse(url))
