"""The histories of many states as arrays."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from aggregations.columns.arrays import Ints


class LaneArrays(NamedTuple):
    """Lanes of many states, state by state.

    Attributes:
        starts: The lanes of state i are those from `starts[i]` up to `starts[i + 1]`.
        lane: Number of the lane's name.
        used: Batch that last added to it.
        wide: 1 if records without a key arrived on it.
        width: Components of each held position.
        first: Where the held positions of a lane begin in `held`; the last entry is where the last lane ends.
        held: Components of held positions, position by position.
        floor_first: Where the floor of a lane begins in `floors`, as in `first`; a lane may have no floor.
        floors: Components of floors.
    """

    starts: Ints
    lane: Ints
    used: Ints
    wide: npt.NDArray[np.uint8]
    width: Ints
    first: Ints
    held: Ints
    floor_first: Ints
    floors: Ints

    @classmethod
    def empty(cls, states: int) -> "LaneArrays":
        """The histories of states without a lane."""
        return cls.space(states, 0, 0, 0)

    @classmethod
    def space(cls, states: int, lanes: int, positions: int, floors: int) -> "LaneArrays":
        """Arrays for so many states, lanes, and components of held positions and of floors."""
        return cls(
            starts=np.zeros(states + 1, np.int64),
            lane=np.empty(lanes, np.int64),
            used=np.empty(lanes, np.int64),
            wide=np.empty(lanes, np.uint8),
            width=np.empty(lanes, np.int64),
            first=np.zeros(lanes + 1, np.int64),
            held=np.empty(positions, np.int64),
            floor_first=np.zeros(lanes + 1, np.int64),
            floors=np.empty(floors, np.int64),
        )

    def moved(self, larger: "LaneArrays") -> "LaneArrays":
        """Larger arrays with the same content."""
        before: list[npt.NDArray[Any]] = [*self]
        after: list[npt.NDArray[Any]] = [*larger]
        for old, new in zip(before, after, strict=True):
            new[: len(old)] = old
        return larger

    def filled(self, states: int) -> "LaneArrays":
        """The first states of arrays that had room for more."""
        lanes = int(self.starts[states])
        first, floor_first = self.first[: lanes + 1], self.floor_first[: lanes + 1]
        return LaneArrays(
            self.starts[: states + 1],
            self.lane[:lanes],
            self.used[:lanes],
            self.wide[:lanes],
            self.width[:lanes],
            first,
            self.held[: first[lanes]],
            floor_first,
            self.floors[: floor_first[lanes]],
        )
