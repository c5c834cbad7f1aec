"""Where a message came from: its lineage, and the lane and position that follow from it.

The lineage is the source chain and, as its last node, the record's own coordinates. An edge joins node i
and node i+1: it describes the output that a republisher made from node i.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple, TypeAlias
from urllib.parse import quote

from envelope.errors import EnvelopeError, Reason
from envelope.limits import root_number
from envelope.message import Hop
from envelope.redrive import HEALED, Redrive, read_via

Position: TypeAlias = tuple[int | str, ...]
"""Number of the root (`envelope.limits.root_number`), then the fan-out index of every edge; -1 where a republisher gave
none. An event id may follow if the policy uses it. Compared lexicographically."""


def position_order(position: Position) -> tuple[Position, str]:
    """Sort key of positions across lanes: the numbers, then the event id.

    Within a lane it gives the order of the positions themselves. Across lanes a chain of another length can have
    a number where this one has its event id, and Python cannot compare the two. A message without a position, such as
    a snapshot of a state, sorts first.
    """
    if position and isinstance(last := position[-1], str):
        return position[:-1], last
    return position, ""


DIED = "!"
"""Beginning of the names under which a ledger lists dead letters by their coordinates; see `died_in`."""
NO_INDEX = -1
"""Placeholder for the fan-out index that a foreign republisher did not write."""


class Siblings(StrEnum):
    """What to do with messages of one root that no fan-out index tells apart."""

    EVENT_ID = "event_id"
    """The event id tells them apart: exact if ids are unique and stable. A message without an event id: as DROP."""
    GROUP = "group"
    """Equal positions within one batch count as siblings and are folded, copies included; later ones are dropped."""
    DROP = "drop"
    """Of equal positions, all but the first are dropped."""


class Route(StrEnum):
    """How a message reached a stage, which decides what its absence from the histories means."""

    PLAIN = "plain"
    """Directly, as it was published. At or below the floor of its lane it counts as a copy."""
    RETRIED = "retried"
    """Through a retry topic. At or below the floor nothing proves whether it was folded."""
    MISSING = "missing"
    """Known not to be folded here before this batch: the flow lists its event as a dead letter, or a stage before
    this one folds it late. It is folded at any position, even below the floor, unless the state holds it."""
    HEALED = "healed"
    """As MISSING, but reported by a flow upstream, which may repeat it at any time."""
    DEAD_LETTER = "dead_letter"
    """Redriven. This flow rejected its record, but nothing proves that no copy of the event was folded before."""
    ASSERTED = "asserted"
    """Redriven. The operator asserts that this stage never folded it. It is folded at any position, unless the state
    holds it. Nothing is said about later stages."""
    COPY = "copy"
    """Redriven. This flow did not reject its record, or has folded it since: it is folded only into a hole."""


@dataclass(frozen=True, slots=True)
class Node:
    """Coordinates of one record.

    Attributes:
        topic: Topic.
        partition: Partition.
        offset: Offset.
        topic_id: Kafka's id of the topic; empty when unknown.
        cluster: Name of the Kafka cluster; empty when there is only one.
        leader_epoch: Leader epoch of the record, if a hop has it; not compared, since not every reader learns it.
    """

    topic: str
    partition: int
    offset: int
    topic_id: str = ""
    cluster: str = ""
    leader_epoch: int | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"{self.topic}:{self.partition}:{self.offset}"


@dataclass(frozen=True, slots=True)
class Edge:
    """The step from a node that a republisher read to its output.

    Attributes:
        via: Name of the republisher.
        index: Fan-out index of the output, from 0; None when the republisher gives none.
        rekeyed: The output's key differs from the input's.
        pass_through: A retry or redrive hop: this edge and the node after it are not counted.
        keyless: The output has no key, or the input was itself republished and had no key.
    """

    via: str = ""
    index: int | None = None
    rekeyed: bool = False
    pass_through: bool = False
    keyless: bool = False


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a message stands at one stage: everything about the message that the verdict depends on.

    Attributes:
        lane: Within a lane, first deliveries arrive in rising position. Human-readable, and stored with the state.
        group: Path, root partition and root topic id: lanes of one group share their positions.
        position: Position within the lane.
        route: How it reached the stage.
        ambiguous: A fan-out index is missing and no event id replaces it.
        wide: Its lane leads through records that were republished without a key: a copy may arrive on another lane of
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
        redrive: The facts in the name of its last hop.
        place: Topic-partition in which it was rejected, as `died_in` names it.
        offset: Offset at which it was rejected.
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
        """How it came back from the dead-letter topic; None when it was not redriven."""
        last = self.edges[-1] if self.edges else None
        return read_via(last.via) if last is not None and last.pass_through else None

    @property
    def healed(self) -> bool:
        """Whether its event was a dead letter upstream and was folded there late."""
        return any(edge.pass_through and edge.via == HEALED for edge in self.edges)

    @property
    def redriven(self) -> "Redriven | None":
        """How it came back from the dead-letter topic, and where it was rejected; None when it was not redriven."""
        if (redrive := self.redrive) is None:
            return None
        own = self.nodes[self.died]
        return Redriven(redrive, died_in(own), own.offset)

    @property
    def died(self) -> int:
        """Number of the node before the redrive hops at the end: the record that was rejected, if it was redriven."""
        last = len(self.edges)
        while last and self.edges[last - 1].pass_through and read_via(self.edges[last - 1].via) is not None:
            last -= 1
        return last

    def __str__(self) -> str:
        return " -> ".join(str(node) for node in self.nodes)

    def reduced(self) -> "Lineage":
        """Return the lineage without pass-through hops.

        A pass-through edge is removed together with the node after it: A -> retry -> B reads as A -> B with the
        index of the second edge, and B -> dead letters -> B reads as the first B.
        """
        if not self.pass_through:
            return self
        kept = [i for i, edge in enumerate(self.edges) if not edge.pass_through]
        return Lineage(
            nodes=(self.nodes[0], *(self.nodes[i + 1] for i in kept)), edges=tuple(self.edges[i] for i in kept)
        )

    def check(self) -> "Lineage":
        """Return the lineage if no topic occurs twice in it when pass-through hops are left out.

        Raises:
            EnvelopeError: `CHAIN_LOOP`.
        """
        nodes = self.reduced().nodes
        if len({(node.cluster, node.topic) for node in nodes}) != len(nodes):
            raise EnvelopeError(
                Reason.CHAIN_LOOP, f"the chain of {len(self.nodes)} records passes through one topic twice"
            )
        return self

    def resolved(self, topic_ids: Mapping[str, str]) -> "Lineage":
        """Return the lineage with the root's topic id filled in if the root has none.

        Args:
            topic_ids: Current id by topic, in the cluster that the message was read from; roots of other clusters are
                not changed.
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
            branch: Names of the flow's own branches that it went through.
            indices: Its index in each flat-map of the flow that it went through.
            event_id: Identity of the event, used when an index is missing; empty for none.
            late: Route that a stage before this one gives it after a late fold; `PLAIN` otherwise.
        """
        line = self.reduced()
        position: Position = (
            root_number(line.root.offset, line.root.leader_epoch),
            *(NO_INDEX if edge.index is None else edge.index for edge in line.edges),
            *indices,
        )
        missing = any(edge.index is None for edge in line.edges)
        if missing and event_id:
            position = (*position, event_id)
        lane, group = line._names(rekeyed=rekeyed, branch=branch)
        route = self._route() if late is Route.PLAIN else late
        # A root has one place whatever its key: only a republisher can send a message to two partitions.
        wide = bool(line.edges) and (keyless or any(edge.keyless for edge in line.edges))
        return Standing(lane, group, position, route, missing and not event_id, wide)

    def _route(self) -> Route:
        """How it reached the stage, as far as the lineage shows; a list of dead letters may refine `COPY`."""
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
    """The record that a hop read. Redrive hops name no cluster: a record is redriven in the cluster it was read from.

    Args:
        hop: The hop.
        behind: The nodes after it, the last one first.
    """
    cluster = hop.cluster
    if hop.pass_through and not cluster:
        cluster = next((node.cluster for node in reversed(behind) if node.topic == hop.topic), "")
    return Node(hop.topic, hop.partition, hop.offset, hop.topic_id, cluster, hop.leader_epoch)


def died_in(node: Node) -> str:
    """Name under which the dead letters of a topic-partition are listed. No group of lanes begins with `DIED`."""
    return f"{DIED}{_topic(node)}:{node.partition}#{node.topic_id}"


def event_of(position: Position, items: int) -> Position:
    """Position of the element from which the last `items` flat-maps of a flow made this one."""
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
