"""Messages with header names of any bytes, as clients write them that check no names."""

import ctypes
from collections.abc import Sequence

from confluent_kafka import cimpl

_PRODUCER = 0
_END, _TOPIC, _PARTITION, _VALUE, _KEY, _FLAGS, _HEADERS = 0, 1, 3, 4, 5, 7, 10  # rd_kafka_vtype_t
_COPY = 2

Names = Sequence[tuple[bytes, bytes | None]]


def produce_raw(servers: str, topic: str, messages: Sequence[tuple[bytes, bytes, Names]], partition: int = 0) -> None:
    """Produce messages of a key, a value and headers, and wait until they are acknowledged."""
    library, pointer, size = ctypes.CDLL(cimpl.__file__), ctypes.c_void_p, ctypes.c_size_t
    for function in ("conf_new", "new", "headers_new"):
        getattr(library, f"rd_kafka_{function}").restype = pointer
    conf = pointer(library.rd_kafka_conf_new())
    assert not library.rd_kafka_conf_set(conf, b"bootstrap.servers", servers.encode(), None, size(0))
    producer = pointer(library.rd_kafka_new(_PRODUCER, conf, None, size(0)))
    for key, value, names in messages:
        headers = pointer(library.rd_kafka_headers_new(size(len(names))))
        for name, text in names:
            length = ctypes.c_ssize_t(-1 if text is None else len(text))
            assert not library.rd_kafka_header_add(headers, name, ctypes.c_ssize_t(len(name)), text, length)
        place = _TOPIC, ctypes.c_char_p(topic.encode()), _PARTITION, ctypes.c_int32(partition)
        record = _VALUE, ctypes.c_char_p(value), size(len(value)), _KEY, ctypes.c_char_p(key), size(len(key))
        assert not library.rd_kafka_producev(producer, *place, *record, _FLAGS, _COPY, _HEADERS, headers, _END)
    assert not library.rd_kafka_flush(producer, 30_000)
    library.rd_kafka_destroy(producer)
