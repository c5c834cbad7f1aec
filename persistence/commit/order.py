"""The commit of one batch: the order in which its effects reach the outside."""

from collections.abc import Callable, Iterable, Sequence

from persistence.commit.faults import effect
from persistence.commit.steps import CommitStep

Effect = Callable[[], object]


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

    Args:
        publish: Produces outputs and dead letters and returns when all are acknowledged.
        stages: (stage, writes its states) in flow order, upstream first. Each returns when its
            writes are at least as durable as those of the stage before it.
        manifests: (store, writes its manifest) in the order of `store_order`, upstream first.

    Raises:
        StoreError: From the first step that failed; the steps after it were not begun.
    """
    effect(CommitStep.PUBLISH, publish)  # 4
    for stage, persist in reversed(stages):  # 5
        effect(CommitStep.PERSIST.of(stage), persist)
    for store, save_manifest in reversed(manifests):  # 6
        effect(CommitStep.MANIFEST.of(store), save_manifest)


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
