"""Texts that the records of a stage have in common: they are stored once, and a record has one byte for each.

Most of a state record is the same for every key: names of members, of lanes and of topics. Text `n` of a stage, counted
from 0, is the byte n + 1 in its records. JSON has no byte below 32 (RFC 8259, section 7), so these bytes need no escape;
a value that is no JSON and has such bytes is stored as it is.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from functools import cached_property, lru_cache
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from persistence.errors import Corrupt
from persistence.names import StageRef

if TYPE_CHECKING:
    from persistence.lmdb.text_kernels import Tables

LIMIT: Final = 31
"""Most texts of a stage: the bytes 1 to 31 stand for them."""
_SAMPLE: Final = 9
"""Values that are compared with each other."""
_COMPARED: Final = 512
"""Bytes of a value that are compared."""
_OFTEN: Final = 4
"""A part that a value has more often, such as the comma of a list of numbers, is matched only beside others."""
_SAVED: Final = 3
"""Bytes of a value that a text must save on average."""
_FEW: Final = 200
"""Values up to which compiled code costs more than it saves: importing numba takes half a second."""

_CODES: Final = re.compile(rb"[\0-\x1f]")
_VALUES: Final = re.compile(rb"(?<![0-9A-Za-z])[0-9]{3,}(?![0-9A-Za-z])")
"""Numbers that no text contains: those of one batch, such as its window's times, would use up the texts. Digits in
words, as in a definition hash, are no numbers."""
_PARTS: Final = re.compile(rb"[0-9]+|[\0-\x1f]|[^0-9\0-\x1f]+")
_Text = Annotated[str, msgspec.Meta(pattern=r"^[^\x00-\x1f]+$")]
_decoder: Final = msgspec.json.Decoder(Annotated[list[_Text], msgspec.Meta(max_length=LIMIT)])


def prepare(count: int) -> None:
    """Load the compiled code for this number of values. This may take seconds: do it before a lock is taken."""
    if count > _FEW:
        from persistence.lmdb.text_kernels import load

        load()


class Texts:
    """The texts of a stage.

    Args:
        texts: In the order of their numbers; none has a byte below 32, and none is empty.
    """

    def __init__(self, texts: Sequence[bytes] = ()) -> None:
        self.texts = tuple(texts)
        self._looks = 0
        self._by_code = {bytes([i + 1]): one for i, one in enumerate(self.texts)}

    def shortened(self, values: Sequence[bytes]) -> list[bytes] | None:
        """Values with a byte for each text, of those that begin at one place the longest; None if this is impossible.

        It is impossible if there are no texts, or if a value itself has a byte below 32.
        """
        if not self.texts:
            return None
        if len(values) > _FEW:
            from persistence.lmdb.text_kernels import shorten

            return shorten(values, self._tables)
        if any(map(_CODES.search, values)):
            return None
        codes = {one: code for code, one in self._by_code.items()}
        return [self._pattern.sub(lambda found: codes[found[0]], one) for one in values]

    def restored(self, values: Sequence[bytes], skip: int = 0) -> list[bytes]:
        """The inverse of `shortened`.

        Args:
            values: What it returned, each after other bytes.
            skip: Number of these other bytes, which are left out.

        Raises:
            LookupError: A byte stands for no text.
        """
        if len(values) > _FEW:
            from persistence.lmdb.text_kernels import restore

            return restore(values, skip, self._tables)
        return [_CODES.sub(lambda found: self._by_code[found[0]], one[skip:]) for one in values]

    def with_those_of(self, values: Sequence[bytes]) -> "Texts":
        """These texts, and further ones that some of the values have in common; itself if none are found.

        Once there are some, they are looked for ever more rarely, at last in one call of 64: it costs milliseconds.
        """
        self._looks += 1
        if self.texts and self._looks & (self._looks - 1) and self._looks % 64:
            return self
        some = Random(len(values)).sample(values, min(_SAMPLE, len(values)))
        sample = [one[:_COMPARED] for one in some]
        if any(map(_CODES.search, sample)):
            return self
        texts, sample = list(self.texts), [_VALUES.sub(b"\0", one) for one in self.shortened(sample) or sample]
        while len(texts) < LIMIT and (best := _most_saving(sample)):
            texts.append(best)
            sample = [one.replace(best, bytes([len(texts)])) for one in sample]
        return Texts(texts) if len(texts) > len(self.texts) else self

    @cached_property
    def _pattern(self) -> re.Pattern[bytes]:
        return re.compile(b"|".join(map(re.escape, sorted(self.texts, key=len, reverse=True))))

    @cached_property
    def _tables(self) -> "Tables":
        from persistence.lmdb.text_kernels import tables

        return tables(self.texts)


def _most_saving(sample: Sequence[bytes]) -> bytes | None:
    """The text that saves most bytes of the sample; None if none saves enough."""
    found = {text for one, other in pairwise(sample) for text in _in_both(one, other)}
    saved = {text: (len(text) - 1) * sum(text in one for one in sample) for text in found}
    best = max(saved, key=lambda text: (saved[text], text), default=b"")
    return best if best and saved[best] >= _SAVED * len(sample) else None


def _in_both(one: bytes, other: bytes) -> Iterator[bytes]:
    """Texts of two values that begin and end with whole numbers, or between numbers."""
    parts, others = _PARTS.findall(one), _PARTS.findall(other)
    counts = Counter(others)  # matching takes the product of how often a part occurs in the two
    matcher = SequenceMatcher(lambda part: counts[part] > _OFTEN, parts, others, autojunk=False)
    for first, _, count in matcher.get_matching_blocks():
        for text in _CODES.split(b"".join(parts[first : first + count])):
            if text.decode(errors="ignore").encode() == text:
                yield text


def encode_texts(texts: Texts) -> bytes:
    """Serialize texts: a JSON list of strings."""
    return msgspec.json.encode([one.decode() for one in texts.texts])


@lru_cache(maxsize=64)
def _decoded(value: bytes) -> Texts:
    return Texts([one.encode() for one in _decoder.decode(value)])


def decode_texts(value: bytes | None, stage: StageRef) -> Texts:
    """Parse texts; none when there is no entry.

    Raises:
        Corrupt: The entry is not what was written.
    """
    try:
        return _decoded(b"[]" if value is None else value)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(f"the texts of the stage cannot be read: {error}", ref=stage) from error
