"""The Redis store: one hash for the states of a bucket, one script for many of them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import compress
from typing import Any

from persistence.cas import check_distinct, check_is_epoch, manifest_behind, unknown_epoch
from persistence.commit.faults import FENCE, write_of
from persistence.errors import Corrupt, Fenced, Terminal
from persistence.manifest import Manifest, decode_manifest, encode_manifest
from persistence.marks import (
    NONE,
    Acknowledged,
    Bucket,
    Mark,
    Marks,
    bucket_of_parts,
)
from persistence.protocol import Capabilities, FlowRef, StageRef, Stored, Write
from persistence.redis.calls import Caller, command_call, script_call
from persistence.redis.held import ABSENT, HeldStates, point_of
from persistence.redis.layout import RedisLayout, by_bucket
from persistence.redis.nodes import connect
from persistence.redis.preflight import Facts, facts_of, findings, is_durable
from persistence.redis.saving import KEYS, Save, damaged, lost, refuse_epoch
from persistence.redis.scripts import ACQUIRE, COUNTS, INSTALL, MANIFEST, SCAN
from persistence.redis.settings import read_place, read_settings

_BUCKETS = {"single": 4, "sentinel": 4, "cluster": 64}
"""Default number of buckets. If each task that reads a topic has buckets of its own, states are held in its process
(`persistence.redis.held`). More than that are for a cluster, which needs several per node."""


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
        self._held = HeldStates(self._settings.cache * 1024**2)

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
        if buckets is None or not keys:
            return {}
        self._held.make_room()
        divided = by_bucket(keys, keys, buckets)
        points = dict(zip(divided, self._points(stage, divided), strict=True))
        held = {bucket: self._held.at(stage, bucket, points[bucket], mine) for bucket, mine in divided.items()}
        unread = {
            bucket: [key for key, state in zip(mine, held[bucket], strict=True) if state is None]
            for bucket, mine in divided.items()
        }
        # Read after the points: what is written in the meantime has later ones.
        read = self._read(stage, unread)
        states: dict[bytes, Stored] = {}
        incomplete = []
        for bucket, mine in divided.items():
            self._held.read(stage, bucket, points[bucket], unread[bucket], read[bucket])
            found = iter(read[bucket])
            some = [next(found) if state is None else state for state in held[bucket]]
            exists = [state is not ABSENT for state in some]
            states.update(zip(compress(mine, exists), compress(some, exists), strict=True))
            if not all(exists):
                incomplete.append(bucket)
        self._check_complete(stage, incomplete)
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
        save = Save(
            stage,
            writes,
            buckets,
            self._held,
            self._layout,
            epoch=epoch,
            batch=batch,
            known=known,
            downstream=downstream,
        )
        return save.finish(self._caller.run(save.calls, stage, writes=True, point=write_of(stage.stage)))

    def marks(self, stage: StageRef) -> Mapping[str, Bucket]:
        buckets = range(self._bucket_count(stage.flow_ref) or 0)
        names = [self._layout.bucket(stage.flow_ref, bucket) for bucket in buckets]
        fields = (f"mark:{stage.stage}", f"downstream:{stage.stage}")
        answers = self._caller.run([command_call(name, "HMGET", name, *fields) for name in names], stage)
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
        refuse_epoch(flow, kind, manifest.epoch, int(rest[0]))

    def scan(self, stage: StageRef) -> Iterator[tuple[bytes, Stored]]:
        for bucket in range(self._bucket_count(stage.flow_ref) or 0):
            self._check_complete(stage, [bucket])
            name = self._layout.states(stage, bucket)
            seen: set[bytes] = set()  # HSCAN may return a key twice while the hash grows
            process, cursor = b"", b"0"
            while True:
                call = script_call(SCAN, [name], [cursor, KEYS])
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
                        yield key, _state(stage, key, content)
                if cursor == b"0":
                    break

    def close(self) -> None:
        self._nodes.close()

    def _points(self, stage: StageRef, buckets: Iterable[int]) -> list[bytes]:
        """The points of some buckets; see `persistence.redis.held`."""
        fields = f"mark:{stage.stage}", f"save:{stage.stage}"
        names = [self._layout.bucket(stage.flow_ref, bucket) for bucket in buckets]
        answers = self._caller.run([command_call(name, "HMGET", name, *fields) for name in names], stage)
        return [point_of(mark or b"0", save or b"") for mark, save in answers]

    def _read(self, stage: StageRef, unread: Mapping[int, Sequence[bytes]]) -> dict[int, list[Stored]]:
        """States by bucket, in the order of their keys; `ABSENT` for those that do not exist."""
        parts = [
            (bucket, keys[start : start + KEYS])
            for bucket, keys in unread.items()
            for start in range(0, len(keys), KEYS)
        ]
        calls = []
        for bucket, keys in parts:
            name = self._layout.states(stage, bucket)
            calls.append(command_call(name, "HMGET", name, *keys, read=partial(_stored, stage, keys)))
        states: dict[int, list[Stored]] = {bucket: [] for bucket in unread}
        for (bucket, _), some in zip(parts, self._caller.run(calls, stage), strict=True):
            states[bucket] += some
        return states

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
    | `cache` | 256 | MB of memory for states that a process holds from batch to batch; 0 for none |
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


def _stored(stage: StageRef, keys: Sequence[bytes], contents: Sequence[bytes | None]) -> list[Stored]:
    return [
        ABSENT if content is None else _state(stage, key, content) for key, content in zip(keys, contents, strict=True)
    ]


def _state(stage: StageRef, key: bytes, content: bytes) -> Stored:
    try:
        version, epoch, batch, value = content.split(b" ", 3)
        return Stored(int(version), int(epoch), int(batch), value)
    except ValueError:
        raise damaged(stage, key) from None


def _other_buckets(flow: FlowRef, buckets: int) -> Terminal:
    return Terminal(f"the flow has {buckets} buckets in this store", "Remove the option buckets", ref=flow)
