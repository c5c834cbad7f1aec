"""The histories of many states as arrays."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from aggregations.columns.arrays import Ints
from aggregations.columns.lane_names import LaneNames
from envelope import Histories, History, Position


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
        numbers = (np.empty(size, np.int64) for size in (lanes, lanes, lanes, positions, floors))
        lane, used, width, held, floor = numbers
        bounds = (np.zeros(lanes + 1, np.int64) for _ in range(2))
        return cls(
            np.zeros(states + 1, np.int64),
            lane,
            used,
            np.empty(lanes, np.uint8),
            width,
            next(bounds),
            held,
            next(bounds),
            floor,
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

    def histories(self, state: int, names: LaneNames) -> Histories:
        """The histories of one state."""
        lanes: dict[str, History] = {}
        for lane in range(int(self.starts[state]), int(self.starts[state + 1])):
            flat = self.held[self.first[lane] : self.first[lane + 1]].tolist()
            width = int(self.width[lane])
            held: tuple[Position, ...] = tuple(zip(*(flat[i::width] for i in range(width)), strict=True))
            floor = tuple(self.floors[self.floor_first[lane] : self.floor_first[lane + 1]].tolist()) or None
            lanes[names.names[self.lane[lane]]] = History(held, floor, int(self.used[lane]), bool(self.wide[lane]))
        return Histories(lanes)
