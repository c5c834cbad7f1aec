"""A step in which a log loses its newest records, and gives their offsets to new ones (KIP-320): an unclean election."""

from typing import TYPE_CHECKING

from aggregations.errors import RunRefusedError
from jobs.republish.absence import Unsafe
from tests.simulation.oracle import Violation

if TYPE_CHECKING:
    from tests.simulation.service import Service
    from tests.simulation.world import World

_MOST = 40


def cut(world: "World", a: int, b: int, c: int) -> None:
    """Let the partitions of a topic get other leaders, when everything is read; most of them lose their newest records.

    What was folded of those stays. Whoever has read them must say so, and reads the new ones once that is accepted.
    """
    world.resolve()
    for process, _ in [*world.zombies, *world.stale]:  # they would send on, or fold, what nobody has any more
        process.kill()
    world.zombies.clear()
    world.stale.clear()
    names = sorted(world.spec.partitions)
    log = world.cluster.topics[names[a % len(names)]]
    readers = [service for service in world.services if service.processor.source == log.topic]
    before = [partition.high for partition in log.partitions]
    world.driver = None
    if world.audit:
        world.audit.driver = None
    for number, partition in enumerate(log.partitions):
        partition.elect((b >> 3 * number) % 4)
        world.watch.went_back(log.topic_id, number, partition.high)
        for at in [at for at in world.redriven_at if at[:2] == (log.topic_id, number) and at[2] >= partition.high]:
            del world.redriven_at[at]
        for service in readers:
            service.went_back(log.topic, number)
    lost = any(partition.high < end for partition, end in zip(log.partitions, before, strict=True))
    world.copies.clear()
    if log.topic in world.spec.sources:
        world.replayable = False
    if lost and c & 1:
        _check_refused(world, log.topic, readers)
    if log.topic in world.spec.roots:
        # A root beyond the end of its topic may be one of another cluster: it is not folded before the log is as long.
        for _ in range(_MOST):
            if all(partition.high >= end for partition, end in zip(log.partitions, before, strict=True)):
                break
            world.write(log.topic, 1 + c % 4)
    if lost and not c & 1:
        _check_refused(world, log.topic, readers)
    for service in readers:
        world.serve(service.drain)
    world.resolve()


def _check_refused(world: "World", topic: str, readers: "list[Service]") -> None:
    """Check that those who have read what was lost do not go on, unless that is accepted."""
    for service in readers:
        accepted, service.accept = service.accept, ()
        try:
            service.turn(1)
        except Unsafe:
            continue
        finally:
            service.accept = accepted
        raise Violation(f"{service.processor.name} goes on although {topic} lost records that it had read")
    if topic in world.spec.sources:
        try:
            world.start(accepts=["topic-recreated"])
        except RunRefusedError:
            return
        raise Violation(f"the flow goes on although {topic} lost records that it had folded")
