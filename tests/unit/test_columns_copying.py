"""Compiled code copies spans of bytes, and only bytes that have no gaps between them."""

import numpy as np
import pytest
from numba.core.errors import TypingError

from aggregations.columns.json_writing import put

TEXT = np.arange(200, dtype=np.uint8)


@pytest.mark.parametrize("length", [0, 1, 16, 17, 100])
@pytest.mark.parametrize("text", [TEXT, TEXT[50:], np.frombuffer(TEXT.tobytes(), np.uint8)])
def test_a_span_is_copied_whatever_its_length(text: np.ndarray, length: int) -> None:
    out = np.zeros(200, np.uint8)
    assert put(out, 7, text, 9, 9 + length) == 7 + length
    assert out.tobytes() == bytes(7) + text[9 : 9 + length].tobytes() + bytes(193 - length)


@pytest.mark.parametrize("text", [TEXT[::2], TEXT[::-1], np.arange(100, dtype=np.int32)])
def test_an_array_with_gaps_or_of_larger_numbers_is_refused(text: np.ndarray) -> None:
    with pytest.raises(TypingError, match="bytes without gaps"):
        put(np.zeros(200, np.uint8), 0, text, 0, 40)
