"""Checks with the reference parser whether values are valid protobuf, a whole batch in one call.

The columnar parser accepts some values that the reference parser rejects: groups that end as another group, packed
fields truncated within a number. So that both paths reject the same records, a batch is parsed once more, as one
message, and the result is discarded.
"""

from typing import Any

import numpy as np
import pyarrow as pa
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from aggregations.columns.arrays import Mask
from aggregations.columns.seal import spans
from aggregations.definition.protobuf import FileProto, MessageType, add_message, message_class, new_file
from envelope import envelope_pb2 as pb


class Structure:
    """Checks serialized messages of one type.

    Args:
        file: A file with a message "Row": the type.
        envelope: The type is the envelope. As in the codec, a field whose wire type differs from the schema is then an
            error, not an unknown field.
    """

    def __init__(self, file: FileProto, *, envelope: bool = False) -> None:
        self._row: type[Any] = message_class(file, "Row")
        self._envelope = envelope

    @classmethod
    def of_payload(cls, payload: MessageType, columns: frozenset[str] | None) -> "Structure":
        """Check messages of a payload type, as far as `columns` require."""
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
            # On the wire, bytes and messages are encoded the same way.
            for field in row.field:
                if field.name == "payload":
                    field.type, field.type_name = field.TYPE_MESSAGE, f".{file.package}.{inner.name}"
        return cls(file, envelope=True)

    def all_valid(self, values: pa.BinaryArray) -> bool:
        """Whether every value parses, provided that each is complete.

        Concatenated messages parse as one message, and an error in one of them is an error of the whole.
        Only a value that ends within a field or a group could be completed by the next value; the columnar
        parser must have rejected such values before.
        """
        starts, lengths, _ = spans(values)
        if not len(values):
            return True
        data = values.buffers()[2].slice(int(starts[0]), int(lengths.sum()))
        return self._parses(data.to_pybytes())

    def valid(self, values: pa.BinaryArray) -> Mask:
        """Return which values parse, checked one by one."""
        return np.fromiter((self._parses(value) for value in values.to_pylist()), np.bool_, len(values))

    def _parses(self, value: bytes) -> bool:
        try:
            message = self._row.FromString(value)
        except DecodeError:
            return False
        if not self._envelope:
            return True
        # Hops with unknown fields are rare; detecting that there are none costs 0.2 us per hop.
        odd = any(map(len, map(UnknownFieldSet, message.chain)))
        return not _misread(message, pb.Envelope) and not (odd and any(_misread(hop, pb.Hop) for hop in message.chain))


def _misread(message: Message, kind: type[Message]) -> bool:
    """Whether the fields unknown to the parser include a field of `kind`."""
    unknown, known = UnknownFieldSet(message), kind.DESCRIPTOR.fields_by_number
    return any(unknown[i].field_number in known for i in range(len(unknown)))
