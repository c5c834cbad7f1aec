"""The C API of the librdkafka that confluent-kafka has loaded, by ctypes. All of it is public: rdkafka.h."""

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, cimpl

_CONSUMER: Final = 1
_TEXT_BYTES: Final = 512
_METADATA_MILLISECONDS: Final = 10_000

_pointer, _int, _text, _size = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t
_SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {  # result and arguments
    "rd_kafka_last_error": (_int,),
    "rd_kafka_name": (_text, _pointer),
    "rd_kafka_conf_new": (_pointer,),
    "rd_kafka_conf_set": (_int, _pointer, _text, _text, _pointer, _size),
    "rd_kafka_conf_destroy": (None, _pointer),
    "rd_kafka_new": (_pointer, _int, _pointer, _pointer, _size),
    "rd_kafka_destroy": (None, _pointer),
    "rd_kafka_poll_set_consumer": (_int, _pointer),
    "rd_kafka_set_log_queue": (_int, _pointer, _pointer),
    "rd_kafka_queue_new": (_pointer, _pointer),
    "rd_kafka_queue_get_consumer": (_pointer, _pointer),
    "rd_kafka_queue_destroy": (None, _pointer),
    "rd_kafka_queue_poll": (_pointer, _pointer, _int),
    "rd_kafka_event_type": (_int, _pointer),
    "rd_kafka_event_log": (_int, _pointer, _pointer, _pointer, _pointer),
    "rd_kafka_event_destroy": (None, _pointer),
    "rd_kafka_topic_new": (_pointer, _pointer, _text, _pointer),
    "rd_kafka_topic_destroy": (None, _pointer),
    "rd_kafka_metadata": (_int, _pointer, _int, _pointer, _pointer, _int),
    "rd_kafka_metadata_destroy": (None, _pointer),
    "rd_kafka_topic_partition_list_new": (_pointer, _int),
    "rd_kafka_topic_partition_list_add": (_pointer, _pointer, _text, ctypes.c_int32),
    "rd_kafka_topic_partition_list_set_offset": (_int, _pointer, _text, ctypes.c_int32, ctypes.c_int64),
    "rd_kafka_topic_partition_list_destroy": (None, _pointer),
    "rd_kafka_assign": (_int, _pointer, _pointer),
    "rd_kafka_pause_partitions": (_int, _pointer, _pointer),
    "rd_kafka_resume_partitions": (_int, _pointer, _pointer),
    "rd_kafka_consume_batch_queue": (ctypes.c_ssize_t, _pointer, _int, _pointer, _size),
    "rd_kafka_message_errstr": (_text, _pointer),
    "rd_kafka_message_timestamp": (ctypes.c_int64, _pointer, _pointer),
    "rd_kafka_message_headers": (_int, _pointer, _pointer),
    "rd_kafka_header_cnt": (_size, _pointer),
    "rd_kafka_header_get_all": (_int, _pointer, _size, _pointer, _pointer, _pointer),
    "rd_kafka_message_destroy": (None, _pointer),
}


@cache
def functions() -> Any:
    """The functions: those of the library that confluent-kafka's module is linked with, wherever it is."""
    library = ctypes.CDLL(cimpl.__file__)
    for name, (result, *arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def address(function: Any) -> int:
    """The address of one of the functions."""
    found = ctypes.cast(function, ctypes.c_void_p).value
    assert found is not None
    return found


def check(code: int) -> None:
    """Raise the error that a function returned.

    Raises:
        KafkaException: The code is not 0.
    """
    if code:
        raise KafkaException(KafkaError(code))


def consumer(settings: Mapping[str, Any]) -> int:
    """Create a consumer.

    Raises:
        KafkaException: A setting is invalid.
    """
    library, text = functions(), ctypes.create_string_buffer(_TEXT_BYTES)
    conf = library.rd_kafka_conf_new()
    for name, value in settings.items():
        written = str(value).lower() if isinstance(value, bool) else str(value)
        if library.rd_kafka_conf_set(conf, name.encode(), written.encode(), text, _TEXT_BYTES):
            library.rd_kafka_conf_destroy(conf)
            raise KafkaException(KafkaError(KafkaError._INVALID_ARG, text.value.decode(errors="replace")))
    made: int | None = library.rd_kafka_new(_CONSUMER, conf, text, _TEXT_BYTES)
    if made is None:
        error = library.rd_kafka_last_error()
        library.rd_kafka_conf_destroy(conf)
        what = f"Failed to create consumer: {text.value.decode(errors='replace')}"
        raise KafkaException(KafkaError(error, what))
    library.rd_kafka_poll_set_consumer(made)
    return made


def look_up_leaders(kafka: int, topic: str) -> None:
    """Ask for the leaders of a topic's partitions; see `persistence.kafka.assign`. Without an answer, go on."""
    library, found = functions(), ctypes.c_void_p()
    if handle := library.rd_kafka_topic_new(kafka, topic.encode(), None):
        if not library.rd_kafka_metadata(kafka, 0, handle, ctypes.byref(found), _METADATA_MILLISECONDS):
            library.rd_kafka_metadata_destroy(found)
        library.rd_kafka_topic_destroy(handle)


@contextmanager
def partitions(topic: str, offsets: Mapping[int, int | None]) -> Iterator[int]:
    """A list of partitions with offsets, as the functions take it."""
    library, name = functions(), topic.encode()
    made = library.rd_kafka_topic_partition_list_new(len(offsets))
    try:
        for partition, offset in sorted(offsets.items()):
            library.rd_kafka_topic_partition_list_add(made, name, partition)
            if offset is not None:
                check(library.rd_kafka_topic_partition_list_set_offset(made, name, partition, offset))
        yield made
    finally:
        library.rd_kafka_topic_partition_list_destroy(made)
