"""Copies of one position over several groups of lanes: judged in a time that grows with their number, not its square."""

import numpy as np

from aggregations.columns.histories import LaneArrays
from aggregations.columns.judge import VERDICTS, HistoryLimits, judge
from aggregations.columns.lane_names import LaneNames
from aggregations.columns.signature import Lane
from envelope import Verdict

COPIES = 200_000


def test_copies_of_one_position_over_two_groups_are_folded_once_per_group() -> None:
    places = [Lane(name, name) for name in ("a:0#i>r>b", "a:0#i>s>b")]
    none, zeros = np.zeros(COPIES, np.bool_), np.zeros(COPIES, np.int64)
    judged = judge(
        zeros,
        np.arange(COPIES) % 2,
        [zeros, zeros],
        places,
        LaneArrays.empty(1),
        LaneNames(),
        HistoryLimits.of(),
        pure=none[:1],
        exotic=none,
        refused=none,
    )
    assert np.flatnonzero(judged.fold).tolist() == [0, 1]
    assert VERDICTS[judged.verdicts[1]] is Verdict.NEW_LANE
    assert (judged.verdicts[2:] == VERDICTS.index(Verdict.DUPLICATE_IN_BATCH)).all()
    assert not judged.pure.any()
