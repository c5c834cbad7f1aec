"""Every schedule of up to two faults in small worlds: each effect of each process, with each outcome."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from random import Random
from typing import NamedTuple

from tests.simulation.draw import draw
from tests.simulation.faults import ENDS, End, Script
from tests.simulation.functions import Payload
from tests.simulation.oracle import Violation
from tests.simulation.topology import FLOW, Spec, event
from tests.simulation.world import World

WORLDS = 64
"""Number of small worlds: together they have more than a million schedules."""
_EVENTS = 3
_MOST_MESSAGES = 8
_MOST_PASSAGES = 2
_MOST_ROUNDS = 40


class First(NamedTuple):
    """A first fault; all second faults after it belong to the same unit of work.

    Attributes:
        world: Number of the world.
        place: Number of the effect, counted over all processes.
        end: How it ends.
    """

    world: int
    place: int
    end: End


class Unit(NamedTuple):
    """Result of one unit of work.

    Attributes:
        schedules: Number of schedules run.
        violations: Texts of the failed ones, with the arguments that repeat them.
    """

    schedules: int
    violations: tuple[str, ...]


def small_world(number: int) -> Spec:
    """Draw a world of at most two processors, three stages, two stores and eight messages."""
    random = Random(f"small {number}")
    while True:
        spec = draw(random)
        if len(spec.processors) <= _MOST_PASSAGES and 1 <= _messages(spec, number) <= _MOST_MESSAGES:
            return replace(
                spec,
                processors=tuple(replace(processor, members=1) for processor in spec.processors),
                partitions={topic: min(count, 2) for topic, count in spec.partitions.items()},
                growth="",
                recreates=False,
                audit="",
                revives=False,
                mends=False,
            )


def _messages(spec: Spec, number: int) -> int:
    return sum(1 for topic, payload in _events(spec, number) for _ in spec.messages(topic, payload))


def _events(spec: Spec, number: int) -> Iterator[tuple[str, Payload]]:
    for n in range(_EVENTS):
        yield spec.roots[n % len(spec.roots)], event(spec, f"w{number}e{n}")


def run(spec: Spec, number: int, ends: Mapping[int, End]) -> int:
    """Run a small world to its end with these faults.

    Returns:
        Number of effects.

    Raises:
        Violation: An invariant does not hold.
    """
    script = Script(ends)
    script.counts = True

    def live(world: World) -> None:
        events = list(_events(spec, number))
        for topic, payload in events:
            world.produce(topic, payload)
        for topic, payload in events:
            if spec.twice(topic, payload):
                world.produce(topic, payload, again=True)
        if all(_round(world) for _ in range(_MOST_ROUNDS)):
            raise Violation("it does not come to an end")

    World(spec).run([lambda world: world.under(script, lambda: live(world))])
    return len(script.reached)


def _round(world: World) -> bool:
    """Let every process do a little; return whether anything was left to do."""
    busy = False
    for service in world.services:
        if service.lag():
            busy = True
            world.serve(lambda service=service: service.turn(2))  # type: ignore[misc]
    if world.driver is None or world.driver.lag:
        busy = True
        world.engine(2)
        world.check()
    if not busy and world.redriven[FLOW] < len(world.letters):
        busy = True
        world.redriven[FLOW] += 1
        world.bring_back(world.letters[world.redriven[FLOW] - 1])
    return busy


def units(worlds: int = WORLDS) -> list[First]:
    """Every first fault, in an order in which every prefix is a fair sample."""
    found = [
        First(number, place, end)
        for number in range(worlds)
        for place in range(run(small_world(number), number, {}))
        for end in ENDS
    ]
    Random("schedules").shuffle(found)
    return found


def explore(first: First) -> Unit:
    """Run one first fault alone, then with every second fault."""
    spec, ends = small_world(first.world), {first.place: first.end}
    violations: list[str] = []

    def run_one(faults: Mapping[int, End]) -> int:
        try:
            return run(spec, first.world, faults)
        except Exception as error:
            violations.append(f"--world {first.world} --faults {_text(faults)}: {type(error).__name__}: {error}")
            return 0

    seconds = range(first.place + 1, run_one(ends))
    for place in seconds:
        for end in ENDS:
            run_one({**ends, place: end})
    return Unit(1 + len(seconds) * len(ENDS), tuple(violations))


def attempt(number: int, ends: Mapping[int, End]) -> str:
    """The error in a small world with these faults; empty if there is none."""
    try:
        run(small_world(number), number, ends)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _text(ends: Mapping[int, End]) -> str:
    return ",".join(f"{place}.{end}" for place, end in ends.items())
