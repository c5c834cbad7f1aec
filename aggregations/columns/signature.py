"""One signature for all records with the same route.

Lane and group of a message depend on the names, partitions and flags of its hops, not on offsets. A batch has
few different routes, so the pure code runs once for each.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from aggregations.columns.arrays import Ints, Mask
from envelope import EnvelopeError, Hop, Lineage, Node, Route
from envelope.dedup.lineage import NO_INDEX, Redriven
from envelope.dedup.retries import NO_RETRIES, Retries

HopKind: TypeAlias = tuple[str, int, str, bool, bool, bool, str, str, bool]
"""Kind of a hop: topic, partition, via, rekeyed, pass-through, whether it has an index, topic id, cluster, keyless."""
Way: TypeAlias = tuple[str, int, tuple[HopKind, ...]]
"""Own topic and partition, and the steps before."""

_MOST_CACHED: Final = 1 << 16


class Lane(NamedTuple):
    """Lane of one signature's messages at a stage.

    Attributes:
        lane: Name of the lane.
        group: Name of its group.
        wide: The route contains records without a key.
    """

    lane: str
    group: str
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Signature:
    """Properties of a route.

    Attributes:
        kept: Lane at a stage with the record's own key.
        rekeyed: Lane at a stage with another key.
        route: The route, before the ledger is consulted.
        pass_through: The record arrived by a retry or redrive route, or was healed upstream.
        missing: A fan-out index is missing.
        edges: Which hops count: those that are not pass-through.
        topic: Root topic.
        topic_id: Root topic's id; empty if unknown.
        partition: Root partition.
        cluster: Root topic's cluster; empty if there is only one.
        chained: The record has a chain: its root is another record.
        back: How it was redriven, without the offset at which it was rejected; None if it was not redriven.
        died: Number of the hop at which it was rejected.
    """

    kept: Lane
    rekeyed: Lane
    pass_through: bool
    missing: bool
    edges: tuple[int, ...]
    topic: str
    topic_id: str
    partition: int = 0
    cluster: str = ""
    chained: bool = False
    route: Route = Route.PLAIN
    back: Redriven | None = None
    died: int = 0

    @property
    def width(self) -> int:
        """Number of position components, without an event id."""
        return 1 + len(self.edges)

    @property
    def republished(self) -> bool:
        """Whether its records were republished; those that were only redriven were not."""
        return bool(self.edges)

    @property
    def components(self) -> int:
        """Number of position columns: after the position, a redriven record has the offset at which it was rejected."""
        return self.width + (self.back is not None)

    @property
    def exotic(self) -> bool:
        """Whether integers cannot fully express the standing of its messages."""
        return self.pass_through or self.missing

    def place(self, *, rekeyed: bool, keyless: bool = False) -> Lane:
        """Its lane; `keyless` means that the record itself has no key."""
        place = self.rekeyed if rekeyed else self.kept
        return place._replace(wide=True) if keyless and self.edges else place


class Signatures:
    """Signatures of routes, cached across batches.

    Args:
        topic_ids: Current topic id by topic, for roots without a topic id.
        cluster: Cluster of the source topic.
        retries: Retry topics whose hops are not marked.
        own_id: Returns the topic id of a record by its topic and partition; empty for that of `topic_ids`.
    """

    def __init__(
        self,
        topic_ids: Mapping[str, str],
        cluster: str = "",
        retries: Retries = NO_RETRIES,
        own_id: Callable[[str, int], str] = lambda _topic, _partition: "",
    ) -> None:
        self._topic_ids = topic_ids
        self._cluster = cluster
        self._retries = retries
        self._own_id = own_id
        self._known: dict[Way, Signature | None] = {}

    def of(self, route: Way) -> Signature | None:
        """Return the signature of a route; None for a loop."""
        if route not in self._known:
            if len(self._known) >= _MOST_CACHED:
                # Producers that keep writing new names must not fill the memory.
                self._known.clear()
            self._known[route] = self._make(route)
        return self._known[route]

    def _make(self, route: Way) -> Signature | None:
        topic, partition, steps = route
        hops = tuple(
            Hop(
                name,
                number,
                0,
                via,
                0 if indexed else None,
                None,
                rekeyed,
                pass_through,
                topic_id,
                cluster=cluster,
                keyless=keyless,
            )
            for name, number, via, rekeyed, pass_through, indexed, topic_id, cluster, keyless in steps
        )
        try:
            own = Node(topic, partition, 0, self._own_id(topic, partition), self._cluster)
            line = Lineage.of(self._retries.marked(hops, topic), own).check()
        except EnvelopeError:
            return None
        line = line.resolved(self._topic_ids)
        kept, rekeyed = line.standing(), line.standing(rekeyed=True)
        edges = tuple(i for i, edge in enumerate(line.edges) if not edge.pass_through)
        return Signature(
            kept=Lane(kept.lane, kept.group, kept.wide),
            rekeyed=Lane(rekeyed.lane, rekeyed.group, rekeyed.wide),
            pass_through=line.pass_through,
            missing=NO_INDEX in kept.position,
            edges=edges,
            topic=line.root.topic,
            topic_id=line.root.topic_id,
            partition=line.root.partition,
            cluster=line.root.cluster,
            chained=bool(steps),
            route=kept.route,
            back=line.redriven,
            died=line.died,
        )


def lanes_of(
    signatures: Sequence[Signature],
    codes: npt.NDArray[np.integer],
    rekeyed: Mask | bool,
    keyless: Mask | bool = False,
) -> tuple[Ints, list[Lane]]:
    """Number the lanes of a batch at a stage.

    Args:
        signatures: Signatures by code.
        codes: Code of every message's signature.
        rekeyed: Whether the stage's key differs from the record's, for each message or for all.
        keyless: Whether the record has no key, for each message or for all.

    Returns:
        Lane of every message, and the lanes by number; one lane may have several numbers.
    """
    places = [
        signature.place(rekeyed=changed, keyless=lacking)
        for signature in signatures
        for changed in (False, True)
        for lacking in (False, True)
    ]
    return codes.astype(np.int64) * 4 + np.multiply(rekeyed, 2) + keyless, places


def way_of(chain: Sequence[Hop], own: Node) -> Way:
    """Return the route of a record."""
    return (
        own.topic,
        own.partition,
        tuple(
            (
                hop.topic,
                hop.partition,
                hop.via,
                hop.rekeyed,
                hop.pass_through,
                hop.index is not None,
                hop.topic_id,
                hop.cluster,
                hop.keyless,
            )
            for hop in chain
        ),
    )
