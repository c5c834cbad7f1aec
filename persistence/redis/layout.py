"""Names of the keys in Redis.

With the default prefix, for flow `fleet`, generation 1, stage `aircraft`, the state of key `N14228`:

| key | type | content |
|---|---|---|
| `hw:{fleet:1}` | hash | `epoch`, `buckets`, `manifest` (JSON), `manifest_head` (its epoch and batch) |
| `hw:{fleet:1:0}` | hash | of bucket 0: `epoch`, `buckets`; by stage `mark:aircraft`, `states:`, `save:`, `downstream:` (JSON), `removed:` |
| `hw:{fleet:1:0}:aircraft` | hash | states by key: `N14228` is `7 3 12 {...}`: version, epoch, batch, and the record, JSON |
| `hw:{fleet:1:0}:aircraft:due` | sorted set | keys of the states with a due time, by this time in seconds since 1970 |

A key's bucket is its hash modulo the number of buckets (`persistence.murmur2`). The part in braces determines the cluster
slot, so a bucket is on one node and one script can replace many of its states. A bucket's own hash is
the fence, which the script that writes checks. `states:aircraft` is the number of states that the last save left:
a save, a scan, and a load that misses a state compare it with the number that exists, so no state disappears unnoticed.
`save:aircraft` is the random id of the last save: with the mark it is the bucket's point (`persistence.redis.versions`).
Read a state with `redis-cli HGET 'hw:{fleet:1:5}:aircraft' N14228`; never write one.

A state is a field and not a key of its own. A script pays for each string that it is given or reads, and the server's
memory for each place that it looks at. With the head in front of the record, a load is one HMGET without a script, and
a save looks at each state in one place, which it finds by its short key.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import TypeVar

from persistence.murmur2 import parts_of
from persistence.names import FlowRef, StageRef

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RedisLayout:
    """Key names under one prefix."""

    prefix: str = "hw"

    def flow(self, flow: FlowRef) -> bytes:
        """The flow's hash."""
        return f"{self.prefix}:{{{flow.flow}:{flow.generation}}}".encode()

    def bucket(self, flow: FlowRef, bucket: int) -> bytes:
        """A bucket's hash."""
        return f"{self.prefix}:{{{flow.flow}:{flow.generation}:{bucket}}}".encode()

    def states(self, stage: StageRef, bucket: int) -> bytes:
        """The hash of a stage's states in a bucket."""
        return self.bucket(stage.flow_ref, bucket) + b":" + stage.stage.encode()

    def dues(self, stage: StageRef, bucket: int) -> bytes:
        """The sorted set of a stage's states in a bucket by the time at which they are due."""
        return self.states(stage, bucket) + b":due"


def by_bucket(keys: Sequence[bytes], things: Sequence[T], buckets: int) -> dict[int, list[T]]:
    """Divide things by the buckets of their keys."""
    places = parts_of(keys, buckets)
    return {bucket: list(compress(things, map(bucket.__eq__, places))) for bucket in sorted(set(places))}
