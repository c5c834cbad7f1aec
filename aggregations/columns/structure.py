"""Whether values are valid protobuf, asked of the reference parser for thousands of them in one call.

The columnar parser forgives what the reference parser refuses: groups that end as another group, packed
fields cut off in a number. So that both paths refuse the same, a batch is first parsed whole: each value
becomes one entry of a repeated field, and the result is thrown away.
"""

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from google.protobuf.message import DecodeError, Message

from aggregations.columns.seal import Mask, spans
from aggregations.protobuf import FileProto, MessageType, add_message, message_class, new_file
from envelope import envelope_pb2 as pb

_CHUNK_ROWS: Final = 4096
_TAG: Final = 0x0A
"""Field 1, length-delimited."""
_LENGTH_BYTES: Final = 4
_MOST_BYTES: Final = (1 << 7 * _LENGTH_BYTES) - 1


class Structure:
    """Checks serialized messages of one type.

    Args:
        file: A file with a message "Row": the type.
    """

    def __init__(self, file: FileProto) -> None:
        whole = file.message_type.add(name="Rows")
        field = whole.field.add(name="rows", number=1, type_name=f".{file.package}.Row")
        field.type, field.label = field.TYPE_MESSAGE, field.LABEL_REPEATED
        self._all: type[Message] = message_class(file, "Rows")
        self._one: type[Message] = message_class(file, "Row")

    @classmethod
    def of_payload(cls, payload: MessageType, columns: frozenset[str] | None) -> "Structure":
        """Check messages of a payload type, as far as `columns` need it."""
        file = new_file()
        add_message(file, "Row", payload.descriptor(), columns)
        return cls(file)

    @classmethod
    def of_envelope(cls, payload: MessageType | None, columns: frozenset[str] | None) -> "Structure":
        """Check envelopes and, with a payload type, the payloads in them."""
        file = new_file()
        row = add_message(file, "Row", pb.Envelope.DESCRIPTOR)
        if payload is not None:
            inner = add_message(file, "Payload", payload.descriptor(), columns)
            # On the wire, bytes and a message are the same.
            for field in row.field:
                if field.name == "payload":
                    field.type, field.type_name = field.TYPE_MESSAGE, f".{file.package}.{inner.name}"
        return cls(file)

    def valid(self, values: pa.BinaryArray) -> Mask:
        """Return which values parse. A value that is refused here may yet be good; one that is not, is."""
        _, lengths, _ = spans(values)
        mask = lengths <= _MOST_BYTES
        for start in range(0, len(values), _CHUNK_ROWS):
            rows = slice(start, min(start + _CHUNK_ROWS, len(values)))
            if mask[rows].all() and self._parses_as_one(values[rows], lengths[rows]):
                continue
            mask[rows] &= np.fromiter((self._parses(value) for value in values[rows].to_pylist()), np.bool_)
        return mask

    def _parses_as_one(self, values: pa.BinaryArray, lengths: npt.NDArray[np.int64]) -> bool:
        joined = pc.binary_join_element_wise(_prefixes(lengths), values, b"")
        starts, sizes, _ = spans(joined)
        data = joined.buffers()[2].slice(int(starts[0]), int(sizes.sum()))
        try:
            self._all.FromString(data.to_pybytes())
        except DecodeError:
            return False
        return True

    def _parses(self, value: bytes) -> bool:
        try:
            self._one.FromString(value)
        except DecodeError:
            return False
        return True


def _prefixes(lengths: npt.NDArray[np.int64]) -> pa.BinaryArray:
    """Tag and length in front of every value. Every length takes four bytes: a varint may be longer than it need."""
    size = 1 + _LENGTH_BYTES
    prefixes = np.full((len(lengths), size), _TAG, np.uint8)
    for i in range(_LENGTH_BYTES):
        more = 0x80 if i < _LENGTH_BYTES - 1 else 0
        prefixes[:, 1 + i] = lengths >> 7 * i & 0x7F | more
    bounds = np.arange(len(lengths) + 1, dtype=np.int32) * size
    return pa.Array.from_buffers(pa.binary(), len(lengths), [None, pa.py_buffer(bounds), pa.py_buffer(prefixes)])
