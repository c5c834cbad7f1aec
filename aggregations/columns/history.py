"""The histories after a batch: `Histories.folding` for many keys at once."""

from collections.abc import Iterator, Sequence

import numpy as np

from aggregations.columns.arrays import Ints, Mask
from aggregations.columns.judge import Judged
from aggregations.columns.order import distinct_lanes, numbered, positions_of
from aggregations.columns.signature import Lane
from envelope import Histories, History, Position
from envelope.dedup.eviction import GROWTH, LANES, check_full, retire
from envelope.dedup.history import width_of
from envelope.dedup.lanes import names_partition


def fold_histories(
    judged: Judged,
    keys: Ints,
    lanes: Ints,
    positions: Sequence[Ints],
    places: Sequence[Lane],
    histories: Sequence[Histories],
    *,
    fold: Mask,
    size: int | None = None,
    most_lanes: int = LANES,
    batch: int = 0,
    evict: bool = True,
) -> tuple[dict[int, Histories], int]:
    """Return the histories with the folded messages added.

    Args:
        judged: Verdicts of the batch.
        keys: Key of every message, as in `judge`; so are lanes, positions, places and histories.
        lanes: Number of each message's lane.
        positions: Components of its position.
        places: Lanes and their groups.
        histories: Histories of each key's state before the batch.
        fold: The messages folded; none of a key that is left to the pure code.
        size: Positions remembered per lane; None for 32, or 1,024 for records without a key.
        most_lanes: Lanes with a history per state.
        batch: Number of the batch.
        evict: See `Histories.folding`.

    Returns:
        New histories by the number of the key, for keys with a folded message, and the number of lanes that were
        retired to their floor.

    Raises:
        GrowthFullError: A lane that does not evict is full.
    """
    folded = judged.order[fold[judged.order]]
    keyless = np.zeros(len(folded), np.bool_)
    if any(place.wide for place in places):
        keyless = np.array([place.wide for place in places])[lanes[folded]]
    lanes, places = distinct_lanes(lanes, places)
    new: dict[int, dict[str, History]] = {}
    for key, lane, added, wide, width in _highest(
        keys, lanes, positions, places, histories, folded, keyless, size, evict
    ):
        known = new.get(key)
        if known is None:
            known = new[key] = dict(histories[key].lanes)
        before = known.get(lane) or History()
        known[lane] = _adding(before, added, width, batch, wide=wide)
        if not evict and not names_partition(lane):
            check_full(before, known[lane], width)
    retired = 0
    for known in new.values():
        if len(known) > most_lanes:
            retired += len(retire(known, most_lanes, batch, evict=evict))
    return {key: Histories(known) for key, known in new.items()}, retired


def _highest(
    keys: Ints,
    lanes: Ints,
    positions: Sequence[Ints],
    places: Sequence[Lane],
    histories: Sequence[Histories],
    rows: Ints,
    keyless: Mask,
    size: int | None,
    evict: bool,
) -> Iterator[tuple[int, str, tuple[Position, ...], bool, int]]:
    """Yield, for every lane with folded rows: key, name, highest positions (ascending), whether it is wide, and its size.

    One position more than a history holds is enough: lower ones can neither be held nor become the floor.

    Args:
        keys: Key of every message.
        lanes: Its lane.
        positions: Components of its position.
        places: Lanes by number.
        histories: Histories of each key before the batch.
        rows: Folded rows, by key and position.
        keyless: Whether a record without a key is in the lineage of each of them.
        size: Positions remembered per lane, if the stage sets it.
        evict: See `Histories.folding`.
    """
    if not len(rows):
        return
    count = len(places)
    pairs, pair_of = numbered(keys[rows] * count + lanes[rows], (int(keys.max()) + 1) * count)
    if (pair_of[1:] < pair_of[:-1]).any():
        by_pair = np.argsort(pair_of, kind="stable")
        rows, pair_of, keyless = rows[by_pair], pair_of[by_pair], keyless[by_pair]
    sizes = np.bincount(pair_of, minlength=len(pairs))
    names = [
        (key, places[lane].lane) for key, lane in zip((pairs // count).tolist(), (pairs % count).tolist(), strict=True)
    ]
    came = (np.bincount(pair_of, keyless, len(pairs)) > 0).tolist() if keyless.any() else [False] * len(pairs)
    wide = [
        here or ((history := histories[key].lanes.get(lane)) is not None and history.wide)
        for here, (key, lane) in zip(came, names, strict=True)
    ]
    narrow, broad = width_of(size, wide=False), width_of(size, wide=True)
    widths = np.where(wide, broad, narrow)
    if not evict:
        whole = [not names_partition(lane) for _, lane in names]
        widths = np.where(whole, np.maximum(widths, GROWTH), widths)
    kept = np.arange(len(rows)) >= (np.cumsum(sizes) - widths - 1)[pair_of]
    sizes = np.minimum(sizes, widths + 1)
    ends = np.cumsum(sizes)
    found = positions_of(positions, rows[kept])
    bounds = zip(names, wide, widths.tolist(), (ends - sizes).tolist(), ends.tolist(), strict=True)
    for (key, lane), is_wide, width, start, end in bounds:
        yield key, lane, tuple(found[start:end]), is_wide, width


def _adding(history: History | None, positions: tuple[Position, ...], size: int, batch: int, *, wide: bool) -> History:
    """`History.adding` for ascending positions with every index, which the history does not hold."""
    history = history or History()
    highest = history.highest
    if history.loose or (highest is not None and positions[0] <= highest):
        return history.adding(positions, size, batch, wide=wide)
    held = history.held + positions
    floor = held[-size - 1] if len(held) > size else history.floor
    return History(held[-size:], floor, max(history.used, batch), wide)
