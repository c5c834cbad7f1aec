"""Arrivals: elements at a stage or at the end of the flow, with their key, their standing and their ledger entries."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from aggregations.definition.element import Element
from aggregations.definition.expressions import key_bytes
from aggregations.definition.fields import Fields
from aggregations.definition.flow import END_OF_FLOW, Aggregate
from aggregations.definition.inputs import SiblingPolicy, siblings_of
from aggregations.definition.schemas import Schema
from aggregations.errors import FlowError
from aggregations.per_message.ledger import Entry, Ledger, Waiting, origin_of, outputs_before
from aggregations.per_message.publishing import Marking
from aggregations.per_message.rows import evaluate_elements
from aggregations.per_message.steps import Applied
from aggregations.per_message.times import InWindow, enter_expiring, enter_windows, latest
from envelope import EnvelopeError, Lineage, Node, Position, Reason, Route, Siblings, Standing, Verdict
from envelope.dedup.lineage import Redriven


@dataclass(frozen=True, slots=True)
class Arrival:
    """An element that arrives at a stage.

    Attributes:
        element: The element.
        key: Canonical bytes of the stage's key.
        standing: Where it stands at this stage.
        incarnation: `NEW_INCARNATION` or `STALE_INCARNATION` when its root topic was created again.
        values: Values of `Aggregate.inputs` for it, or the error; empty for a fold in plain Python.
        transit: It was redriven to a later stage and is held here: passed on, not folded.
        entries: Its ledger entries at this stage; in transit those at the stage that rejected it.
        redriven: How it came back from the dead-letter topic; None when it was not redriven.
        closed: It comes too late: its window is closed, or its state may have expired.
        mine: It was redriven, and this flow had rejected it.
        time_us: Its event time, in microseconds since 1970; None in a flow without event times.
        reached_us: The latest event time of its partition's log up to it.
        waits: In a stage whose `emit` reads the state: under which names the ledger may list something of it at a later
            stage. The state before it is kept under these names.
        sibling: In transit: its record was rejected, and this item of it was not.
        fixed: Number of its indices that it had when the previous stage passed it on.
    """

    element: Element[Any]
    key: bytes
    standing: Standing
    incarnation: Verdict | None = None
    values: Mapping[str, Any] | EnvelopeError = field(default_factory=dict)
    transit: bool = False
    entries: tuple[Entry, ...] = ()
    redriven: Redriven | None = None
    closed: bool = False
    mine: bool = False
    time_us: int | None = None
    reached_us: int | None = None
    waits: tuple[tuple[str, Position], ...] = ()
    sibling: bool = False
    fixed: int = 0

    @property
    def listed_as(self) -> tuple[Node, Standing, Redriven | None, tuple[int, ...]]:
        """What `Ledger.entries` needs of it."""
        return self.element.own, self.standing, self.redriven, self.element.indices


def arrive(
    stage: Aggregate,
    applied: Applied,
    *,
    ledger: Ledger,
    topic_ids: Mapping[str, str],
    incarnation: Callable[[str, str], Verdict | None],
    siblings: SiblingPolicy,
    later: Collection[str] = (),
    removed: int | None = None,
    longest_key: int | None = None,
    fixed: Callable[[Sequence[int]], int] = lambda _: 0,
) -> list[Arrival]:
    """Bring elements to a stage: key, standing and the inputs of its fields. Failures go to `applied.rejected`.

    Args:
        stage: The stage.
        applied: The elements.
        ledger: The flow's dead letters that left no hole.
        topic_ids: Current topic id by topic.
        incarnation: Verdict for a root topic's id.
        siblings: Policy for equal positions without index and id.
        later: Names of the stages after this one: a record redriven to one of them only passes through.
        removed: Due time up to which states of the stage have left the store, in seconds since 1970.
        longest_key: Bytes of the longest key that the store takes; None without a limit.
        fixed: Returns how many of the indices of an arrival it had when the previous stage passed it on.
    """
    raw = applied.each(stage.key)
    keys = applied.survivors([stage_key(value, longest_key) for value in raw])
    if stage.window is not None:
        places = enter_windows(applied, keys, stage.window, removed)
    elif stage.expiry is not None:
        places = enter_expiring(applied, keys, stage.expiry, removed)
    else:
        places = [InWindow(key, key, closed=False) for key in keys]
    inputs = _inputs_of(stage, applied.elements, applied.schema)
    waiting = ledger.waiting(frozenset(later)) if stage.emits_state else frozenset()
    arrivals = []
    for element, (user_key, key, closed), values in zip(applied.elements, places, inputs, strict=True):
        lineage = element.lineage.resolved(topic_ids)
        standing = standing_of(element, lineage, siblings, rekeyed=user_key != element.key or not stage.co_partitioned)
        root, redriven = lineage.root, lineage.redriven
        age = incarnation(root.topic, root.topic_id) if root.cluster == lineage.own.cluster else None
        entries = ledger.entries(stage.name, element.own, standing, redriven, element.indices)
        route = ledger.route(stage.name, standing, redriven, entries)
        transit, sibling = _only_passes(element, redriven, ledger, later), False
        if transit and redriven is not None:
            entries, sibling = in_transit(ledger, element.own, standing, redriven, element.indices)
        if route is not standing.route:
            standing = replace(standing, route=route)
        mine = redriven is not None and ledger.mine(redriven.redrive)
        reached_us = latest(element.before_us, element.time_us)
        arrivals.append(
            Arrival(
                *(element, key, standing, age, values, transit, entries, redriven, closed, mine),
                time_us=element.time_us,
                reached_us=reached_us,
                waits=waits_as(waiting, element, standing, redriven),
                sibling=sibling,
                fixed=fixed(element.indices) if element.indices else 0,
            )
        )
    return arrivals


def in_transit(
    ledger: Ledger, own: Node, standing: Standing, redriven: Redriven, indices: tuple[int, ...]
) -> tuple[tuple[Entry, ...], bool]:
    """What an element in transit stands for: its entries at the stage that rejected it, and whether it is a sibling."""
    entries = ledger.stands_for(own, standing, redriven, indices)
    return entries or (), entries == ()


def waits_as(
    waiting: Waiting, element: Element[Any], standing: Standing, redriven: Redriven | None
) -> tuple[tuple[str, Position], ...]:
    """The names under which later stages may list something of an element; see `Arrival.waits`.

    Args:
        waiting: What is listed at the later stages.
        element: The element.
        standing: Where it stands.
        redriven: How it came back from the dead-letter topic.
    """
    names = names_of(element, standing, redriven) if waiting else ()
    return tuple((name, position) for name, position in names if (name, position[0]) in waiting)


def names_of(
    element: Element[Any], standing: Standing, redriven: Redriven | None
) -> tuple[tuple[str, Position], tuple[str, Position]]:
    """The names under which the ledger may list an element: as an event, and by the coordinates of its record."""
    place, offset = origin_of(element.own, redriven)
    return (standing.group, standing.position), (place, (offset, *element.indices))


def marking_before(
    stage: str,
    *,
    ledger: Ledger,
    topic_ids: Mapping[str, str],
    siblings: SiblingPolicy,
    later: Collection[str] = (),
    largest: Mapping[str, int],
) -> Marking:
    """Decides what publish steps before a stage publish, and marks outputs that are missing downstream.

    A record, or an item of it, that is rejected before a stage publishes nothing before it, and the ledger lists that
    its outputs are missing (`outputs_before`). Anything else of a redriven record was published before, as was a dead
    letter of another reader.

    Args:
        stage: Name of the stage; `end` for the steps after the last stage.
        ledger: The flow's ledger.
        topic_ids: Current topic id by topic.
        siblings: Policy for equal positions without index and id.
        later: Names of the stages after this one: what is redriven to one of them was published before.
        largest: See `Marking.largest`.
    """
    missing = outputs_before(stage)
    listed = missing in ledger.listed

    def marked(element: Element[Any]) -> Element[Any] | None:
        if not (listed or (element.chain and element.chain[-1].pass_through)):
            return element
        lineage = element.lineage.resolved(topic_ids)
        redriven = lineage.redriven
        if _only_passes(element, redriven, ledger, later):
            return None
        standing = standing_of(element, lineage, siblings)
        entries = ledger.entries(missing, element.own, standing, redriven, element.indices)
        route = ledger.route(missing, standing, redriven, entries)
        if route is Route.COPY:
            return None
        if route is Route.PLAIN:
            return replace(element, route=Route.RETRIED) if entries else element
        return replace(element, route=passed_on(route, redriven))

    return Marking(marked, not listed, largest)


def _only_passes(element: Element[Any], redriven: Redriven | None, ledger: Ledger, later: Collection[str]) -> bool:
    """Whether an element is redriven to a later stage, and passes this one."""
    return (
        redriven is not None
        and redriven.redrive.stage in later
        and ledger.mine(redriven.redrive)
        and element.route is Route.PLAIN
    )


def standing_of(element: Element[Any], lineage: Lineage, siblings: SiblingPolicy, *, rekeyed: bool = False) -> Standing:
    """Where an element stands, without the ledger; its `lineage` contains the root's topic id."""
    return lineage.standing(
        rekeyed=rekeyed,
        keyless=element.key is None,
        branch=element.branch,
        indices=element.indices,
        event_id=element.event_id if siblings_of(siblings, element.topic) is Siblings.EVENT_ID else "",
        late=element.route,
    )


def missing_after(
    applied: Applied, *, ledger: Ledger, topic_ids: Mapping[str, str], siblings: SiblingPolicy, judged: bool = True
) -> tuple[set[Entry], int]:
    """Keep the elements for the steps after the last stage: redriven ones only if something of them is missing there.

    What is listed and arrives without having been redriven is missing there too: the record was read again after a
    crash, or, where no stage has judged it, it is a copy.

    Args:
        applied: The elements; it is changed.
        ledger: The flow's ledger.
        topic_ids: Current topic id by topic.
        siblings: Policy for equal positions without index and id.
        judged: A stage has passed the elements on; False for a flow without a stage.

    Returns:
        Entries of the ledger that are no longer missing, and the number of copies.
    """
    kept: list[Element[Any]] = []
    filled: set[Entry] = set()
    for element in applied.elements:
        lineage = element.lineage.resolved(topic_ids)
        redriven = lineage.redriven
        returns = redriven is not None and (not judged or redriven.redrive.stage == END_OF_FLOW)
        if element.route is Route.PLAIN and (returns or (redriven is None and END_OF_FLOW in ledger.listed)):
            standing = standing_of(element, lineage, siblings)
            route, entries = missing_at_end(ledger, element.own, standing, redriven, element.indices)
            if route is Route.COPY:
                continue
            filled.update(entries)
            kept.append(element if route is Route.PLAIN else replace(element, route=route))
        else:
            kept.append(element)
    copies = len(applied.elements) - len(kept)
    applied.elements = kept
    return filled, copies


def missing_at_end(
    ledger: Ledger, own: Node, standing: Standing, redriven: Redriven | None, indices: tuple[int, ...]
) -> tuple[Route, tuple[Entry, ...]]:
    """What the ledger lists under `end` of an element that returns, and of the items that later steps make from it.

    Args:
        ledger: The flow's ledger.
        own: Coordinates of its record.
        standing: Where the element stands.
        redriven: How it came back from the dead-letter topic; None if it did not.
        indices: Its index in each flat-map.

    Returns:
        `COPY` for a redriven element of which nothing is missing; for one that was not redriven and is listed as a
        whole, `MISSING` if its event is listed and `RETRIED` if its record is; else `PLAIN`. And the entries.
    """
    entries = ledger.entries(END_OF_FLOW, own, standing, redriven, indices, whole=True)
    if redriven is not None:
        copy = ledger.route(END_OF_FLOW, standing, redriven, entries) is Route.COPY
        return (Route.COPY if copy else Route.PLAIN), (() if copy else entries)
    if any(one.group == standing.group and len(one.position) <= len(standing.position) for one in entries):
        return Route.MISSING, entries
    retried = any(one.group != standing.group and len(one.position) <= 1 + len(indices) for one in entries)
    return (Route.RETRIED if retried else Route.PLAIN), entries


def stage_key(value: Any, longest: int | None = None) -> bytes | EnvelopeError:
    """The canonical bytes of a stage's key, or the error if the value cannot be a key of at most `longest` bytes."""
    try:
        key = key_bytes(value)
    except FlowError as error:
        return EnvelopeError(Reason.BAD_PAYLOAD, str(error))
    if key is None:
        return EnvelopeError(Reason.NULL_KEY, "the stage's key is null")
    return key if longest is None or len(key) <= longest else EnvelopeError(*too_long(longest))


def too_long(longest: int) -> tuple[Reason, str]:
    """Why an element is rejected whose key has more bytes than the store of its stage takes."""
    return Reason.KEY_TOO_LONG, f"the stage's key has more than {longest} bytes, the limit of its store"


def passed_on(route: Route, redriven: Redriven | None) -> Route:
    """Route on which a late-folded element is passed on to the following stages.

    They have not received an element whose event the flow lists, or that was healed upstream. A crashed attempt may
    have passed any other element on to them, also one of which an operator asserts that this stage never folded it.

    Args:
        route: Route on which it arrived.
        redriven: How it came back from the dead-letter topic.
    """
    healed = route is Route.HEALED and redriven is None
    return Route.MISSING if route is Route.MISSING or healed else Route.RETRIED


def _inputs_of(stage: Aggregate, elements: Sequence[Element[Any]], schema: Schema) -> list[Any]:
    """Values of `Aggregate.inputs` for each element: a mapping, or an `EnvelopeError` if it raised.

    Empty mappings for a fold in plain Python.
    """
    if not isinstance(stage.fold, Fields):
        return [{} for _ in elements]
    return evaluate_elements(elements, stage.inputs(), schema)
