"""What must come out: a plain fold of every logical message once, and what must hold after every step."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from envelope import Reason
from jobs.simulation.topology import Payload, Spec, emitted, kept, split


class Violation(AssertionError):
    """Something that must hold does not."""


@dataclass(frozen=True, slots=True)
class Item:
    """What is folded at one stage because of one message."""

    id: str
    key: str
    x: int


@dataclass(frozen=True, slots=True)
class Logical:
    """One logical message at the flow's topic.

    Attributes:
        payload: Its payload.
        items: Per stage that it reaches, what is folded there.
        fails: Name of the stage that refuses it; it reaches none behind that one. Empty for none.
    """

    payload: Payload
    items: tuple[tuple[Item, ...], ...]
    fails: str


def logical(spec: Spec, payload: Payload) -> Logical:
    """Follow a message through the flow, in plain Python."""
    current = [payload] if not spec.filters or kept(payload) else []
    reached: list[tuple[Item, ...]] = []
    for stage in spec.stages:
        if stage.flat:
            current = [part for one in current for part in split(one)]
        if any(
            (stage.checks and one["bad"] == f"!{stage.name}") or (stage.seen and one["bad"] == stage.name)
            for one in current
        ):
            return Logical(payload, tuple(reached), stage.name)
        reached.append(tuple(Item(one["id"], one[stage.key], one["x"]) for one in current))
        if stage.emits:
            current = [part for one in current for part in emitted(one)]
    return Logical(payload, tuple(reached), "")


class Oracle:
    """Knows every logical message of a world.

    Args:
        spec: The world.

    Attributes:
        messages: Logical message by id.
        events: Root events, in order.
        owners: Id of the logical message by id of an item.
        outputs: Place of every item that the flow produced.
        letters: Ids met in the dead-letter topic, by stage.
        refused: Ids that republishers have to refuse, by dead-letter topic.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.messages: dict[str, Logical] = {}
        self.events: list[Payload] = []
        self.owners: dict[str, str] = {}
        self.letters: dict[str, set[str]] = {stage.name: set() for stage in spec.stages}
        self.outputs: dict[str, object] = {}
        self.refused: dict[str, set[str]] = {passage.dead: set() for passage in spec.passages}
        self._places: dict[object, str] = {}
        self._mended: set[str] = set()
        self._allowed: list[set[tuple[str, str]]] = [set() for _ in spec.stages]

    def rooted(self, topic: str, payload: Payload) -> None:
        """Note a root event and all that will come of it."""
        self.events.append(payload)
        for dead, name in self.spec.refused(topic, payload):
            self.refused[dead].add(name)
        for message in self.spec.messages(topic, payload):
            self._add(message)

    def cured(self, message: str) -> None:
        """Note that a message that was refused has been redriven, mended."""
        self._mended.add(message)
        self._add({**self.messages[message].payload, "bad": ""})

    def died(self, message: str, stage: str, reason: Reason) -> None:
        """Note a dead letter.

        Raises:
            Violation: The stage has no reason to refuse it.
        """
        if stage not in self.letters or (self.messages[message].fails != stage and message not in self._mended):
            raise Violation(f"{message} is a dead letter of stage {stage}: {reason}")
        self.letters[stage].add(message)

    def is_missing(self, message: str, stage: str, held: Mapping[int, set[str]]) -> bool:
        """Whether a message belongs to a stage and is not folded there."""
        number = [one.name for one in self.spec.stages].index(stage)
        items = self.messages[message].items
        return number < len(items) and any(item.id not in held[number] for item in items[number])

    def _add(self, payload: Payload) -> None:
        found = self.messages[payload["id"]] = logical(self.spec, payload)
        for allowed, items in zip(self._allowed, found.items, strict=False):
            for item in items:
                allowed.add((item.key, item.id))
                self.owners[item.id] = payload["id"]

    def published(self, item: str, identity: object) -> None:
        """Note what the flow produced: any number of times, but each time as the same message.

        Raises:
            Violation: One item stands in two places, or two items in one.
        """
        if self.outputs.setdefault(item, identity) != identity or self._places.setdefault(identity, item) != item:
            raise Violation(f"{item} is published at {identity}, and before at {self.outputs[item]}")

    def expected_outputs(self) -> set[str]:
        """Ids of what comes out of the last stage."""
        last = len(self.spec.stages) - 1
        return {
            item.id for message in self.messages.values() if len(message.items) > last for item in message.items[last]
        }

    def check_state(self, stage: int, key: str, seen: Mapping[str, int]) -> None:
        """Nothing twice, nothing under a key where it does not belong.

        Raises:
            Violation: Something is.
        """
        name = self.spec.stages[stage].name
        for one, times in seen.items():
            if times != 1:
                raise Violation(f"stage {name}, key {key}: {one} is folded {times} times")
            if (key, one) not in self._allowed[stage]:
                raise Violation(f"stage {name}, key {key}: {one} does not belong there")

    def check_held(self, message: str, stages: Iterable[int], held: Mapping[int, set[str]], why: str) -> None:
        """A message is folded, or a dead letter, at each of these stages that it reaches.

        Raises:
            Violation: It is at none of them.
        """
        found = self.messages[message]
        for stage in stages:
            name = self.spec.stages[stage].name
            if any(message in self.letters[one.name] for one in self.spec.stages[: stage + 1]):
                return  # it reaches no stage behind that one, unless it is redriven
            if stage >= len(found.items):
                if stage == len(found.items):
                    raise Violation(f"{why}: {message} is no dead letter of stage {name}, which refuses it")
                return
            if stage not in held:
                continue  # it only counts
            lost = [item.id for item in found.items[stage] if item.id not in held[stage]]
            if lost:
                raise Violation(f"{why}: {lost[0]} is not held by stage {name}")

    def states(self, stage: int) -> dict[str, object]:
        """The states of a stage, as a plain fold of every message makes them."""
        states: dict[str, dict[str, int]] = {}
        for message in self.messages.values():
            if stage >= len(message.items):
                continue
            for item in message.items[stage]:
                if self.spec.stages[stage].seen:
                    states.setdefault(item.key, {})[item.id] = 1
                else:
                    state = states.setdefault(item.key, {"n": 0, "s": 0})
                    state["n"] += 1
                    state["s"] += item.x
        return dict(states)
