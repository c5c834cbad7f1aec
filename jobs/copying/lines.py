"""The lines of a file, as the source of a copy."""

import os
from pathlib import Path
from typing import IO, Any, Final

import google_crc32c
import msgspec

from envelope.event_ids import EventIds
from envelope.limits import DEFAULT_LIMITS
from jobs.copying.counts import CopyStatistics
from jobs.copying.source import ItemWriter, Output, Position, Read, SourceError, Task, changed

_HEAD_BYTES: Final = 4096  # beginning of the file, by which it is recognised
_MOST_BYTES: Final = 16 << 20  # of one read


class FileLines:
    """The lines of a file that is only appended to. A line that does not end yet is read when it does.

    The sequence id of a line is its offset in the file, in bytes.

    Args:
        path: The file.
        json: The lines are JSON; otherwise any bytes.
        key: Name of the JSON field that is the record's key; None for no key.
        event_id: Event ids: `coordinates`, `field:NAME` or `hash:NAME,NAME`; None for none.

    Raises:
        ValueError: Fields of lines that are not JSON, or an invalid event id.
    """

    kind = "lines"

    def __init__(
        self,
        path: str | Path,
        *,
        json: bool = False,
        key: str | None = None,
        event_id: EventIds | str | None = None,
    ) -> None:
        self._path = Path(path)
        self._event_ids = EventIds.parse(event_id) if isinstance(event_id, str) else event_id
        self._json, self._key = json, key
        if not json and (key or (self._event_ids and self._event_ids.names)):
            raise ValueError("a key or an event id is made of fields: the lines must be JSON (--input json)")
        self._file: IO[bytes] | None = None
        self._offset = self._lines = self._end = 0
        self._sequence: int | None = None
        self._unfinished = False

    def reads(self, target: str) -> bool:
        return False

    def open(self, task: Task, position: Position | None) -> None:
        content = "application/json" if self._json else ""
        self._writer = ItemWriter(task, key=self._key, event_ids=self._event_ids, content_type=content)
        try:
            self._file = self._path.open("rb")
        except OSError as error:
            raise SourceError(f"{self._path}: {error.strerror}", "Correct its name or its rights") from error
        self._end = self._size()
        if position is not None:
            self._offset, self._lines = position["offset"], position["lines"]
            if self._end < self._offset:
                raise changed(
                    f"{self._path} has {self._end} bytes, and {self._offset} were copied: it was truncated or replaced"
                )
            if self._head() != position["head"]:
                raise changed(f"{self._path} begins with other bytes than those that were copied: it was replaced")
        self._file.seek(self._offset)

    def read(self, most: int) -> Read:
        assert self._file is not None
        outputs: list[Output] = []
        size, self._unfinished = 0, False
        while len(outputs) < most and size < _MOST_BYTES:
            line = self._file.readline(DEFAULT_LIMITS.payload_bytes + 1)
            if not line.endswith(b"\n"):
                if len(line) > DEFAULT_LIMITS.payload_bytes:
                    raise SourceError(
                        f"{self._path}: the line at byte {self._offset} has more than {DEFAULT_LIMITS.payload_bytes} bytes",
                        "Copy files of shorter lines",
                    )
                self._unfinished = bool(line)
                self._file.seek(self._offset)
                break
            payload = line[:-1]
            place = f"{self._path}: the line at byte {self._offset}"
            outputs.append(self._writer.write(payload, self._offset, place, lambda text=payload: _parsed(text)))  # type: ignore[misc]
            self._sequence = self._offset
            self._offset += len(line)
            self._lines += 1
            size += len(line)
        return Read(outputs, CopyStatistics(read=len(outputs), written=len(outputs)))

    def check(self) -> None:
        assert self._file is not None
        own, there = os.fstat(self._file.fileno()), self._path.stat()
        if (own.st_dev, own.st_ino) != (there.st_dev, there.st_ino) or there.st_size < self._offset:
            raise changed(f"{self._path} was truncated or replaced while it was read")

    @property
    def position(self) -> Position:
        return {"offset": self._offset, "lines": self._lines, "head": self._head()}

    @property
    def sequence(self) -> int | None:
        return self._sequence

    @property
    def caught_up(self) -> bool:
        return self._unfinished or self._offset >= self._end

    @property
    def unfinished(self) -> bool:
        """Whether the file ends with a line that does not end, and that was therefore not copied."""
        return self._unfinished

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _size(self) -> int:
        return self._path.stat().st_size

    def _head(self) -> str:
        """Checksum of the beginning of what was copied."""
        with self._path.open("rb") as file:
            return f"{google_crc32c.value(file.read(min(self._offset, _HEAD_BYTES))):08x}"


def _parsed(line: bytes) -> Any:
    return msgspec.json.decode(line)
