"""Short forms for tests of one stage: folds that can fail, arrivals, and their outcomes."""

import msgspec
import pytest

from aggregations.definition.flow import Aggregate
from aggregations.per_message.arrivals import Arrival
from aggregations.per_message.stage import KeyState, fold_stage
from envelope import Standing
from tests.support.pure import element

LANE = "legs:0#T1"


class Log:
    """Remembers every value in the order in which it was folded."""

    def zero(self):
        return []

    def fold(self, state, element):
        if element.value == "bad":
            raise RuntimeError("secret")
        return [*state, element.value]


class InPlace(Log):
    """The same, changing its state before it may fail."""

    def fold(self, state, element):
        state.append(element.value)
        if element.value == "bad":
            raise RuntimeError("secret")
        return state


FOLDS = pytest.mark.parametrize("fold", [Log(), InPlace()], ids=["by value", "in place"])


def stage(fold=None, **options):
    return Aggregate("s", "tail", fold or Log(), **options)


def arrival(offset, key=b"k", value=None, *, index=0, lane=LANE, own=None, incarnation=None, values=None, **fields):
    """A message at root offset `offset`; its record is at `own`, or at the same offset."""
    one = element(value if value is not None else f"v{offset}", offset if own is None else own)
    standing = Standing(lane, fields.pop("group", lane), (offset, index), **fields)
    return Arrival(one, key, standing, incarnation, {} if values is None else values)


def fold(arrivals, loaded=None, *, of=None, batch=1, **options):
    return fold_stage(of or stage(), loaded or {}, arrivals, batch=batch, **options)


def verdicts(outcome):
    return [one.decision.verdict.value for one in outcome.decided]


def again(outcome, loaded=None):
    """The states as the next batch loads them: through JSON, with the next version."""
    saved = {
        key: KeyState(msgspec.json.decode(msgspec.json.encode(state.fold)), state.histories, state.version + 1)
        for key, state in outcome.states.items()
    }
    return {**(loaded or {}), **saved}
