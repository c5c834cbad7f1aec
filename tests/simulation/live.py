"""Which generation of the flow is live in a world: whose dead letters can be redriven, and which ones never change again."""

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from aggregations import report
from aggregations.definition.element import Record
from aggregations.run.memory import MemoryRunner
from envelope import Reason
from envelope.limits import broker_id
from persistence.names import FlowRef
from persistence.pointer import load_pointer
from tests.simulation.letters import facts_of
from tests.simulation.oracle import Violation
from tests.simulation.service import payload_of
from tests.simulation.topology import FLOW

if TYPE_CHECKING:
    from tests.simulation.world import World


class Live:
    """The live generation of a world.

    Args:
        world: The world.

    Attributes:
        ref: The flow and its live generation.
        sent: What swaps have sent of what rebuilds held, by generation.
        held: Dead letters of a rebuild, and its runner, by generation and what distinguishes them.
    """

    def __init__(self, world: "World") -> None:
        self._world = world
        self._others: defaultdict[int, list[Record]] = defaultdict(list)
        self._replaced: dict[int, Any] = {}
        self.ref = FlowRef(FLOW)
        self.sent: dict[int, set[str]] = {}
        self.held: dict[int, dict[Any, tuple[report.DeadLetter, MemoryRunner]]] = {}

    def take(self, letter: report.DeadLetter, runner: MemoryRunner) -> None:
        """Put a dead letter into its topic, and note that it can be redriven as long as its generation is live."""
        world, generation, message = self._world, runner.run.ref.generation, payload_of(letter.record.value)["id"]
        at = letter.record
        owner = world.redriven_at.get((broker_id(at.topic_id), at.partition, at.offset), FLOW)
        world.oracle.died(message, letter.stage, letter.reason, copy=owner != FLOW)
        dead = world.publish_dead_letter(letter, runner.flow, generation)
        (self._others[generation] if generation != self.ref.generation else self._list_of(dead)).append(dead)

    def _list_of(self, letter: Record) -> list[Record]:
        unproven = facts_of(letter).reason is Reason.UNPROVEN
        again = unproven or self._world.oracle.is_cured(payload_of(letter.value)["id"])
        return self._world.again if again else self._world.letters

    def follow(self) -> None:
        """Follow the pointer: dead letters of another generation are copies for the live one.

        Raises:
            Violation: A generation has changed that was replaced.
        """
        world = self._world
        pointer = load_pointer([*world.stores.values()], FLOW)
        live = pointer.live
        for generation, before in self._replaced.items():
            if generation != live and self._content(generation) != before:
                raise Violation(f"generation {generation} has changed although generation {live} has replaced it")
        if live == self.ref.generation:
            return
        self._replaced.pop(live, None)
        if pointer.previous == self.ref.generation:  # otherwise the stores were emptied, and its number is free
            self._replaced[pointer.previous] = self._content(pointer.previous)
        self._others[self.ref.generation] += [*world.letters, *world.again]
        world.letters, world.again, world.redriven[FLOW] = [], [], 0
        self.ref = world.watch.ref = FlowRef(FLOW, live)
        for letter in self._others.pop(live, []):
            self._list_of(letter).append(letter)
        world.watch.forget()
        world.copies.clear()

    def lost(self) -> None:
        """Note that all stores were emptied, or went back."""
        self._replaced.clear()
        self.sent.clear()

    def _content(self, generation: int) -> Any:
        ref = FlowRef(FLOW, generation)
        return [
            (
                store.load_manifest(ref),
                {stage.name: dict(store.stage(ref.stage(stage.name))) for stage in self._world.spec.stages},
            )
            for store in self._world.stores.values()
        ]
