"""The commit of one batch: the order in which its effects reach the outside."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from persistence.commit.faults import effect
from persistence.commit.steps import CommitStep

Effect = Callable[[], object]


class Step(NamedTuple):
    """One effect of the commit of a batch.

    Attributes:
        kind: Which step it is a part of.
        name: The stage whose states are written, or the store whose manifest is; empty for `publish`.
    """

    kind: CommitStep
    name: str = ""

    @property
    def point(self) -> str:
        """Its fault point."""
        return self.kind.of(self.name) if self.name else self.kind


def commit(publish: Effect, stages: Sequence[tuple[str, Effect]], manifests: Sequence[tuple[str, Effect]]) -> None:
    """Make a folded batch durable, steps 4 to 6 of the protocol.

      1. `fetch`: the batch is delivered: a contiguous range of offsets per topic and partition.
      2. `load`: the states of the batch's keys are read, upstream stage first.
      3. `fold`: verdicts are decided and elements folded, stage by stage, in memory.
      4. `publish`: outputs and dead letters are produced and acknowledged.
      5. `persist:<stage>`: the last stage's states are written and acknowledged, then the
         ones of the stage before it, ... the first stage's last. An upstream state would drop a
         replayed element as a duplicate and never forward it, so it may hold the element only if
         every downstream state holds it.
      6. `manifest:<store>`: the next offsets are written to every store, the most downstream one first.
      7. `return`: the driver returns to its loop.
      8. `offsets`: the consumer group's offsets are committed to Kafka. Advisory.

    1 to 3 come before this call, 7 and 8 after it. An error in any step ends this attempt at the batch: its states
    are loaded and folded again, and the histories drop what some states already hold.

    An engine whose tasks and driver share the commit takes the same order from `steps_of_tasks` and `steps_of_driver`.

    Args:
        publish: Produces outputs and dead letters and returns when all are acknowledged.
        stages: (stage, writes its states) in flow order, upstream first. Each returns when its
            writes are at least as durable as those of the stage before it.
        manifests: (store, writes its manifest) in the order of `store_order`, upstream first.

    Raises:
        StoreError: From the first step that failed; the steps after it were not begun.
    """
    effects = {Step(CommitStep.PUBLISH): publish}
    effects |= {Step(CommitStep.PERSIST, stage): persist for stage, persist in stages}
    effects |= {Step(CommitStep.MANIFEST, store): save_manifest for store, save_manifest in manifests}
    for step in (*steps_of_tasks([stage for stage, _ in stages]), *steps_of_driver([store for store, _ in manifests])):
        point = step.point
        effect(point, effects[step])


def steps_of_tasks(stages: Sequence[str]) -> list[Step]:
    """Steps 4 and 5 of `commit` for these stages, upstream first, in the order in which they have to be done."""
    return [Step(CommitStep.PUBLISH), *(Step(CommitStep.PERSIST, stage) for stage in reversed(stages))]


def steps_of_driver(stores: Sequence[str]) -> list[Step]:
    """Step 6 of `commit` for these stores, upstream first, in the order in which it has to be done."""
    return [Step(CommitStep.MANIFEST, store) for store in reversed(stores)]


def store_order(stores: Iterable[str]) -> list[str]:
    """The distinct stores of a flow, upstream first.

    Args:
        stores: The store of each stage, in flow order.

    Raises:
        ValueError: A store recurs after another store (A, B, A). After a crash between two manifests
            B is at or ahead of A. If A is also downstream of B, this could as well mean that A
            lost data, and the two cases cannot be distinguished.
    """
    order: list[str] = []
    for store in stores:
        if order and store == order[-1]:
            continue
        if store in order:
            raise ValueError(
                f"stages of the store {store!r} come before and after stages of {order[-1]!r}: "
                "bind adjacent stages to one store, or use a third one"
            )
        order.append(store)
    return order
