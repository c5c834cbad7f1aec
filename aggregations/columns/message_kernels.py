"""Reads librdkafka's messages (`rd_kafka_message_t`) at their addresses, as compiled code.

The addresses of librdkafka's functions are arguments: code that contains them could not be cached on disk.
"""

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from persistence.compiled import NUMBERS, compiled, pointer

WORDS: Final = 9
"""`rd_kafka_message_t` of rdkafka.h in words of eight bytes: error (int), topic, partition (int32), payload, its
length, key, its length, offset (int64), private."""
_TOPIC: Final = 1
_PARTITION: Final = 2
_PAYLOAD: Final = 3
_KEY: Final = 5
_OFFSET: Final = 7
INT: Final = 0xFFFFFFFF
"""The bits of a C int."""
_NO_HEADERS: Final = -156 & INT
"""What `rd_kafka_message_headers` returns of a message without headers: `RD_KAFKA_RESP_ERR__NOENT`."""


@intrinsic  # type: ignore[untyped-decorator]
def copy(context: Any, to: Any, source: Any, size: Any) -> Any:
    """Copy `size` bytes from one address to another."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, source, size = arguments
        pointers = (builder.inttoptr(one, cgutils.voidptr_t) for one in (to, source))
        cgutils.raw_memcpy(builder, *pointers, size, 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def call(context: Any, function: Any, arguments: Any) -> Any:
    """Call a function at an address with arguments of eight bytes, given as a tuple.

    Returns:
        int64, also of a function that returns less or nothing: then only the lower bytes count, or none.
    """

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(64), [ir.IntType(64)] * len(arguments))
        callee = builder.inttoptr(given[0], kind.as_pointer())
        return builder.call(callee, cgutils.unpack_tuple(builder, given[1]))

    return types.int64(types.int64, types.UniTuple(types.int64, len(arguments))), generate


@compiled(types.UniTuple(types.int64, 4)(NUMBERS, types.int64))
def measured(messages: Any, most_bytes: int) -> tuple[int, int, int, int]:
    """Measure messages up to a number of bytes; at least one, if there is one.

    Returns:
        How many messages were measured, how many of them have an error, and the bytes of the keys and values of the
        others.
    """
    count = errors = key_bytes = value_bytes = 0
    for address in messages:
        words = carray(pointer(address), (WORDS,), np.int64)
        if words[0] & INT:
            errors += 1
        else:
            size = words[_PAYLOAD + 1] + words[_KEY + 1]
            if count > errors and key_bytes + value_bytes + size > most_bytes:
                break
            key_bytes += words[_KEY + 1] if words[_KEY] else 0
            value_bytes += words[_PAYLOAD + 1] if words[_PAYLOAD] else 0
        count += 1
    return count, errors, key_bytes, value_bytes


BINARY: Final = types.Tuple((types.int32[::1], types.boolean[::1], types.uint8[::1]))
"""Bounds, validity and buffer of a column of bytes."""


@compiled(
    types.void(
        NUMBERS, types.int64, types.int32[::1], types.int64[::1], types.int64[::1], BINARY, BINARY, types.int64[::1]
    )
)
def copied(
    messages: Any, timestamp: int, partitions: Any, offsets: Any, timestamps: Any, key: Any, value: Any, errors: Any
) -> None:
    """Copy what messages contain to columns.

    Args:
        messages: Addresses of the messages.
        timestamp: Address of `rd_kafka_message_timestamp`.
        partitions: int32 of each message without an error.
        offsets: int64.
        timestamps: int64, milliseconds.
        key: Three arrays: bounds of the keys in the buffer (int32, one more than there are messages), whether there is
            a key, and the buffer.
        value: The same of the values.
        errors: Places of the messages with an error.
    """
    row = failed = 0
    key_bounds, key_valid, key_data = key
    value_bounds, value_valid, value_data = value
    key_at = value_at = 0
    key_bounds[0] = value_bounds[0] = 0
    for place in range(len(messages)):
        words = carray(pointer(messages[place]), (WORDS,), np.int64)
        if words[0] & INT:
            errors[failed] = place
            failed += 1
            continue
        partitions[row] = np.int32(words[_PARTITION] & INT)
        offsets[row] = words[_OFFSET]
        timestamps[row] = call(timestamp, (messages[place], 0))
        key_valid[row] = words[_KEY] != 0
        if words[_KEY]:
            copy(key_data.ctypes.data + key_at, words[_KEY], words[_KEY + 1])
            key_at += words[_KEY + 1]
        value_valid[row] = words[_PAYLOAD] != 0
        if words[_PAYLOAD]:
            copy(value_data.ctypes.data + value_at, words[_PAYLOAD], words[_PAYLOAD + 1])
            value_at += words[_PAYLOAD + 1]
        row += 1
        key_bounds[row] = key_at
        value_bounds[row] = value_at


@compiled(types.void(NUMBERS, types.int64, types.int64, types.int64[::1], types.int32[::1], types.boolean[::1]))
def described(messages: Any, leader_epoch: int, headers: int, topics: Any, epochs: Any, headed: Any) -> None:
    """Copy what messages without an error are about.

    Args:
        messages: Addresses of the messages.
        leader_epoch: Address of `rd_kafka_message_leader_epoch`.
        headers: Address of `rd_kafka_message_headers`.
        topics: Set to the address of each message's topic.
        epochs: Set to its leader epoch; negative if unknown.
        headed: Set to whether it has headers.
    """
    row, found = 0, np.empty(1, np.int64)
    for address in messages:
        words = carray(pointer(address), (WORDS,), np.int64)
        if words[0] & INT:
            continue
        topics[row] = words[_TOPIC]
        epochs[row] = np.int32(call(leader_epoch, (address,)) & INT)
        headed[row] = call(headers, (address, found.ctypes.data)) & INT != _NO_HEADERS
        row += 1


@compiled(types.int64(types.int64[::1], types.int64, types.int64, types.int64))
def taken(messages: Any, consume: int, queue: int, milliseconds: int) -> int:
    """Take messages from a queue; their addresses come first in `messages`, and 0 in every other place.

    What librdkafka drops itself, because it was fetched before a seek or a new assignment, leaves its address behind
    those that count (rd_kafka_purge_outdated_messages): to give it back would free it twice. No signal handler runs
    between the call and the removal of these addresses.

    Args:
        messages: Receives the addresses.
        consume: The address of `rd_kafka_consume_batch_queue`.
        queue: The queue.
        milliseconds: How long to wait for messages.

    Returns:
        How many were taken; -1 after an error.
    """
    count: int = call(consume, (queue, milliseconds, messages.ctypes.data, len(messages)))
    messages[max(count, 0) :] = 0
    return count


@compiled(types.void(types.int64[::1], types.int64))
def destroyed(messages: Any, destroy: int) -> None:
    """Give messages back, each once: its address becomes 0. `destroy` is the address of `rd_kafka_message_destroy`."""
    for place in range(len(messages)):
        address = messages[place]
        if address:
            messages[place] = 0
            call(destroy, (address,))
