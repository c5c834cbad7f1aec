"""A step in which an operator rebuilds the flow's states while it runs, swaps generations, and sometimes returns.

The commands are the real ones but for Kafka. Each may die at any effect, and is repeated.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from aggregations.engine import held
from aggregations.errors import RunRefusedError
from aggregations.report import DeadLetter, Report
from aggregations.run.held_outputs import HELD_OUTPUTS, held_outputs
from envelope import TopicPartition
from jobs.comparing import Comparison
from jobs.replaying import generations, swapping
from jobs.replaying.generations import Generations, generations_of
from jobs.replaying.results import Differences
from persistence.commit.faults import HELD, effect
from persistence.errors import StoreError
from persistence.manifest import Rebuilt
from persistence.pointer import Pointer, load_pointer
from tests.simulation.driver import Driver
from tests.simulation.faults import ENDS, Crash, Script
from tests.simulation.functions import OUT
from tests.simulation.oracle import Violation
from tests.simulation.service import Outgoing, payload_of, published
from tests.simulation.topology import FLOW
from tests.simulation.world import World
from tests.support.replays import author_of

_EFFECTS = 48
"""Faults are planned among so many effects of a command; most have fewer."""


def rebuild(world: World, a: int, b: int, c: int) -> None:
    """Rebuild, swap and roll back, or stop in between; commands die and are repeated."""
    pointer = _pointer(world)
    if not world.replayable or any(store.load_manifest(world.live.ref) is None for store in world.stores.values()):
        return
    operator = Operator(world, size=1 + a % 7, holds=bool(b & 1), meanwhile=b & 6)
    if pointer.previous and a % 8 == 7 and pointer.rebuild is None:
        operator.until_done(operator.roll_back, c)
        return
    operator.until_done(operator.rebuild, c)
    world.check()
    if a % 4 == 3:
        return  # a later step continues it
    operator.until_done(operator.swap, c >> 6, reopens=bool(b & 8))
    world.check()
    if b & 16:
        world.engine(1 + b % 5)
        world.check()
        operator.until_done(operator.roll_back, c >> 3)


def _pointer(world: World) -> Pointer:
    return load_pointer([*world.stores.values()], FLOW)


@dataclass(frozen=True, slots=True)
class Operator:
    """Gives commands, and is the outside of a swap.

    Attributes:
        world: The world.
        size: Records of each partition in a batch of the rebuild.
        holds: A rebuild that begins holds its outputs.
        meanwhile: What happens between two batches: nothing if it is 0.
    """

    world: World
    size: int
    holds: bool
    meanwhile: int

    def until_done(self, command: Callable[[], object], number: int, *, reopens: bool = False) -> None:
        """Give a command until it is done; at first it dies, up to twice."""
        for nth in range(number % 3):
            script = Script({(number >> (2 + 3 * nth)) % _EFFECTS: ENDS[(number >> nth) % len(ENDS)]})
            done = []
            with suppress(Crash, StoreError, RunRefusedError):
                self.world.under(script, lambda: done.append(command()))
            if done:
                return
            if reopens and _pointer(self.world).closing:
                self.roll_back()
            self.world.check()
            self._go_on()
        try:
            command()
        except (RunRefusedError, StoreError) as error:
            raise Violation(f"a command cannot be repeated: {error}") from error

    def rebuild(self) -> None:
        """As `jobs.replay.rebuild`."""
        author = author_of("rebuild")
        with generations_of(self.world.spec.flow, self.world.urls) as found:
            before = found.pointer()
            outputs = self.holds if before.rebuild is None else None
            pointer, note = generations.begin_rebuild(found, author, live=1, redefined=False, outputs=outputs)
            with swapping.at_work(found, author):
                self.fold(found, pointer, note)

    def swap(self) -> None:
        """As `jobs.replay.swap`."""
        before = _pointer(self.world)
        if before.rebuild is None:
            return  # the command that died had done it
        author = author_of("swap")
        with generations_of(self.world.spec.flow, self.world.urls) as found:
            pointer, note = generations.begin_rebuild(found, author, live=1, redefined=False)
            with swapping.at_work(found, author):
                swapping.swap_rebuild(
                    *(found, author, pointer, note, self),
                    compare=lambda old, new: self._compare(found, old, new),
                    agreed=bool,
                )
            self._check_swapped(found, before.rebuild.generation)

    def roll_back(self) -> None:
        """As `jobs.replay.rollback`."""
        with generations_of(self.world.spec.flow, self.world.urls) as found:
            pointer, author = found.settled(), author_of("rollback")
            if pointer.rebuild is not None:
                if pointer.closing:
                    generations.reopen(found, author, pointer)
                return
            if pointer.live == self.world.live.ref.generation:
                generations.roll_back(found, author)
        self.world.check()

    def fold(self, found: Generations, pointer: Pointer, note: Rebuilt) -> Report:
        """Fold the rebuild up to what the live generation has read, which goes on meanwhile."""
        assert pointer.rebuild is not None
        generation, until = pointer.rebuild.generation, found.positions(pointer.live)
        driver: Driver = self.world.start(
            until=until, generation=generation, rebuilt=note, holds=pointer.rebuild.outputs
        )
        seen = 0
        try:
            while driver.lag:
                driver.batch(self.size)
                self._go_on()
        finally:
            self._hold(driver.runner.dead_letters[seen:], driver)
        driver.runner.close()
        return driver.runner.report

    def _hold(self, letters: list[DeadLetter], driver: Driver) -> None:
        """Keep the dead letters of a rebuild, as its store does; a batch that is repeated has them once more."""
        held = self.world.live.held.setdefault(driver.runner.run.ref.generation, {})
        for letter in letters:
            at = letter.record
            held[at.topic_id, at.partition, at.offset, letter.stage, letter.items] = letter, driver.runner

    def _go_on(self) -> None:
        """The flow goes on, unless it is being replaced: then no run begins, and none writes."""
        if not self.meanwhile:
            return
        if not _pointer(self.world).closing:
            self.world.under(Script(), lambda: self.world.engine(self.meanwhile))
            return
        driver, self.world.driver = self.world.driver, None
        with suppress(Crash, StoreError):
            if driver is not None:
                self.world.under(Script(), lambda: driver.batch(self.meanwhile))
        with suppress(RunRefusedError):
            self.world.start()
            raise Violation("a run begins on a generation that is being replaced")

    def _compare(self, found: Generations, old: int, new: int) -> Differences:
        left, right = ({place: end for place, end in found.positions(one).items() if end} for one in (old, new))
        if left != right:
            raise Violation(f"generations {old} and {new} are swapped, and have not read the same records")
        return Differences(Comparison({}))

    def _check_swapped(self, found: Generations, generation: int) -> None:
        """Check that every store has the pointer, and that nothing is held any more."""
        if len({load_pointer([store], FLOW).version for store in found.stores}) > 1:
            raise Violation("a swap has ended, and not every store has the pointer")
        if [*held_outputs(found.stores[0], found.ref(generation))]:
            raise Violation("a swap has ended, and outputs are still held")

    def send_letters(self, found: Generations, generation: int) -> int:
        """Put the dead letters into their topic; they belong to a generation that is about to be live."""
        held = self.world.live.held.pop(generation, {})
        self._go_on()
        for letter, runner in held.values():
            self.world.live.take(letter, runner)
        return len(held)

    def drop_letters(self, found: Generations, generation: int, note: Rebuilt) -> int:
        """Not in these worlds: what is given up could not be redriven."""
        raise NotImplementedError

    def send_outputs(self, found: Generations, generation: int) -> int:
        """Send what was held, and check that it is everything that the live generation has published."""
        ref, store, world = found.ref(generation), found.stores[0], self.world
        outputs = effect(HELD, lambda: [*held_outputs(store, ref)])
        sent = world.live.sent.setdefault(generation, set())  # a swap that died may have sent some
        for output in outputs:
            item, standing = published(output.value)
            sent.add(item)
            world.oracle.published(item, (standing.group, standing.position))
            if world.spec.audit == OUT:
                world.deliver(Outgoing(OUT, output.key, output.value, tuple(output.headers)))
        rebuild = found.pointer().rebuild
        if rebuild is not None and rebuild.outputs and (lost := self._made(found.positions(generation)) - sent):
            raise Violation(f"{min(lost)} was made by a rebuild that holds its outputs, and the swap does not send it")
        self._go_on()
        effect(HELD, lambda: held.forget_held(store, ref.stage(HELD_OUTPUTS), epoch=store.installed_epoch(ref)))
        return len(outputs)

    def _made(self, positions: Mapping[TopicPartition, int]) -> set[str]:
        """What the flow publishes of all records below these positions, without those that it rejects."""
        world = self.world
        if not world.spec.publishes:
            return set()
        names = [stage.name for stage in world.spec.stages]
        at = names.index(world.spec.publishes_before or names[-1])
        below = {
            payload_of(record.value)["id"]
            for place, end in positions.items()
            for record in world.cluster.read(*place, 0, end)
            if record.offset < end
        }
        whole = [name for name in below if not any(world.oracle.gave_up(name, stage) for stage in names)]
        items = [world.oracle.messages[name].items for name in whole]
        return {one.id for found in items if len(found) > at for one in found[at]}

    def send_states(self, found: Generations, generation: int, before: int) -> int:
        """These flows publish no states."""
        return 0

    def unread_growths(self, found: Generations, generation: int) -> list[str]:
        """Topics do not grow between the rebuild and the swap."""
        return []

    def stopped(self) -> bool:
        """Never."""
        return False
