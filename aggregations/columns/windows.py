"""The windows after a batch: `Windows.folding` for many keys at once."""

from collections.abc import Iterator, Sequence

import numpy as np

from aggregations.columns.judge import Judged
from aggregations.columns.order import Ints, Mask, distinct_lanes, numbered, positions_of
from aggregations.columns.signature import Place
from envelope import Position, Window, Windows
from envelope.windows import LANES, WINDOW, retire


def fold_windows(
    judged: Judged,
    keys: Ints,
    lanes: Ints,
    positions: Sequence[Ints],
    places: Sequence[Place],
    windows: Sequence[Windows],
    *,
    fold: Mask,
    size: int = WINDOW,
    most_lanes: int = LANES,
    batch: int = 0,
) -> tuple[dict[int, Windows], int]:
    """Return the windows with the folded messages held.

    Args:
        judged: Verdicts of the batch.
        keys: As `judge` had them; so are lanes, positions, places and windows.
        lanes: Number of each message's lane.
        positions: Components of its position.
        places: Lanes and their groups.
        windows: Windows of each key's state before the batch.
        fold: The messages folded; none of a key that is left to the pure code.
        size: Positions remembered per lane.
        most_lanes: Lanes with a window per state.
        batch: Number of the batch.

    Returns:
        New windows by the number of the key, for keys with a folded message, and the number of lanes that were
        retired to their floor.
    """
    lanes, places = distinct_lanes(lanes, places)
    folded = judged.order[fold[judged.order]]
    new: dict[int, dict[str, Window]] = {}
    for key, lane, added in _highest(keys, lanes, positions, places, folded, size + 1):
        known = new.get(key)
        if known is None:
            known = new[key] = dict(windows[key].lanes)
        known[lane] = _adding(known.get(lane), added, size, batch)
    retired = 0
    for known in new.values():
        if len(known) > most_lanes:
            retired += len(retire(known, most_lanes, batch))
    return {key: Windows(known) for key, known in new.items()}, retired


def _highest(
    keys: Ints, lanes: Ints, positions: Sequence[Ints], places: Sequence[Place], rows: Ints, most: int
) -> Iterator[tuple[int, str, tuple[Position, ...]]]:
    """Key, lane and the `most` highest positions, ascending, of every lane that has folded rows.

    One position more than a window holds is enough: what lies below can neither be held nor be the floor.

    Args:
        keys: Key of every message.
        lanes: Its lane.
        positions: Components of its position.
        places: Lanes by number.
        rows: Folded rows, by key and position.
        most: How many positions.
    """
    if not len(rows):
        return
    count = len(places)
    pairs, pair_of = numbered(keys[rows] * count + lanes[rows], (int(keys.max()) + 1) * count)
    if (pair_of[1:] < pair_of[:-1]).any():
        by_pair = np.argsort(pair_of, kind="stable")
        rows, pair_of = rows[by_pair], pair_of[by_pair]
    sizes = np.bincount(pair_of, minlength=len(pairs))
    kept = np.arange(len(rows)) >= (np.cumsum(sizes) - most)[pair_of]
    sizes = np.minimum(sizes, most)
    ends = np.cumsum(sizes)
    found = positions_of(positions, rows[kept])
    bounds = zip(
        (pairs // count).tolist(), (pairs % count).tolist(), (ends - sizes).tolist(), ends.tolist(), strict=True
    )
    for key, lane, start, end in bounds:
        yield key, places[lane].lane, tuple(found[start:end])


def _adding(window: Window | None, positions: tuple[Position, ...], size: int, batch: int) -> Window:
    """`Window.adding` for ascending positions that the window does not hold."""
    window = window or Window()
    highest = window.highest
    if highest is not None and positions[0] <= highest:
        return window.adding(positions, size, batch)
    held = window.held + positions
    floor = held[-size - 1] if len(held) > size else window.floor
    return Window(held[-size:], floor, max(window.used, batch))
