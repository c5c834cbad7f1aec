"""Where a message came from: its lineage, and what of it says where the message stands.

The lineage is the source chain and, as its last node, the record's own coordinates. Node i and
node i+1 are joined by an edge: what the republisher that read node i made of it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple, TypeAlias
from urllib.parse import quote

from envelope.errors import EnvelopeError, Reason
from envelope.message import Hop
from envelope.redrive import HEALED, Redrive, read_via

Position: TypeAlias = tuple[int | str, ...]
"""Root offset, then the fan-out index of every edge; -1 where a republisher gave none. An event id may
follow where the policy asks for it. Compared lexicographically."""


def position_order(position: Position) -> tuple[Position, str]:
    """Sort key of positions of any lanes: the numbers, then the event id.

    Within a lane it orders as the positions themselves do. Across lanes a chain of another length can have
    a number where this one has its event id, and the two cannot be compared. What has no position, as a snapshot of a
    state, comes first.
    """
    if position and isinstance(last := position[-1], str):
        return position[:-1], last
    return position, ""


NO_INDEX = -1
"""Stands for the index that a foreign republisher did not write."""


class Siblings(StrEnum):
    """What to do with messages of one root that no fan-out index tells apart."""

    EVENT_ID = "event_id"
    """The event id tells them apart: exact, needs ids that are unique and stable. Without one: as DROP."""
    GROUP = "group"
    """Equal positions within one batch are siblings and folded; in a later batch they are dropped."""
    DROP = "drop"
    """The second of equal positions is dropped."""


class Route(StrEnum):
    """How a message came to a stage: what its absence from the histories means."""

    PLAIN = "plain"
    """As it was published. At or below the floor of its lane it counts as a copy."""
    RETRIED = "retried"
    """Through a retry topic. At or below the floor nothing proves whether it was folded."""
    MISSING = "missing"
    """Known not to be folded here before this batch: the flow lists its event as a dead letter, or a stage in front of
    this one folds it late. It is folded however far the histories are, unless the state holds it."""
    HEALED = "healed"
    """The same, on the word of a flow upstream, which may repeat it at any time."""
    LETTER = "letter"
    """Redriven. This flow gave its record up, but nothing proves that no copy of the event was folded before."""
    COPY = "copy"
    """Redriven. This flow did not give its record up, or has folded it since: only a hole takes it."""


@dataclass(frozen=True, slots=True)
class Node:
    """Coordinates of one record.

    Attributes:
        topic: Topic.
        partition: Partition.
        offset: Offset.
        topic_id: Kafka's id of the topic; empty when unknown.
        cluster: Name of the Kafka cluster; empty when there is only one.
    """

    topic: str
    partition: int
    offset: int
    topic_id: str = ""
    cluster: str = ""

    def __str__(self) -> str:
        return f"{self.topic}:{self.partition}:{self.offset}"


@dataclass(frozen=True, slots=True)
class Edge:
    """What a republisher made of the node it read.

    Attributes:
        via: Its name.
        index: Which output of that input, from 0; None when it does not say.
        rekeyed: The output's key differs from the input's.
        pass_through: A retry or redrive hop: this edge and the node behind it are not counted.
        keyless: The output has no key, or the input, itself republished, had none.
    """

    via: str = ""
    index: int | None = None
    rekeyed: bool = False
    pass_through: bool = False
    keyless: bool = False


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a message stands at one stage: all that the verdict depends on.

    Attributes:
        lane: Within it, first deliveries arrive in rising position. Readable, and stored with the state.
        group: Path, root partition and root topic id: lanes of one group share their positions.
        position: Position within the lane.
        route: How it came.
        ambiguous: A fan-out index is missing and no event id stands in for it.
        wide: Its lane leads through records that were republished without a key: a copy may come by another lane of
            the group, so the lane remembers more positions.
    """

    lane: str
    group: str
    position: Position
    route: Route = Route.PLAIN
    ambiguous: bool = False
    wide: bool = False


class Redriven(NamedTuple):
    """A record that came back from the dead-letter topic.

    Attributes:
        redrive: What it says of itself.
        place: Topic-partition in which it died, as `died_in` names it.
        offset: Offset at which it died.
    """

    redrive: Redrive
    place: str
    offset: int


@dataclass(frozen=True, slots=True)
class Lineage:
    """Nodes and the edges between them: `len(nodes) == len(edges) + 1`.

    Build one with `Lineage.of`.
    """

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...] = ()

    @classmethod
    def of(cls, chain: Iterable[Hop], own: Node) -> "Lineage":
        """Return the lineage of a record with this source chain and these own coordinates."""
        hops = tuple(chain)
        nodes = [own]
        for hop in reversed(hops):
            nodes.append(_node(hop, nodes))
        return cls(
            nodes=tuple(reversed(nodes)),
            edges=tuple(Edge(hop.via, hop.index, hop.rekeyed, hop.pass_through, hop.keyless) for hop in hops),
        )

    @property
    def root(self) -> Node:
        """The record that caused the event."""
        return self.nodes[0]

    @property
    def own(self) -> Node:
        """The record's own coordinates."""
        return self.nodes[-1]

    @property
    def pass_through(self) -> bool:
        """Whether it came by a retry or redrive route."""
        return any(edge.pass_through for edge in self.edges)

    @property
    def redrive(self) -> Redrive | None:
        """How it comes back from the dead-letter topic; None when it does not."""
        last = self.edges[-1] if self.edges else None
        return read_via(last.via) if last is not None and last.pass_through else None

    @property
    def healed(self) -> bool:
        """Whether its event was a dead letter upstream and was folded there late."""
        return any(edge.pass_through and edge.via == HEALED for edge in self.edges)

    @property
    def redriven(self) -> "Redriven | None":
        """How it came back from the dead-letter topic, and where it died; None when it did not."""
        if (redrive := self.redrive) is None:
            return None
        own = self.reduced().own
        return Redriven(redrive, died_in(own), own.offset)

    def __str__(self) -> str:
        return " -> ".join(str(node) for node in self.nodes)

    def reduced(self) -> "Lineage":
        """Return the lineage without pass-through hops.

        A pass-through edge takes the node behind it along: A -> retry -> B reads as A -> B with the
        index of the second edge, and B -> dead letters -> B as the first B.
        """
        if not self.pass_through:
            return self
        kept = [i for i, edge in enumerate(self.edges) if not edge.pass_through]
        return Lineage(
            nodes=(self.nodes[0], *(self.nodes[i + 1] for i in kept)), edges=tuple(self.edges[i] for i in kept)
        )

    def check(self) -> "Lineage":
        """Return the lineage if no topic comes twice in it once pass-through hops are left out.

        Raises:
            EnvelopeError: `CHAIN_LOOP`.
        """
        nodes = self.reduced().nodes
        if len({(node.cluster, node.topic) for node in nodes}) != len(nodes):
            raise EnvelopeError(Reason.CHAIN_LOOP, f"the chain of {len(self.nodes)} records passes one topic twice")
        return self

    def resolved(self, topic_ids: Mapping[str, str]) -> "Lineage":
        """Return the lineage with the root's topic id filled in where the root has none.

        Args:
            topic_ids: Current id by topic, of the cluster that the message was read from; roots of others stay open.
        """
        root = self.root
        if root.topic_id or root.cluster != self.own.cluster or not (topic_id := topic_ids.get(root.topic)):
            return self
        return replace(self, nodes=(replace(root, topic_id=topic_id), *self.nodes[1:]))

    def standing(
        self,
        *,
        rekeyed: bool = False,
        keyless: bool = False,
        branch: tuple[str, ...] = (),
        indices: tuple[int, ...] = (),
        event_id: str = "",
        late: Route = Route.PLAIN,
    ) -> Standing:
        """Return where the message stands at a stage.

        Args:
            rekeyed: The stage's key differs from the record's key.
            keyless: The record has no key.
            branch: Names of the flow's own branches it went through.
            indices: Index in each flat-map of the flow it went through.
            event_id: Identity of the event, to be used when an index is missing; empty for none.
            late: How a stage in front of this one passes it on, if it folded it late.
        """
        line = self.reduced()
        position: Position = (
            line.root.offset,
            *(NO_INDEX if edge.index is None else edge.index for edge in line.edges),
            *indices,
        )
        missing = any(edge.index is None for edge in line.edges)
        if missing and event_id:
            position = (*position, event_id)
        lane, group = line._names(rekeyed=rekeyed, branch=branch)
        route = self._route() if late is Route.PLAIN else late
        # A root has one place whatever its key: only what a republisher sent may have been sent to two.
        wide = bool(line.edges) and (keyless or any(edge.keyless for edge in line.edges))
        return Standing(lane, group, position, route, missing and not event_id, wide)

    def _route(self) -> Route:
        """How it came; who keeps a list of dead letters may know better of a copy."""
        if self.redrive is not None:
            return Route.COPY
        if self.healed:
            return Route.HEALED
        return Route.RETRIED if self.pass_through else Route.PLAIN

    def _names(self, *, rekeyed: bool, branch: tuple[str, ...]) -> tuple[str, str]:
        """Lane and group of a reduced lineage."""
        changed = [i for i, edge in enumerate(self.edges) if edge.rekeyed]
        last = len(self.edges) if rekeyed else changed[-1] if changed else 0
        root = self.root
        lane = group = f"{_topic(root)}:{root.partition}#{_quoted(root.topic_id, '/+=')}"
        for i, (edge, node) in enumerate(zip(self.edges, self.nodes[1:], strict=True), start=1):
            step = f">{_quoted(edge.via)}>{_topic(node)}"
            lane += f"{step}:{node.partition}" if i <= last else step
            group += step
        tail = "".join(f">{_quoted(name)}" for name in branch)
        return lane + tail, group + tail


def _node(hop: Hop, behind: Sequence[Node]) -> Node:
    """The record that a hop read. Who redrives knows no clusters: a record comes back in the cluster in which it died.

    Args:
        hop: The hop.
        behind: The nodes behind it, the last one first.
    """
    cluster = hop.cluster
    if hop.pass_through and not cluster:
        cluster = next((node.cluster for node in reversed(behind) if node.topic == hop.topic), "")
    return Node(hop.topic, hop.partition, hop.offset, hop.topic_id, cluster)


def died_in(node: Node) -> str:
    """Name under which the dead letters of a topic-partition are listed. No group of lanes begins with "!"."""
    return f"!{_topic(node)}:{node.partition}#{node.topic_id}"


def event_of(position: Position, items: int) -> Position:
    """Position of the element that the last `items` flat-maps of a flow made this one of."""
    if not items:
        return position
    if isinstance(position[-1], str):  # an event id stays at the end
        return (*position[: -1 - items], position[-1])
    return position[:-items]


def _topic(node: Node) -> str:
    return f"{_quoted(node.cluster)}/{node.topic}" if node.cluster else node.topic


@lru_cache(maxsize=1 << 12)  # the names of a few topics and republishers, once for every message
def _quoted(name: str, safe: str = "/") -> str:
    return quote(name, safe=safe)
