"""The lines of a file, as the source of a copy."""

import os
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import google_crc32c
import msgspec

from envelope.event_ids import EventIds
from envelope.limits import DEFAULT_LIMITS
from jobs.copying.counts import CopyStatistics
from jobs.copying.source import ItemWriter, Output, Position, Read, SourceError, Task, changed

_TAIL_BYTES: Final = 1 << 20  # end of what was copied, by which the file is recognised while it is read
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
        self._offset = self._lines = self._end = self._checksum = 0
        self._tails: tuple[_Tail, ...] = ()
        self._sequence: int | None = None
        self._unfinished = False

    def reads(self, target: str) -> bool:
        return False

    def open(self, task: Task, position: Position | None) -> None:
        content = "application/json" if self._json else ""
        self._writer = ItemWriter(task, key=self._key, event_ids=self._event_ids, content_type=content)
        try:
            self._file = self._path.open("rb")
            self._end = os.fstat(self._file.fileno()).st_size
            if position is not None:
                self._resume(self._file, position)
        except OSError as error:
            raise self._failed(error) from error

    def _resume(self, file: IO[bytes], position: Position) -> None:
        """Continue after what was copied, if the file still begins with it."""
        self._offset, self._lines = position["offset"], position["lines"]
        if self._end < self._offset:
            raise changed(
                f"{self._path} has {self._end} bytes, and {self._offset} were copied: it was truncated or replaced"
            )
        left, tail = self._offset, b""
        while left and (part := file.read(min(left, _TAIL_BYTES))):
            self._checksum = google_crc32c.extend(self._checksum, part)
            left, tail = left - len(part), (tail + part)[-_TAIL_BYTES:]
        if position.get("checksum") != f"{self._checksum:08x}":
            raise changed(f"{self._path} begins with other bytes than those that were copied: it was replaced")
        self._tails = (_Tail(self._offset, tail),)

    def read(self, most: int) -> Read:
        try:
            self.check()
            return self._read(most)
        except OSError as error:
            raise self._failed(error) from error

    def _read(self, most: int) -> Read:
        assert self._file is not None
        outputs: list[Output] = []
        size, self._unfinished = 0, False
        lines: list[bytes] = []
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
            lines.append(line)
        if lines:
            self._note(b"".join(lines))
        return Read(outputs, CopyStatistics(read=len(outputs), written=len(outputs)))

    def _note(self, text: bytes) -> None:
        """Note what was read."""
        self._checksum = google_crc32c.extend(self._checksum, text)
        before = self._tails[-1] if self._tails else _Tail(0, b"")
        self._tails = before, _Tail(self._offset, (before.text + text)[-_TAIL_BYTES:])

    def check(self) -> None:
        """Check that the file still has what was read, where it was read: a log may be truncated, and grow again."""
        assert self._file is not None
        number = self._file.fileno()
        try:
            own, there = os.fstat(number), self._path.stat()
            # Those before and after the last read: it may have read a whole tail of other bytes.
            same = all(os.pread(number, len(one.text), one.end - len(one.text)) == one.text for one in self._tails)
        except OSError as error:
            raise self._failed(error) from error
        if (own.st_dev, own.st_ino) != (there.st_dev, there.st_ino) or there.st_size < self._offset or not same:
            raise changed(f"{self._path} was truncated or replaced while it was read")

    @property
    def position(self) -> Position:
        return {"offset": self._offset, "lines": self._lines, "checksum": f"{self._checksum:08x}"}

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

    def _failed(self, error: OSError) -> SourceError:
        return SourceError(f"{self._path}: {error.strerror or error}", "Correct its name or its rights")


class _Tail(NamedTuple):
    """The last bytes of a file up to a place.

    Attributes:
        end: The place, in bytes from the beginning.
        text: The bytes before it, `_TAIL_BYTES` at most.
    """

    end: int
    text: bytes


def _parsed(line: bytes) -> Any:
    return msgspec.json.decode(line)
