"""The expected results: a plain fold of every logical message once, and the invariants after every step."""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from envelope import Reason
from tests.simulation.functions import Payload, emitted, kept, split
from tests.simulation.sessions import divided, whole
from tests.simulation.topology import Processor, Spec


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass(frozen=True, slots=True)
class Item:
    """An item that one stage folds because of one message."""

    id: str
    key: str
    x: int


@dataclass(frozen=True, slots=True)
class Logical:
    """One logical message at the flow's topic.

    Attributes:
        payload: Its payload.
        items: The items folded, per stage that it reaches.
        fails: Name of the stage that rejects it; it reaches no stage after that one. Empty for none.
        diverts: Name of the stage before which some of its items are diverted. Empty for none.
    """

    payload: Payload
    items: tuple[tuple[Item, ...], ...]
    fails: str
    diverts: str = ""


def logical(spec: Spec, payload: Payload, *, over: bool = False) -> Logical:
    """Follow a message through the flow, in plain Python.

    Args:
        spec: The world.
        payload: Payload of the message.
        over: Steps and folds no longer reject anything.
    """
    current = [payload] if not spec.filters or kept(payload) else []
    reached: list[tuple[Item, ...]] = []
    diverts = ""
    for stage in spec.stages:
        if not over and stage.fails == "flat_map" and stage.flat and _any(current, stage.bad_in_front):
            return Logical(payload, tuple(reached), stage.name, diverts)
        if stage.flat:
            current = [part for one in current for part in split(one)]
        if stage.fails == "divert" and _any(current, stage.bad_in_front):
            diverts = stage.name
            current = [one for one in current if one["bad"] != stage.bad_in_front]
        refused = stage.fails in ("map", "filter", "key") and _any(current, stage.bad_in_front)
        refused |= stage.seen and _any(current, stage.name)
        refused |= stage.emits and stage.emit_fails and _any(current, stage.bad_in_emit)
        if refused and not over:
            return Logical(payload, tuple(reached), stage.name, diverts)
        reached.append(tuple(Item(one["id"], one[stage.key], one["x"]) for one in current))
        if stage.emits:
            current = [part for one in current for part in emitted(one)]
    return Logical(payload, tuple(reached), "", diverts)


def _any(items: Iterable[Payload], mark: str) -> bool:
    return any(one["bad"] == mark for one in items)


class Oracle:
    """Tracks every logical message of a world.

    Args:
        spec: The world.

    Attributes:
        messages: Logical message by id.
        events: Root events, in order.
        owners: Id of the logical message by id of an item.
        outputs: Place of every item that the flow produced.
        letters: Ids found in the dead-letter topic, by stage, except those with reason `unproven` ...
        unproven: ... and those.
        refused: Ids that republishers must reject, by dead-letter topic.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.messages: dict[str, Logical] = {}
        self.events: list[Payload] = []
        self.owners: dict[str, str] = {}
        self.letters: dict[str, set[str]] = {stage.name: set() for stage in spec.stages}
        self.unproven: dict[str, set[str]] = {stage.name: set() for stage in spec.stages}
        self.outputs: dict[str, object] = {}
        self.refused: dict[str, set[str]] = {processor.dead: set() for processor in spec.processors}
        self._places: dict[object, str] = {}
        self._mended: set[str] = set()
        self._over = False
        self._allowed: list[set[tuple[str, str]]] = [set() for _ in spec.stages]

    def rooted(self, topic: str, payload: Payload) -> None:
        """Note a root event and everything that results from it."""
        self.events.append(payload)
        for dead, name in self.spec.refused(topic, payload):
            self.refused[dead].add(name)
        for message in self.spec.messages(topic, payload):
            self._add(message)

    def revived(self, processor: Processor, payload: Payload) -> None:
        """Note that a record rejected by a republisher was mended and redriven, and everything that results from it."""
        for output in processor.outputs(payload):
            topic = processor.target_of(output)
            for dead, name in self.spec.refused(topic, output):
                self.refused[dead].add(name)
            for message in self.spec.messages(topic, output):
                if message["id"] not in self.messages:
                    self._add(message)

    def is_cured(self, message: str) -> bool:
        """Whether a rejected message has been mended and redriven."""
        return message in self._mended

    def cured(self, message: str) -> None:
        """Note that a rejected message has been mended and redriven."""
        self._mended.add(message)
        self._add({**self.messages[message].payload, "bad": ""})

    def over(self) -> None:
        """Note that steps and folds no longer reject anything: copies or dead letters of rejected messages are folded."""
        self._over = True
        for message in [*self.messages.values()]:
            self._mended.add(message.payload["id"])
            self._add(message.payload)

    def died(self, message: str, stage: str, reason: Reason, *, copy: bool) -> None:
        """Note a dead letter.

        Args:
            message: The message.
            stage: Stage that rejected it, or that it did not reach; empty for the first.
            reason: Reason code.
            copy: It was redriven, and the flow had not rejected it.

        Raises:
            Violation: The stage has no reason to reject it.
        """
        stage = stage or self.spec.stages[0].name
        if copy and not any(self.gave_up(message, one.name) for one in self.spec.stages):
            raise Violation(f"{message} is a dead letter of stage {stage}, and a copy: {reason}")
        if reason is Reason.UNPROVEN:
            self.unproven[stage].add(message)
            return
        found = self.messages[message]
        if stage not in self.letters or (stage not in (found.fails, found.diverts) and message not in self._mended):
            raise Violation(f"{message} is a dead letter of stage {stage}: {reason}")
        self.letters[stage].add(message)

    def is_missing(self, message: str, stage: str, held: Mapping[int, set[str]]) -> bool:
        """Whether a message belongs to a stage and is not folded there."""
        number = [one.name for one in self.spec.stages].index(stage or self.spec.stages[0].name)
        items = self.messages[message].items
        return number < len(items) and any(item.id not in held[number] for item in items[number])

    def _add(self, payload: Payload) -> None:
        found = self.messages[payload["id"]] = logical(self.spec, payload, over=self._over)
        for allowed, items in zip(self._allowed, found.items, strict=False):
            for item in items:
                allowed.add((item.key, item.id))
                self.owners[item.id] = payload["id"]

    def published(self, item: str, identity: object) -> None:
        """Note an output of the flow: it may be produced several times, but always as the same message.

        Raises:
            Violation: One item has two places, or two items have the same.
        """
        if self.outputs.setdefault(item, identity) != identity or self._places.setdefault(identity, item) != item:
            raise Violation(f"{item} is published at {identity}, and before at {self.outputs[item]}")

    def check_state(self, stage: int, key: str, seen: Mapping[str, int]) -> None:
        """Check that nothing is folded twice, or under a wrong key.

        Raises:
            Violation: Something is.
        """
        name = self.spec.stages[stage].name
        for one, times in seen.items():
            if times != 1:
                raise Violation(f"stage {name}, key {key}: {one} is folded {times} times")
            if (key, one) not in self._allowed[stage]:
                raise Violation(f"stage {name}, key {key}: {one} does not belong there")

    def check_passed_on(self, item: str, stage: int, held: Mapping[int, set[str]]) -> None:
        """Check that an item held by a stage is folded, or a dead letter, at each later stage that it reaches.

        Raises:
            Violation: It is neither.
        """
        message, made_of_it = self.owners[item], (f"{item}!", f"{item}^")
        found = self.messages[message]
        for later in range(stage + 1, len(self.spec.stages)):
            name = self.spec.stages[later].name
            if self.gave_up(message, name):
                return  # it reaches no stage after that one, unless it is redriven
            if later >= len(found.items):
                raise Violation(f"downstream: {message} is no dead letter of stage {name}, which refuses it")
            for one in found.items[later] if later in held else ():  # otherwise the stage only counts
                if one.id not in held[later] and (one.id == item or one.id.startswith(made_of_it)):
                    raise Violation(f"downstream: {one.id} is not held by stage {name}")

    def check_held(self, message: str, stage: int, held: Mapping[int, set[str]], why: str) -> None:
        """Check that a message is folded, or a dead letter, at a stage that it reaches.

        Raises:
            Violation: It is neither.
        """
        found = self.messages[message]
        if any(self.gave_up(message, one.name) for one in self.spec.stages[: stage + 1]):
            return  # it reaches no stage after that one, unless it is redriven
        name = self.spec.stages[stage].name
        if stage == len(found.items):
            raise Violation(f"{why}: {message} is no dead letter of stage {name}, which refuses it")
        lost = (
            [item.id for item in found.items[stage] if item.id not in held[stage]] if stage < len(found.items) else ()
        )
        if lost:
            raise Violation(f"{why}: {lost[0]} is not held by stage {name}")

    def gave_up(self, message: str, stage: str) -> bool:
        """Whether a message is a dead letter of a stage."""
        return message in self.letters[stage] or message in self.unproven[stage]

    def _states(self, stage: int) -> dict[str, object]:
        """The states of a stage after a plain fold of every message."""
        added: dict[str, list[tuple[int, dict[str, int]]]] = {}
        for message in self.messages.values():
            if stage >= len(message.items):
                continue
            for item in message.items[stage]:
                adds = {item.id: 1} if self.spec.stages[stage].seen else {"n": 1, "s": item.x}
                added.setdefault(item.key, []).append((item.x, adds))
        if self.spec.sessions:
            return {key: divided(items) for key, items in added.items()}
        return {key: whole([(0, 0, one) for _, one in items]) for key, items in added.items()}

    def compare_refused(self, processor: Processor, letters: Set[str]) -> None:
        """Compare a republisher's dead letters with what it must reject.

        Raises:
            Violation: One is missing, or should not be there.
        """
        if letters != self.refused[processor.dead]:
            wrong = min(letters ^ self.refused[processor.dead])
            raise Violation(f"{processor.name}: {wrong} is {'' if wrong in letters else 'not '}in {processor.dead}")

    def compare_outputs(self) -> None:
        """Compare the flow's dead letters and outputs with those of the plain fold.

        Raises:
            Violation: One is missing.
        """
        for name, message in self.messages.items():
            for refused in filter(None, (message.fails, message.diverts)):
                if not self.gave_up(name, refused):
                    raise Violation(f"{name} is no dead letter of stage {refused}, which refuses it")
        names = [stage.name for stage in self.spec.stages]
        at = names.index(self.spec.publishes_before or names[-1])
        outputs = {
            item.id for message in self.messages.values() if len(message.items) > at for item in message.items[at]
        }
        if self.spec.publishes and (lost := outputs - self.outputs.keys()):
            raise Violation(f"{min(lost)} was never published")

    def compare_states(self, stage: int, found: Mapping[str, object]) -> None:
        """Compare the states of a stage with those of the plain fold.

        Raises:
            Violation: One differs.
        """
        expected = self._states(stage)
        for key in sorted(expected.keys() | found.keys()):
            if expected.get(key) != found.get(key):
                raise Violation(_difference(self.spec.stages[stage].name, key, expected.get(key), found.get(key)))


def _difference(stage: str, key: str, expected: object, found: object) -> str:
    if isinstance(expected, dict) and isinstance(found, dict):
        names = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        parts = ", ".join(f"{name} is {found.get(name)}, not {expected.get(name)}" for name in names[:3])
        return f"stage {stage}, key {key}: {parts}"
    return f"stage {stage}, key {key}: {found}, not {expected}"
