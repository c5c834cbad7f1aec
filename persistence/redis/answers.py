"""What the answers of scripts and the contents of fields mean: states, or errors."""

from collections.abc import Sequence
from typing import Any, NoReturn

from persistence.cas import unknown_epoch
from persistence.errors import Corrupt, Fenced, Terminal
from persistence.marks import Mark, Marks, behind
from persistence.names import FlowRef, StageRef
from persistence.protocol import Stored, Write


def check_bucket(stage: StageRef, bucket: int, answer: Sequence[Any], known: Marks) -> None:
    """Raise if a script found that a bucket lost something."""
    if answer[0] == b"LOST":
        raise lost(stage, bucket, *answer[1:])
    if answer[0] == b"BEHIND":
        raise behind(stage, str(bucket), known[str(bucket)].short, Mark.parse(answer[1].decode()).short)


def refused(stage: StageRef, writes: Sequence[Write], answer: Sequence[Any], epoch: int) -> list[bytes]:
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
    return refused_epoch(stage, kind, epoch, int(rest[0]))


def refused_epoch(ref: FlowRef | StageRef, kind: bytes, epoch: int, installed: int) -> NoReturn:
    """Raise the error of a script that found another epoch installed."""
    raise Fenced.by(ref, epoch, installed) if kind == b"FENCED" else unknown_epoch(ref, epoch, installed)


def stored(stage: StageRef, key: bytes, content: bytes) -> Stored:
    """The state in the content of a field.

    Raises:
        Corrupt: It is not what was written.
    """
    try:
        version, epoch, batch, value = content.split(b" ", 3)
        return Stored(int(version), int(epoch), int(batch), value)
    except ValueError:
        raise Corrupt("the state's head is missing or cannot be read", ref=stage, key=key) from None


def lost(stage: StageRef, bucket: int, expected: int, found: int) -> Corrupt:
    """The error for a bucket with another number of states than the last save left."""
    return Corrupt(
        f"bucket {bucket} has {found} states; the last save left {expected}: states were evicted, expired or deleted, "
        "or another program has written some",
        ref=stage,
    )


def other_buckets(flow: FlowRef, buckets: int) -> Terminal:
    """The error for a flow that has another number of buckets than the URL says."""
    return Terminal(f"the flow has {buckets} buckets in this store", "Remove the option buckets", ref=flow)
