"""The envelope, its source chain, and duplicate detection. Pure code: no I/O, no clock.

Serialization: `encode`, `decode`, `append_hop`. Position of a message: `Lineage`, `Standing`.
Duplicate detection: `Histories`, `Verdict`.
"""

from envelope.codec import append_hop, decode, encode, encode_hop
from envelope.dedup.eviction import GrowthFullError
from envelope.dedup.histories import Decision, Histories, HolesFullError, in_order
from envelope.dedup.history import History
from envelope.dedup.lanes import group_of
from envelope.dedup.lineage import Edge, Lineage, Node, Position, Route, Siblings, Standing, position_order
from envelope.dedup.verdict import Verdict
from envelope.errors import EnvelopeError, Reason
from envelope.limits import DEFAULT_LIMITS, Limits
from envelope.message import FORMAT, Envelope, Hop, Tombstones
from envelope.partition import TopicPartition

__all__ = [
    "DEFAULT_LIMITS",
    "FORMAT",
    "Decision",
    "Edge",
    "Envelope",
    "EnvelopeError",
    "GrowthFullError",
    "HolesFullError",
    "Hop",
    "Limits",
    "Lineage",
    "Node",
    "Position",
    "Reason",
    "Route",
    "Siblings",
    "Standing",
    "Tombstones",
    "TopicPartition",
    "Verdict",
    "History",
    "Histories",
    "append_hop",
    "decode",
    "encode",
    "encode_hop",
    "group_of",
    "in_order",
    "position_order",
]
