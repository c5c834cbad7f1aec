"""The Redis store: one key per state, one script for many states of a bucket."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from persistence.cas import check_distinct, check_is_epoch, manifest_behind, unknown_epoch
from persistence.commit.faults import FENCE, write_of
from persistence.errors import Conflict, Corrupt, Fenced, Terminal
from persistence.manifest import Manifest, decode_manifest, encode_manifest
from persistence.marks import (
    NONE,
    Acknowledged,
    Bucket,
    Mark,
    Marks,
    behind,
    bucket_of_parts,
    encode_downstream,
    note_mark,
)
from persistence.protocol import Capabilities, FlowRef, StageRef, Stored, Write
from persistence.redis.calls import Call, Caller, chunks, script_call
from persistence.redis.layout import RedisLayout, bucket_of
from persistence.redis.nodes import connect
from persistence.redis.preflight import Facts, facts_of, findings, is_durable
from persistence.redis.scripts import ACQUIRE, INSTALL, LOAD, MANIFEST, SAVE, SCAN
from persistence.redis.settings import read_place, read_settings

_BUCKETS = {"single": 1, "sentinel": 1, "cluster": 64}
"""Default number of buckets. With `appendfsync always` a server syncs its disk once per script, so a single
server needs few and full buckets; a cluster needs several per node."""
_KEYS = 2500
"""States per script: about 8 ms in which the server does nothing else."""
_BYTES = 4 << 20
_UNTOUCHED = Mark()


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
        parts, calls = [], []
        for bucket, mine in _by_bucket(keys, keys, buckets).items():
            heads = self._layout.heads(stage, bucket)
            for run in chunks((0 for _ in mine), _KEYS, _BYTES):
                parts.append(mine[run])
                calls.append(script_call(LOAD, [heads, *(b"%b:%b" % (heads, key) for key in mine[run])]))
        states: dict[bytes, Stored] = {}
        for part, answer in zip(parts, self._caller.run(calls, stage), strict=True):
            for key, head, value in zip(part, *answer, strict=True):
                if head is not None or value is not None:
                    states[key] = _stored(stage, key, head, value)
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
        note = encode_downstream(epoch, downstream)
        for bucket, mine in _by_bucket([write.key for write in writes], writes, buckets).items():
            fence, heads = self._layout.bucket(stage.flow_ref, bucket), self._layout.heads(stage, bucket)
            reached = known.get(str(bucket), _UNTOUCHED)
            for run in chunks((len(write.value) for write in mine), _KEYS, _BYTES):
                parts.append((bucket, mine[run]))
                arguments: list[bytes | int] = [epoch, batch, reached.count, reached.life.encode(), note]
                for write in mine[run]:
                    arguments += (write.expected, write.value)
                keys = [fence, heads, *(b"%b:%b" % (heads, write.key) for write in mine[run])]
                calls.append(script_call(SAVE, keys, arguments))
        answers = self._caller.run(calls, stage, writes=True, point=write_of(stage.stage))
        changed: set[bytes] = set()
        marks: dict[str, Mark] = {}
        for (bucket, part), answer in zip(parts, answers, strict=True):
            if isinstance(answer, bytes):
                # The last script of a bucket returns its newest mark, unless the bucket went back between two scripts.
                note_mark(stage, marks, str(bucket), Mark.parse(answer.decode()))
            elif answer[0] == b"BEHIND":
                raise behind(stage, str(bucket), known[str(bucket)].short, Mark.parse(answer[1].decode()).short)
            else:
                changed.update(_refused(stage, part, answer, epoch))
        if changed:
            raise Conflict(tuple(write.key for write in writes if write.key in changed), stage)
        return marks

    def marks(self, stage: StageRef) -> Mapping[str, Bucket]:
        buckets = range(self._bucket_count(stage.flow_ref) or 0)
        names = [self._layout.bucket(stage.flow_ref, bucket) for bucket in buckets]
        fields = (f"mark:{stage.stage}", f"downstream:{stage.stage}")
        answers = self._caller.run([Call(name, ("HMGET", name, *fields)) for name in names], stage)
        return {
            str(bucket): bucket_of_parts(Mark.parse((mark or b"").decode()), note)
            for bucket, (mark, note) in zip(buckets, answers, strict=True)
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
        _refused_epoch(flow, kind, manifest.epoch, int(rest[0]))

    def scan(self, stage: StageRef) -> Iterator[tuple[bytes, Stored]]:
        for bucket in range(self._bucket_count(stage.flow_ref) or 0):
            heads = self._layout.heads(stage, bucket)
            seen: set[bytes] = set()  # HSCAN may return a key twice while the hash grows
            process, cursor = b"", b"0"
            while True:
                call = script_call(SCAN, [heads], [cursor, _KEYS])
                (answer,) = self._caller.run([call], stage)
                if cursor != b"0" and answer[0] != process:
                    # A cursor is valid only in the process that returned it, since each process hashes with its own
                    # seed. After a restart or a failover it would skip keys, so the scan of the bucket starts again.
                    cursor = b"0"
                    continue
                process, cursor, pairs = answer
                fresh = [key for key in dict.fromkeys(pairs[::2]) if key not in seen]
                seen.update(fresh)
                yield from self.load(stage, fresh).items()
                if cursor == b"0":
                    break

    def close(self) -> None:
        self._nodes.close()

    def _refuse_unsafe(self) -> None:
        """Refuse servers that may lose states, unless the URL accepts the risk. Every run begins with this check."""
        for finding in (finding for facts in self.facts() for finding in findings(facts, self._place, self._settings)):
            if finding.unsafe and finding.risk not in self._settings.accept:
                raise Terminal(finding.what, f"{finding.remedy}, or accept the risk with ?accept={finding.risk}")

    def _install(self, flow: FlowRef, epoch: int, buckets: int) -> int:
        """Install an epoch in every bucket; return the highest installed epoch."""
        if self._settings.buckets not in (None, buckets):
            raise _other_buckets(flow, buckets)
        calls = [script_call(INSTALL, [self._layout.bucket(flow, b)], [epoch, buckets]) for b in range(buckets)]
        highest = epoch
        for installed, count in self._caller.run(calls, flow, writes=True, point=FENCE):
            if int(count) != buckets:
                raise _other_buckets(flow, int(count))
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
        return self._caller.run([Call(key, command)], ref)[0]


def open_store(url: str) -> RedisStore:
    """Open a store in Redis.

    `redis://[USER:PASSWORD@]HOST:PORT[/DB]`, `redis+unix:///PATH`, `redis+sentinel://HOST:PORT,.../SERVICE[/DB]`,
    `redis+cluster://HOST:PORT,...`; `rediss` instead of `redis` for TLS. Options:

    | option | default | |
    |---|---|---|
    | `timeout`, `connect_timeout` | 5 | seconds |
    | `retry_for` | 15 | seconds to retry while a server is unreachable, loading or failing over |
    | `buckets` | 1, in a cluster 64 | number of buckets of a flow that is new here |
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


def _by_bucket(keys: Sequence[bytes], things: Sequence[Any], buckets: int) -> dict[int, list[Any]]:
    groups: dict[int, list[Any]] = {}
    for key, thing in zip(keys, things, strict=True):
        groups.setdefault(bucket_of(key, buckets), []).append(thing)
    return groups


def _refused(stage: StageRef, writes: Sequence[Write], answer: Sequence[Any], epoch: int) -> list[bytes]:
    """The changed keys of a script that wrote nothing; raise if it returned an error."""
    kind, *rest = answer
    if kind == b"CONFLICT":
        return [writes[i].key for i in rest]
    if kind == b"NEWER":
        raise Fenced(
            f"the state was written by epoch {int(rest[1])}; this run has epoch {epoch}",
            ref=stage,
            key=writes[rest[0]].key,
        )
    if kind == b"DAMAGED":
        raise (
            Corrupt("the state's head is missing or cannot be read", ref=stage, key=writes[rest[0]].key)
            if rest
            else Corrupt("the mark of a bucket cannot be read", ref=stage)
        )
    return _refused_epoch(stage, kind, epoch, int(rest[0]))


def _refused_epoch(ref: FlowRef | StageRef, kind: bytes, epoch: int, installed: int) -> NoReturn:
    raise Fenced.by(ref, epoch, installed) if kind == b"FENCED" else unknown_epoch(ref, epoch, installed)


def _stored(stage: StageRef, key: bytes, head: bytes | None, value: bytes | None) -> Stored:
    if value is None:
        raise Corrupt(
            "the state has disappeared: evicted, expired, deleted or replaced by another type", ref=stage, key=key
        )
    try:
        version, epoch, batch = map(int, (head or b"").split())
    except ValueError:
        raise Corrupt("the state's head is missing or cannot be read", ref=stage, key=key) from None
    return Stored(version, epoch, batch, value)


def _other_buckets(flow: FlowRef, buckets: int) -> Terminal:
    return Terminal(f"the flow has {buckets} buckets in this store", "Remove the option buckets", ref=flow)
