"""CRC32C (RFC 3720, appendix B.4) in compiled code: by the processor's instruction where there is one."""

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import int64, types, uint32
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from aggregations.columns.wire import load
from persistence.compiled import helper

_POLYNOMIAL: Final = 0x82F63B78
"""Of CRC32C, reflected."""


def tables_of(polynomial: int) -> Any:
    """Eight tables of a reflected polynomial: the CRC of a byte that is followed by up to seven zeros."""
    tables = np.zeros((8, 256), np.uint32)
    tables[0] = np.arange(256)
    for _ in range(8):
        tables[0] = np.where(tables[0] & 1, (tables[0] >> 1) ^ np.uint32(polynomial), tables[0] >> 1)
    for i in range(1, 8):
        tables[i] = tables[0][tables[i - 1] & 255] ^ (tables[i - 1] >> 8)
    return tables


_TABLES: Final = tables_of(_POLYNOMIAL)


def _instruction(size: int) -> Any:
    """A function that returns the CRC after `size` more bytes, by SSE 4.2."""

    @intrinsic  # type: ignore[untyped-decorator]
    def more_bytes(context: Any, crc: Any, array: Any, at: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            crc, array, at = arguments
            read = load(context, builder, signature.args[1], (array, at), 8 * size)
            whole = ir.IntType(max(8 * size, 32))
            kind = ir.FunctionType(whole, [whole, read.type])
            name = f"llvm.x86.sse42.crc32.{whole.width}.{8 * size}"
            function = cgutils.get_or_insert_function(builder.module, kind, name)
            return builder.zext(builder.call(function, [builder.trunc(crc, whole), read]), ir.IntType(64))

        return types.int64(types.int64, array, types.int64), generate

    return more_bytes


_eight_bytes, _four_bytes, _byte = map(_instruction, (8, 4, 1))


@helper
def by_instruction(data: Any, at: int, end: int) -> int:
    """CRC of `data[at:end]`."""
    crc = int64(0xFFFFFFFF)
    while end - at >= 8:
        crc = _eight_bytes(crc, data, at)
        at += 8
    if end - at >= 4:
        crc = _four_bytes(crc, data, at)
        at += 4
    while at < end:
        crc = _byte(crc, data, at)
        at += 1
    return crc ^ int64(0xFFFFFFFF)


@helper
def by_tables(data: Any, at: int, end: int) -> int:
    """CRC of `data[at:end]`."""
    crc = uint32(0xFFFFFFFF)
    while end - at >= 8:
        for i in range(4):
            crc ^= uint32(data[at + i]) << uint32(8 * i)
        crc = (
            _TABLES[7, crc & 255]
            ^ _TABLES[6, (crc >> 8) & 255]
            ^ _TABLES[5, (crc >> 16) & 255]
            ^ _TABLES[4, crc >> 24]
            ^ _TABLES[3, data[at + 4]]
            ^ _TABLES[2, data[at + 5]]
            ^ _TABLES[1, data[at + 6]]
            ^ _TABLES[0, data[at + 7]]
        )
        at += 8
    while at < end:
        crc = uint32(_TABLES[0, (crc ^ data[at]) & 255] ^ (crc >> 8))
        at += 1
    return int64(crc ^ uint32(0xFFFFFFFF))


HAS_INSTRUCTION: Final[bool] = "+sse4.2" in cpu_target.target_context.codegen().magic_tuple()[2]
"""Whether code is compiled for processors that have it."""
crc32c = by_instruction if HAS_INSTRUCTION else by_tables
