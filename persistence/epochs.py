"""How a run, or a command, fences those before it in all stores of a flow."""

from collections.abc import Sequence

from persistence.commit.faults import effect
from persistence.names import FlowRef
from persistence.protocol import StateStore


def take_epoch(ref: FlowRef, stores: Sequence[StateStore], *, above: int = 0, point: str) -> int:
    """Acquire an epoch from the first store, and install it in the others.

    When it returns, no write of a lower epoch takes effect in any of them. After a crash in between, the next call
    returns a higher one.

    Args:
        ref: The generation.
        stores: The flow's stores, each once, that of the first stage first.
        above: A further epoch that the new one is above.
        point: Fault point of each of these effects.

    Raises:
        Fenced: Another caller has taken a higher epoch meanwhile.
        StoreError: A store does not answer, or refuses a request.
    """
    highest = max(above, *(store.installed_epoch(ref) for store in stores))
    epoch = effect(point, lambda: stores[0].acquire_epoch(ref, above=highest))
    for store in stores[1:]:
        effect(point, lambda store=store: store.install_epoch(ref, epoch))  # type: ignore[misc]
    return epoch
