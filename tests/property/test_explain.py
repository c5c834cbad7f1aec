"""What `explain` says about a record is what the flow decided about it, or that nothing shows it."""

from hypothesis import given
from hypothesis import strategies as st

from jobs.explaining.outcome import AtStage, Outcome
from tests.support.explained import Sum, decided, flow, send
from tests.support.topics import InMemory

SENT = st.lists(st.tuples(st.integers(0, 50), st.sampled_from([0, 1, 1, 1, -1, 5000])), min_size=1, max_size=120)
"""Roots, and the value that each has whenever it is sent: the first one that is drawn for it."""


@given(SENT, st.sampled_from([1, 7, 1000]), st.sampled_from([3, 10_000]))
def test_a_folded_record_is_never_called_dropped_and_a_dropped_one_never_folded(
    sent: list[tuple[int, int]], size: int, search: int
) -> None:
    Sum.broken = True
    world, values = InMemory(flow(fold=Sum())), dict[int, int]()
    places = [send(world, root, v=values.setdefault(root, v), c="AB"[root % 2]) for root, v in sent]
    truth = decided(world, size)
    for place, (root, _) in zip(places, sent, strict=True):
        found = world.explain(place, search=search)
        rows: dict[str, AtStage] = {row.stage: row for row in found.stages}
        assert found.outcome is not Outcome.MISSING
        if values[root] == 0:
            assert found.outcome is Outcome.REMOVED
        elif values[root] == -1:
            assert found.outcome is Outcome.DEAD_LETTER
        for (stage, where), fold in truth.items():
            if where == place and stage in rows:
                said = rows[stage].outcome
                if fold or "no other record of its event is among the" not in rows[stage].why:
                    assert said is not (Outcome.DROPPED if fold else Outcome.FOLDED)
                if search > len(sent) and len(values) < 32:
                    assert said is (Outcome.FOLDED if fold else Outcome.DROPPED)
