"""Branches beside a flow's main line, and reusable pieces of a flow."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from aggregations.definition.arguments import check_callable, check_name, check_type, topic_name
from aggregations.definition.expressions import check_argument, name_of
from aggregations.definition.operators import Branch, Divert, FlatMap, Predicate, Publish, PublishStates, flattened
from aggregations.errors import FlowError

if TYPE_CHECKING:
    from aggregations.definition.flow import Flow

T = TypeVar("T")
U = TypeVar("U")


class Branching(Generic[T]):
    """The methods of `Flow` that take a function from flow to flow."""

    @property
    def _flow(self) -> "Flow[T]":
        return cast("Flow[T]", self)

    def also_to(self, name: str, steps: Callable[["Flow[T]"], "Flow[Any]"]) -> "Flow[T]":
        """Pass every element to a branch as well; it continues on the main line unchanged.

        Args:
            name: Name of the branch: part of the lineage of what it publishes (`via`).
            steps: Adds the steps of the branch, which end in `publish`. They cannot aggregate or divert. If one fails
                for an element, its record is rejected as a whole, on the main line, too.
        """
        branch = _branch(self._flow, name, None, steps)
        if any(isinstance(step, Divert) for step in flattened(branch.steps)):
            raise FlowError(
                f"branch {name!r} cannot divert, because its elements also continue on the main line: divert them there, "
                "or use branch()"
            )
        return self._flow._with(f"also_to({name!r})", branch)

    def branch(self, name: str, when: Predicate, steps: Callable[["Flow[T]"], "Flow[Any]"]) -> "Flow[T]":
        """Let the elements for which `when` is true leave the main line and take the steps of a branch instead.

        Args:
            name: Name of the branch: part of the lineage of what it publishes (`via`).
            when: Which elements take the branch; null counts as false.
            steps: Adds the steps of the branch, which end in `publish` or `divert`. They cannot aggregate. If one fails
                for an element, its record is rejected as a whole, on the main line, too.
        """
        check_argument(f"branch {name!r}, when=", when)
        return self._flow._with(f"branch({name!r})", _branch(self._flow, name, when, steps))

    def via(self, piece: Callable[["Flow[T]"], "Flow[U]"]) -> "Flow[U]":
        """Add a reusable piece of a flow: a function that adds steps. `describe` shows its name before its steps."""
        check_callable("via()", piece)
        name = name_of(piece)
        made = _extended(f"via({name})", self._flow, piece(self._flow))
        return replace(made, pieces=(*made.pieces, (name, len(self._flow.steps), len(made.steps))))


def check_topics(topic: object, topics: object) -> None:
    """Check what `publish` produces to.

    Raises:
        FlowError: A topic has a name that Kafka does not allow, or there are two of one name, or none to choose from.
    """
    if not topics and not callable(topic):
        topic_name(topic)
        return
    check_type("topics=", topics, list | tuple, "a list of topics")  # type: ignore[arg-type]
    assert isinstance(topics, Sequence)
    if not topics:
        raise FlowError("a function that chooses a topic needs topics=, the topics to choose from")
    check_argument("topic", topic)
    for one in topics:
        topic_name(one)
    if len({*topics}) < len(topics):
        raise FlowError("topics= names a topic twice")


def _branch(
    flow: "Flow[Any]", name: str, when: Predicate | None, steps: Callable[["Flow[Any]"], "Flow[Any]"]
) -> Branch:
    check_name("branch", name)
    if name in {*flow.branches, *(one.name for one in flattened(flow.steps) if isinstance(one, Branch))}:
        raise FlowError(f"flow {flow.name!r} already has a branch {name!r}; choose another name")
    check_callable(f"branch {name!r}, steps=", steps)
    before = replace(flow, branches=(*flow.branches, name))
    made = _extended(f"branch {name!r}", before, steps(before))
    begin, own = len(flow.steps), made.steps[len(flow.steps) :]
    if any(isinstance(step, PublishStates) for step in own):
        raise FlowError(f"branch {name!r} cannot publish states: call publish_states() before the branch")
    if not any(isinstance(step, Publish | Divert) for step in flattened(own)):
        raise FlowError(f"branch {name!r} has no output: end it with publish(){' or divert()' * (when is not None)}")
    if _diverts_items(own):
        raise FlowError(f"branch {name!r} diverts after a flat_map() of its own: divert before it")
    pieces = tuple((piece, first - begin, last - begin) for piece, first, last in made.pieces[len(flow.pieces) :])
    return Branch(name, own, when, pieces)  # type: ignore[arg-type]


def _extended(where: str, before: "Flow[Any]", made: object) -> "Flow[Any]":
    """The flow that a function returned, if it is the one that the function was given, with further steps."""
    size = len(before.steps)
    if (
        isinstance(made, type(before))
        and replace(made, steps=before.steps, pieces=before.pieces) == before
        and len(made.steps) >= size
        and all(map(_same, made.steps[:size], before.steps))
    ):
        return made
    raise FlowError(f"{where}: the function must return the flow that it gets, with further steps")


def _same(one: object, other: object) -> bool:
    return one is other


def _diverts_items(steps: Iterable[object], *, made: bool = False) -> bool:
    """Whether a diversion comes after a flat-map, in these steps or their branches."""
    for step in steps:
        if (isinstance(step, Divert) and made) or (isinstance(step, Branch) and _diverts_items(step.steps, made=made)):
            return True
        made = made or isinstance(step, FlatMap)
    return False
