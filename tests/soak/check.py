"""Are the states right: never above the plain fold while messages flow, equal to it when all are folded."""

from collections.abc import Iterator, Mapping

from tests.soak.chain import Chain
from tests.soak.orders import Sums, Truth

_SHOWN = 5
_FIELDS = ("items", "pieces", "most")


def bounds(chain: Chain, truth: Truth, before: dict[str, int]) -> list[str]:
    """What is wrong while messages flow; nothing when all is well.

    Args:
        chain: The chain.
        truth: Fold of the orders sent; it may grow meanwhile.
        before: Items by stage at the last check, which are replaced: nothing that was folded may be lost again.
    """
    # In this order: what an upstream state holds, the downstream ones hold already.
    found = {stage: chain.states(stage) for stage in ("customer", "article")}
    wrong = []
    for stage, states in found.items():
        wrong += _listed(stage, _above(states, truth.sums[stage]), "more than was sent")
        items = sum(state["items"] for state in states.values())
        if items < before.get(stage, 0):
            wrong.append(f"{stage}: {items} items, {before[stage]} before")
        before[stage] = items
    if before["customer"] > before["article"]:
        wrong.append(f"{before['customer']} items of customers, {before['article']} of articles read after them")
    return wrong


def exact(chain: Chain, truth: Truth) -> list[str]:
    """What is wrong when all is folded."""
    wrong = []
    for stage, right in truth.sums.items():
        found = chain.states(stage)
        differing = {
            key: f"{found.get(key)} for {right.get(key)}"
            for key in found.keys() | right.keys()
            if found.get(key) != right.get(key)
        }
        items = sum(state["items"] for state in found.values())
        wrong += _listed(stage, differing.items(), f"{items} items for {truth.items}")
    if letters := chain.dead_letters():
        wrong.append(f"{letters} dead letters")
    return wrong


def _above(found: Sums, truth: Mapping[bytes, Mapping[str, int]]) -> Iterator[tuple[bytes, str]]:
    for key, state in found.items():
        right = truth.get(key)  # the feed adds an order before it sends it
        if right is None or any(state[name] > right[name] for name in _FIELDS):
            yield key, f"{state} for at most {right}"


def _listed(stage: str, differing: object, what: str) -> list[str]:
    lines = [f"{stage} {key.decode()}: {text}" for key, text in differing]  # type: ignore[attr-defined]
    return [f"{stage}: {len(lines)} states, {what}", *lines[:_SHOWN]] if lines else []
