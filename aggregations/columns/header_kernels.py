"""Reads the headers of librdkafka's messages at their addresses, as compiled code; see `message_kernels`."""

from typing import Any, Final

import numpy as np
from numba import carray, types

from aggregations.columns.message_kernels import BINARY, INT, WORDS, call, copy
from persistence.compiled import NUMBERS, compiled, helper, pointer

_ONE: Final = 1
_ADDRESSES: Final = types.UniTuple(types.int64, 3)


@helper
def _opened(message: Any, functions: Any, found: Any) -> Any:
    """Set `found[0]` to the headers of a message; return their number."""
    words = carray(pointer(message), (WORDS,), np.int64)
    if words[0] & INT or call(functions[0], (message, found.ctypes.data)) & INT:
        return 0
    return call(functions[1], (found[0],))


@helper
def _named(functions: Any, number: Any, found: Any) -> Any:
    """Set `found[1:]` to the addresses of a header's name and value, and the size of the value.

    Returns:
        Length of the name.
    """
    places = found.ctypes.data
    call(functions[2], (found[0], number, places + 8, places + 16, places + 24))
    size = 0
    while carray(pointer(found[1] + size), (_ONE,), np.uint8)[0]:
        size += 1
    return size


@compiled(types.UniTuple(types.int64, 4)(NUMBERS, types.int64, _ADDRESSES))
def headers_measured(messages: Any, most_bytes: int, functions: Any) -> tuple[int, int, int, int]:
    """Measure the headers of messages up to a number of bytes; of at least one message, if there is one.

    Args:
        messages: Addresses of the messages.
        most_bytes: Bytes of names and values after which to stop.
        functions: Addresses of `rd_kafka_message_headers`, `rd_kafka_header_cnt` and `rd_kafka_header_get_all`.

    Returns:
        How many messages were measured, how many headers they have, and the bytes of the names and values.
    """
    found = np.empty(4, np.int64)
    count = headers = name_bytes = value_bytes = 0
    for address in messages:
        names = values = 0
        number = _opened(address, functions, found)
        for header in range(number):
            names += _named(functions, header, found)
            values += found[3] if found[2] else 0
        if count and name_bytes + value_bytes + names + values > most_bytes:
            break
        count += 1
        headers += number
        name_bytes += names
        value_bytes += values
    return count, headers, name_bytes, value_bytes


@compiled(types.void(NUMBERS, _ADDRESSES, types.int32[::1], BINARY, BINARY))
def headers_copied(messages: Any, functions: Any, bounds: Any, name: Any, value: Any) -> None:
    """Copy the headers of messages to columns; messages with an error have no row.

    Args:
        messages: Addresses of the messages.
        functions: As of `headers_measured`.
        bounds: Numbers of each message's first header (int32, one more than there are messages without an error).
        name: Three arrays, as of `message_kernels.copied`: of the headers' names.
        value: The same of their values.
    """
    found = np.empty(4, np.int64)
    name_bounds, name_valid, name_data = name
    value_bounds, value_valid, value_data = value
    row = header = name_at = value_at = 0
    bounds[0] = name_bounds[0] = value_bounds[0] = 0
    for address in messages:
        if carray(pointer(address), (WORDS,), np.int64)[0] & INT:
            continue
        for number in range(_opened(address, functions, found)):
            size = _named(functions, number, found)
            name_valid[header] = True
            copy(name_data.ctypes.data + name_at, found[1], size)
            name_at += size
            value_valid[header] = found[2] != 0
            if found[2]:
                copy(value_data.ctypes.data + value_at, found[2], found[3])
                value_at += found[3]
            header += 1
            name_bounds[header] = name_at
            value_bounds[header] = value_at
        row += 1
        bounds[row] = header
