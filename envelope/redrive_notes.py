"""Notes in a dead-letter topic that list which of its dead letters were redriven.

A note is a record with the header `hw-dlq-redriven`. Its value is a JSON object that maps each partition of the
dead-letter topic to the first and last offsets of runs of dead letters: `{"0": [[12, 14], [17, 17]]}`. It is written
after the redriven records are acknowledged in their original topics, so after a crash a note may be missing for a
redriven dead letter, but no note lists one that was not redriven.
"""

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from envelope.deadletter import PREFIX, DeadLetterRecord
from envelope.headers import Headers

HEADER: Final = f"{PREFIX}redriven"
_RUNS: Final = 200  # a note with this many runs has less than 10,000 bytes


def notes_of(places: Iterable[tuple[int, int]]) -> Iterator[DeadLetterRecord]:
    """The notes which say that these dead letters were redriven.

    Args:
        places: Partition and offset of each dead letter in the dead-letter topic.
    """
    runs: list[list[int]] = []
    for partition, offset in sorted(set(places)):
        if runs and runs[-1][0] == partition and runs[-1][2] == offset - 1:
            runs[-1][2] = offset
        else:
            runs.append([partition, offset, offset])
    for at in range(0, len(runs), _RUNS):
        some = runs[at : at + _RUNS]
        value: dict[str, list[list[int]]] = {}
        for partition, first, last in some:
            value.setdefault(str(partition), []).append([first, last])
        count = sum(last - first + 1 for _, first, last in some)
        # Each note has its own key: a compacted topic rejects records without a key, and keeps the newest per key.
        key = f"{HEADER}:{some[0][0]}:{some[0][1]}".encode()
        yield DeadLetterRecord(key, json.dumps(value).encode(), [(HEADER, str(count).encode())])


@dataclass(slots=True)
class Notes:
    """The content of the notes of a dead-letter topic."""

    _runs: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    def take(self, headers: Headers, value: bytes | None) -> bool:
        """Add a record if it is a note; return whether it is one. A note that cannot be read is ignored."""
        if not any(name == HEADER for name, _ in headers):
            return False
        try:
            runs = [
                (int(partition), int(first), int(last))
                for partition, found in json.loads(value or b"").items()
                for first, last in found
            ]
        except (ValueError, TypeError, AttributeError, RecursionError):
            return True
        for partition, first, last in runs:
            self._runs.setdefault(partition, []).append((first, last))
        return True

    def count(self, partition: int, offsets: Iterable[int]) -> int:
        """How many of these dead letters were redriven."""
        merged: list[tuple[int, int]] = []
        for first, last in sorted(self._runs.get(partition, ())):
            if merged and first <= merged[-1][1] + 1:
                merged[-1] = merged[-1][0], max(merged[-1][1], last)
            else:
                merged.append((first, last))
        starts = [first for first, _ in merged]
        found = ((offset, bisect_right(starts, offset) - 1) for offset in offsets)
        return sum(at >= 0 and offset <= merged[at][1] for offset, at in found)
