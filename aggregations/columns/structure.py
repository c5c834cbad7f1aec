"""Whether values are valid protobuf, asked of the reference parser for a whole batch in one call.

The columnar parser forgives what the reference parser refuses: groups that end as another group, packed
fields cut off within a number. So that both paths refuse the same, a batch is parsed once more, as one
message, and the result is thrown away.
"""

import numpy as np
import pyarrow as pa
from google.protobuf.message import DecodeError, Message

from aggregations.columns.seal import Mask, spans
from aggregations.protobuf import FileProto, MessageType, add_message, message_class, new_file
from envelope import envelope_pb2 as pb


class Structure:
    """Checks serialized messages of one type.

    Args:
        file: A file with a message "Row": the type.
    """

    def __init__(self, file: FileProto) -> None:
        self._row: type[Message] = message_class(file, "Row")

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

    def all_valid(self, values: pa.BinaryArray) -> bool:
        """Whether every value parses, if each one is known to be whole.

        Messages one behind the other parse as one message, and an error in one of them is an error of all.
        Only a value that ends within a field or a group could be completed by the next one: such a one the
        columnar parser must have refused before.
        """
        starts, lengths, _ = spans(values)
        if not len(values):
            return True
        data = values.buffers()[2].slice(int(starts[0]), int(lengths.sum()))
        return self._parses(data.to_pybytes())

    def valid(self, values: pa.BinaryArray) -> Mask:
        """Return which values parse, tried one by one."""
        return np.fromiter((self._parses(value) for value in values.to_pylist()), np.bool_, len(values))

    def _parses(self, value: bytes) -> bool:
        try:
            self._row.FromString(value)
        except DecodeError:
            return False
        return True
