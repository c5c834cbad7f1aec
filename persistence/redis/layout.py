"""Names of the keys in Redis.

With the default prefix, for flow `fleet`, generation 1, stage `aircraft`, the state of key `N14228`:

| key | type | content |
|---|---|---|
| `hw:{fleet:1}` | hash | `epoch`, `buckets`, `manifest` (JSON), `manifest_head` (its epoch and batch) |
| `hw:{fleet:1:5}` | hash | `epoch`, `buckets` of bucket 5, and by stage `mark:aircraft` and `downstream:aircraft` (JSON) |
| `hw:{fleet:1:5}:aircraft` | hash | the head of each state by key: `N14228` is `7 3 12`, version, epoch and batch |
| `hw:{fleet:1:5}:aircraft:N14228` | string | the state record, JSON |

A key's bucket is its CRC-32 (as in zlib) modulo the number of buckets. The part in braces determines the
cluster slot, so a bucket is on one node and one script can replace many of its states. A bucket's own hash is
the fence, which the script that writes checks. Read a state with
`redis-cli GET 'hw:{fleet:1:5}:aircraft:N14228'`; never write one.

A state is not a hash of its own. A script pays for every command twice, to run it and to write it to the
append-only file, and one command can write many strings, or many fields of one hash. So a conditional write
costs 2 times an MSET; with a hash for each state it would cost 3 to 4 times. The heads also distinguish a state
that was evicted, expired or deleted from a state that never existed.
"""

from dataclasses import dataclass
from zlib import crc32

from persistence.names import FlowRef, StageRef


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

    def heads(self, stage: StageRef, bucket: int) -> bytes:
        """The hash of heads. A state's name is this, a colon, and its key."""
        return self.bucket(stage.flow_ref, bucket) + b":" + stage.stage.encode()


def bucket_of(key: bytes, buckets: int) -> int:
    """The bucket of a state's key."""
    return crc32(key) % buckets
