"""The Redis store: one hash for the states of a bucket, one script for many of them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

from persistence.cas import check_distinct, check_is_epoch, manifest_behind, unknown_epoch
from persistence.commit.faults import DROP, FENCE, write_of
from persistence.errors import Conflict, Corrupt, Fenced, Terminal
from persistence.manifest import Manifest, decode_manifest, encode_manifest
from persistence.marks import (
    NONE,
    Acknowledged,
    Bucket,
    Mark,
    Marks,
    bucket_of_parts,
    encode_downstream,
    note_mark,
)
from persistence.protocol import Capabilities, FlowRef, Removed, StageRef, Stored, Write
from persistence.redis.answers import check_bucket, lost, other_buckets, refused, refused_epoch, stored
from persistence.redis.calls import Caller, chunks, command_call, script_call
from persistence.redis.layout import RedisLayout, by_bucket
from persistence.redis.nodes import connect
from persistence.redis.preflight import Facts, facts_of, findings, is_durable
from persistence.redis.saving import Saving, removing
from persistence.redis.scripts import ACQUIRE, COUNTS, INSTALL, MANIFEST, SCAN
from persistence.redis.settings import read_place, read_settings
from persistence.redis.versions import LoadedVersions, point_of

_BUCKETS = {"single": 4, "sentinel": 4, "cluster": 64}
"""Default number of buckets. A task that has buckets of its own writes them without scripts. With `appendfsync always` a
server syncs its disk once per call, so a single server needs few and full buckets; a cluster needs several per node."""
_KEYS = 2500
"""States per script: about 10 ms in which the server does nothing else. Lua can pass on 8,000 values at once."""
_BYTES = 4 << 20
_UNTOUCHED = Mark()
_EXPECTED = attrgetter("expected")


class RedisStore:
    """Keeps states in Redis or Valkey: a server, a primary with sentinels, or a cluster.

    Args:
        url: See `open_store`.
    """

    def __init__(self, url: str) -> None:
        self._settings = read_settings(url)
        self._place = read_place(url)
        self._nodes = connect(self._place, self._settings)
        self._caller = Caller(self._nodes, self._settings)
        self._layout = RedisLayout(self._settings.prefix)
        self._buckets: dict[FlowRef, int] = {}
        self._facts: list[Facts] | None = None
        self._versions = LoadedVersions()

    @property
    def capabilities(self) -> Capabilities:
        """Asks the servers once; `durable` and `ordered_durability` depend on their settings."""
        facts = self.facts()
        return Capabilities(
            durable=all(is_durable(one, self._settings) for one in facts),
            ordered_durability=self._place.kind != "cluster" and all(one.aof for one in facts),
            shared=True,
            marked=True,
            counted=True,
        )

    def facts(self) -> list[Facts]:
        """Facts that each primary reports, asked once.

        Raises:
            Transient: A server cannot be reached.
            Terminal: A server refuses to answer.
        """
        if self._facts is None:
            self._facts = facts_of(self._nodes, self._settings)
        return self._facts

    def acquire_epoch(self, flow: FlowRef, *, above: int = 0) -> int:
        self._refuse_unsafe()
        while True:
            call = script_call(ACQUIRE, [self._layout.flow(flow)], [above, self._wanted_buckets()])
            epoch, buckets = map(int, self._caller.run([call], flow, writes=True)[0])
            above = self._install(flow, epoch, buckets)
            if above <= epoch:
                return epoch
            # Buckets have a higher one: the flow's own hash was lost, or another run is starting.

    def install_epoch(self, flow: FlowRef, epoch: int) -> None:
        check_is_epoch(flow, epoch)
        self._refuse_unsafe()
        call = script_call(INSTALL, [self._layout.flow(flow)], [epoch, self._wanted_buckets()])
        installed, buckets = map(int, self._caller.run([call], flow, writes=True)[0])
        if installed <= epoch:
            installed = self._install(flow, epoch, buckets)
        if installed > epoch:
            raise Fenced.by(flow, epoch, installed)

    def installed_epoch(self, flow: FlowRef) -> int:
        return int(self._ask(flow, "epoch") or 0)

    def load(self, stage: StageRef, keys: Sequence[bytes]) -> dict[bytes, Stored]:
        buckets = self._bucket_count(stage.flow_ref)
        if buckets is None:
            return {}
        states: dict[bytes, Stored] = {}
        incomplete: set[int] = set()

        def note(bucket: int, part: Sequence[bytes], answer: Sequence[bytes | None]) -> None:
            for key, content in zip(part, answer, strict=True):
                if content is None:
                    incomplete.add(bucket)
                else:
                    states[key] = stored(stage, key, content)

        calls = []
        fields = f"mark:{stage.stage}", f"save:{stage.stage}"
        divided = by_bucket(keys, keys, buckets)
        for bucket in divided:
            # Before the states: what is written in between has a later point.
            name = self._layout.bucket(stage.flow_ref, bucket)
            calls.append(command_call(name, "HMGET", name, *fields))
        for bucket, mine in divided.items():
            name = self._layout.states(stage, bucket)
            for start in range(0, len(mine), _KEYS):
                part = mine[start : start + _KEYS]
                calls.append(command_call(name, "HMGET", name, *part, read=partial(note, bucket, part)))
        points = self._caller.run(calls, stage)
        self._check_complete(stage, incomplete)
        for (bucket, mine), point in zip(divided.items(), points, strict=False):
            versions = dict.fromkeys(mine, 0) | {key: states[key].version for key in mine if key in states}
            self._versions.note(stage, bucket, point_of(*point), versions)
        return states

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
        check_is_epoch(stage, epoch)
        if not writes:
            return {}
        buckets = self._bucket_count(stage.flow_ref)
        if buckets is None:
            raise unknown_epoch(stage, epoch, 0)
        parts, calls = [], []
        for bucket, mine in by_bucket([write.key for write in writes], writes, buckets).items():
            saving = Saving(
                self._layout.bucket(stage.flow_ref, bucket),
                self._layout.states(stage, bucket),
                self._layout.dues(stage, bucket),
                stage.stage,
                epoch,
                batch,
                known.get(str(bucket), _UNTOUCHED),
                self._versions.take(stage, bucket, mine),
                encode_downstream(epoch, downstream),
            )
            mine.sort(key=_EXPECTED)
            for run in chunks([len(write.value) for write in mine], _KEYS, _BYTES):
                part = mine[run]
                parts.append((bucket, part))
                calls.append(saving.call(part))
        answers = self._caller.run(calls, stage, writes=True, point=write_of(stage.stage))
        changed: set[bytes] = set()
        marks: dict[str, Mark] = {}
        for (bucket, part), answer in zip(parts, answers, strict=True):
            if isinstance(answer, bytes):
                # The last script of a bucket returns its newest mark, unless the bucket went back between two scripts.
                note_mark(stage, marks, str(bucket), Mark.parse(answer.decode()))
            else:
                check_bucket(stage, bucket, answer, known)
                changed.update(refused(stage, part, answer, epoch))
        if changed:
            raise Conflict(tuple(write.key for write in writes if write.key in changed), stage)
        return marks

    def remove(self, stage: StageRef, until: int, *, epoch: int, batch: int, known: Marks = NONE) -> Removed:
        check_is_epoch(stage, epoch)
        buckets = self._bucket_count(stage.flow_ref)
        if buckets is None:
            raise unknown_epoch(stage, epoch, 0)
        states, marks, left = 0, dict[str, Mark](), list(range(buckets))
        while left:
            calls = [
                removing(self._layout, stage, bucket, until, _KEYS, epoch, known.get(str(bucket), _UNTOUCHED))
                for bucket in left
            ]
            answers = self._caller.run(calls, stage, writes=True, point=write_of(stage.stage))
            full = []
            for bucket, answer in zip(left, answers, strict=True):
                check_bucket(stage, bucket, answer, known)
                if answer[0] != b"REMOVED":
                    refused(stage, (), answer, epoch)
                note_mark(stage, marks, str(bucket), Mark.parse(answer[1].decode()))
                states += answer[2]
                if answer[2] == _KEYS:
                    full.append(bucket)
            left = full
        return Removed(states, marks)

    def due(self, stage: StageRef, until: int, *, after: int | None = None) -> Iterator[bytes]:
        for bucket in range(self._bucket_count(stage.flow_ref) or 0):
            name = self._layout.dues(stage, bucket)
            counts = [
                command_call(name, "ZCOUNT", name, "-inf", "-inf" if after is None else after),
                command_call(name, "ZCOUNT", name, "-inf", until),
            ]
            first, end = self._caller.run(counts, stage)
            for start in range(first, end, _KEYS):  # by rank, which the server finds without a search
                yield from self._command(stage, name, ("ZRANGE", name, start, min(start + _KEYS, end) - 1))

    def marks(self, stage: StageRef) -> Mapping[str, Bucket]:
        buckets = range(self._bucket_count(stage.flow_ref) or 0)
        names = [self._layout.bucket(stage.flow_ref, bucket) for bucket in buckets]
        fields = (f"mark:{stage.stage}", f"downstream:{stage.stage}", f"removed:{stage.stage}")
        answers = self._caller.run([command_call(name, "HMGET", name, *fields) for name in names], stage)
        return {
            str(bucket): bucket_of_parts(Mark.parse((mark or b"").decode()), note, None if gone is None else int(gone))
            for bucket, (mark, note, gone) in zip(buckets, answers, strict=True)
        }

    def load_manifest(self, flow: FlowRef) -> Manifest | None:
        value = self._ask(flow, "manifest")
        return None if value is None else decode_manifest(value, flow)

    def save_manifest(self, flow: FlowRef, manifest: Manifest, *, after: tuple[int, int] = (0, 0)) -> None:
        check_is_epoch(flow, manifest.epoch)
        arguments: list[bytes | int] = [manifest.epoch, manifest.batch, encode_manifest(manifest), *after]
        (answer,) = self._caller.run([script_call(MANIFEST, [self._layout.flow(flow)], arguments)], flow, writes=True)
        if not answer:
            return
        kind, *rest = answer
        if kind == b"OLDER":
            raise Fenced(
                f"the manifest of epoch {manifest.epoch}, batch {manifest.batch} comes after "
                f"the one of epoch {int(rest[0])}, batch {int(rest[1])}",
                ref=flow,
            )
        if kind == b"BEHIND":
            raise manifest_behind(flow, after, (int(rest[0]), int(rest[1])))
        if kind == b"DAMAGED":
            raise Corrupt("the manifest's head cannot be read", ref=flow)
        refused_epoch(flow, kind, manifest.epoch, int(rest[0]))

    def drop(self, flow: FlowRef) -> None:
        for bucket in range(self._bucket_count(flow) or 0):
            name = self._layout.bucket(flow, bucket)
            fields = (field.decode().partition(":") for field in self._command(flow, name, ("HKEYS", name)))
            stages = {flow.stage(stage) for _, colon, stage in fields if colon}
            keys = [key for one in stages for key in (self._layout.states(one, bucket), self._layout.dues(one, bucket))]
            # In one step: without its own hash, nobody would find the states of a bucket.
            self._unlink(flow, name, *keys)
        self._unlink(flow, self._layout.flow(flow))
        self._buckets.pop(flow, None)

    def _unlink(self, flow: FlowRef, *keys: bytes) -> None:
        self._caller.run([command_call(keys[0], "UNLINK", *keys)], flow, writes=True, point=DROP)

    def scan(
        self, stage: StageRef, *, bucket: str | None = None, begin: bytes = b"", end: bytes | None = None
    ) -> Iterator[tuple[bytes, Stored]]:
        for number in range(self._bucket_count(stage.flow_ref) or 0):
            if bucket in (None, str(number)):
                # The server has no order of keys, so it sends all states of the bucket.
                for key, stored in self._scan(stage, number):
                    if key >= begin and (end is None or key < end):
                        yield key, stored

    def close(self) -> None:
        self._nodes.close()

    def _scan(self, stage: StageRef, bucket: int) -> Iterator[tuple[bytes, Stored]]:
        """The states of a bucket."""
        self._check_complete(stage, [bucket])
        name = self._layout.states(stage, bucket)
        seen: set[bytes] = set()  # HSCAN may return a key twice while the hash grows
        process, cursor = b"", b"0"
        while True:
            call = script_call(SCAN, [name], [cursor, _KEYS])
            (answer,) = self._caller.run([call], stage)
            if cursor != b"0" and answer[0] != process:
                # A cursor is valid only in the process that returned it, since each process hashes with its own
                # seed. After a restart or a failover it would skip keys, so the scan of the bucket starts again.
                cursor = b"0"
                continue
            process, cursor, pairs = answer
            for key, content in zip(pairs[::2], pairs[1::2], strict=True):
                if key not in seen:
                    seen.add(key)
                    yield key, stored(stage, key, content)
            if cursor == b"0":
                break

    def _check_complete(self, stage: StageRef, buckets: Iterable[int]) -> None:
        """Refuse buckets in which states are missing. Every save checks the same."""
        which = sorted(buckets)
        names = [(self._layout.bucket(stage.flow_ref, b), self._layout.states(stage, b)) for b in which]
        answers = self._caller.run([script_call(COUNTS, both) for both in names], stage)
        for bucket, (expected, found) in zip(which, answers, strict=True):
            if expected != found:
                raise lost(stage, bucket, expected, found)

    def _refuse_unsafe(self) -> None:
        """Refuse servers that may lose states, unless the URL accepts the risk. Every run begins with this check."""
        for finding in (finding for facts in self.facts() for finding in findings(facts, self._place, self._settings)):
            if finding.unsafe and finding.risk not in self._settings.accept:
                raise Terminal(finding.what, f"{finding.remedy}, or accept the risk with ?accept={finding.risk}")

    def _install(self, flow: FlowRef, epoch: int, buckets: int) -> int:
        """Install an epoch in every bucket; return the highest installed epoch."""
        if self._settings.buckets not in (None, buckets):
            raise other_buckets(flow, buckets)
        calls = [script_call(INSTALL, [self._layout.bucket(flow, b)], [epoch, buckets]) for b in range(buckets)]
        highest = epoch
        for installed, count in self._caller.run(calls, flow, writes=True, point=FENCE):
            if int(count) != buckets:
                raise other_buckets(flow, int(count))
            highest = max(highest, int(installed))
        self._buckets[flow] = buckets
        return highest

    def _wanted_buckets(self) -> int:
        return self._settings.buckets or _BUCKETS[self._place.kind]

    def _bucket_count(self, flow: FlowRef) -> int | None:
        """Number of buckets of a flow; None if it has never run in this store."""
        if flow not in self._buckets:
            count = self._ask(flow, "buckets")
            if count is None:
                return None
            self._buckets[flow] = int(count)
        return self._buckets[flow]

    def _ask(self, flow: FlowRef, field: str) -> bytes | None:
        """A field of the flow's hash."""
        key = self._layout.flow(flow)
        answer: bytes | None = self._command(flow, key, ("HGET", key, field))
        return answer

    def _command(self, ref: FlowRef | StageRef, key: bytes, command: Sequence[Any]) -> Any:
        return self._caller.run([command_call(key, *command)], ref)[0]


def open_store(url: str) -> RedisStore:
    """Open a store in Redis.

    `redis://[USER:PASSWORD@]HOST:PORT[/DB]`, `redis+unix:///PATH`, `redis+sentinel://HOST:PORT,.../SERVICE[/DB]`,
    `redis+cluster://HOST:PORT,...`; `rediss` instead of `redis` for TLS. Options:

    | option | default | |
    |---|---|---|
    | `timeout`, `connect_timeout` | 5 | seconds |
    | `retry_for` | 15 | seconds to retry while a server is unreachable, loading or failing over |
    | `buckets` | 4, in a cluster 64 | number of buckets of a flow that is new here |
    | `prefix` | hw | first part of every key |
    | `wait` | 0 | replicas that must have each write (WAIT) |
    | `waitaof` | | `1` or `1,N`: the server's disk, and N replicas' disks, must have it (WAITAOF) |
    | `wait_timeout` | 1 | seconds to wait for them |
    | `accept` | | risks to accept: `eviction`, `no-aof`, `replica`, `fsync`, `unwaited-replicas` |
    | `ssl_ca_certs`, `ssl_certfile`, `ssl_keyfile`, `ssl_cert_reqs` | | as in redis-py |
    | `password_file`, `password_env` | | the file or variable that contains the password |
    | `sentinel_username`, `sentinel_password_file`, `sentinel_password_env` | | the same for the sentinels |
    | `client_name` | | |

    Raises:
        Terminal: The URL is invalid.
    """
    return RedisStore(url)
