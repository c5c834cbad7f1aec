"""The envelope, its source chain, and duplicate detection. Pure code: no I/O, no clock.

Serialization: `encode`, `decode`, `append_hop`. Position of a message: `Lineage`, `Standing`.
Duplicate detection: `Histories`, `Verdict`.
"""

from envelope.codec import append_hop, decode, encode
from envelope.dedup.histories import Decision, Histories
from envelope.dedup.history import History
from envelope.dedup.lineage import Lineage, Node, Position, Route, Siblings, Standing
from envelope.dedup.verdict import Verdict
from envelope.errors import EnvelopeError, Reason
from envelope.hops import HopWriter
from envelope.limits import Limits
from envelope.message import Envelope, Hop, Tombstones
from envelope.partition import TopicPartition
from envelope.sequences import SequenceError, SequenceRange, SequenceState

__all__ = [
    "Decision",
    "Envelope",
    "EnvelopeError",
    "Histories",
    "History",
    "Hop",
    "HopWriter",
    "Limits",
    "Lineage",
    "Node",
    "Position",
    "Reason",
    "Route",
    "SequenceError",
    "SequenceRange",
    "SequenceState",
    "Siblings",
    "Standing",
    "Tombstones",
    "TopicPartition",
    "Verdict",
    "append_hop",
    "decode",
    "encode",
]
