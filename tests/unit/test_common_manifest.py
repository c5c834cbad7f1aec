"""What several stores say together, and what each of them has acknowledged to a run."""

import pytest

from aggregations.run.acknowledged import AcknowledgedWrites
from aggregations.run.common import common
from persistence.errors import StoreWentBack
from persistence.manifest import Growth, Manifest, Progress
from persistence.marks import KnownMarks
from persistence.names import FlowRef

FLOW = FlowRef("fleet", 2)


def manifest(offset: int, topic_id: str, *ids: str, growth: Growth | None = None) -> Manifest:
    growing = {} if growth is None else {"t": growth}
    return Manifest(3, 14, {"t": {0: Progress(offset)}}, {"t": topic_id}, {"t": ids} if ids else {}, growth=growing)


def test_where_a_topic_was_created_again_the_lowest_offset_and_the_growth_are_those_of_the_oldest() -> None:
    growth = Growth(1, 2, 7)
    before, after = manifest(40, "z", "z", growth=growth), manifest(4, "a", "z", "a", growth=Growth(5, 6, 8))
    for stores in ([before, after], [after, before]):
        found = common(stores, FLOW)
        assert found is not None
        assert (found.positions, found.topic_ids) == ({"t": {0: Progress(40)}}, {"t": "z"})
        assert (found.incarnations, found.growth) == ({"t": ("z", "a")}, {"t": growth})


def test_an_id_that_no_incarnation_is_known_of_is_older_than_any_that_is() -> None:
    found = common([manifest(4, "a", "a"), manifest(40, "z")], FLOW)
    assert found is not None
    assert found.topic_ids == {"t": "z"}
    alone = common([manifest(40, "z")], FLOW)
    assert alone is not None
    assert alone.topic_ids == {"t": "z"}


def acknowledged() -> AcknowledgedWrites:
    return AcknowledgedWrites(FLOW, ("a", "b"), KnownMarks(FLOW, ("a", "b")))


def test_of_stores_without_a_manifest_nothing_is_acknowledged() -> None:
    held = acknowledged()
    held.learn([("a", None)], {})
    assert (held.since, held.manifest("a"), held.marks("a", commits=False)) == (0, (0, 0), {})
    held.check_manifest("a", None)


def test_a_store_that_has_an_older_manifest_than_it_acknowledged_is_named_with_both() -> None:
    held = acknowledged()
    held.saved("b", manifest(1, "z"))
    held.check_manifest("b", manifest(1, "z"))
    held.check_manifest("a", None)
    with pytest.raises(
        StoreWentBack, match=r"^flow fleet, generation 2: .* epoch 3, batch 14 was acknowledged; the store has epoch 0"
    ):
        held.check_manifest("b", None)
