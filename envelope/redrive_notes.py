"""Notes in a dead-letter topic of which of its dead letters were redriven.

A note is a record with the header `hw-dlq-redriven`. Its value is a JSON object: by partition of the dead-letter topic the
first and last offsets of runs of dead letters, `{"0": [[12, 14], [17, 17]]}`. It is written once they are acknowledged
where they died, so a crash in between leaves out what was redriven, and never says so of what was not.
"""

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from envelope.deadletter import PREFIX, DeadLetterRecord, Headers

HEADER: Final = f"{PREFIX}redriven"
_RUNS: Final = 200  # a note of that many runs has less than 10,000 bytes


def notes_of(places: Iterable[tuple[int, int]]) -> Iterator[DeadLetterRecord]:
    """The notes that these dead letters were redriven.

    Args:
        places: Partition and offset of each in the dead-letter topic.
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
        # A key of its own: a compacted topic takes no record without one, and keeps the newest of each.
        key = f"{HEADER}:{some[0][0]}:{some[0][1]}".encode()
        yield DeadLetterRecord(key, json.dumps(value).encode(), [(HEADER, str(count).encode())])


@dataclass(slots=True)
class Notes:
    """What the notes of a dead-letter topic say."""

    _runs: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    def take(self, headers: Headers, value: bytes | None) -> bool:
        """Take a record in if it is a note; return whether it is one. A note that cannot be read says nothing."""
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
