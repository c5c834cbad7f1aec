"""The C API of the librdkafka that confluent-kafka has loaded, by ctypes. All of it is public: rdkafka.h."""

import ctypes
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import confluent_kafka
from confluent_kafka import KafkaError, KafkaException, cimpl

PRODUCER: Final = 0
CONSUMER: Final = 1
_FIRST, _LAST = 12, 16
"""First and last minor version 2.x that were checked."""
_LEVELS: Final = (logging.CRITICAL,) * 3 + (logging.ERROR, logging.WARNING) + (logging.INFO,) * 2 + (logging.DEBUG,)
"""Levels of Python's logging by syslog's, as confluent-kafka maps them."""
_LOG_EVENT: Final = 0x4
_TEXT_BYTES: Final = 512
_METADATA_MILLISECONDS: Final = 10_000

_pointer, _int, _text, _size = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t
_SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {  # result and arguments
    "rd_kafka_last_error": (_int,),
    "rd_kafka_name": (_text, _pointer),
    "rd_kafka_conf_new": (_pointer,),
    "rd_kafka_conf_set": (_int, _pointer, _text, _text, _pointer, _size),
    "rd_kafka_conf_set_events": (None, _pointer, _int),
    "rd_kafka_conf_destroy": (None, _pointer),
    "rd_kafka_new": (_pointer, _int, _pointer, _pointer, _size),
    "rd_kafka_destroy": (None, _pointer),
    "rd_kafka_poll_set_consumer": (_int, _pointer),
    "rd_kafka_set_log_queue": (_int, _pointer, _pointer),
    "rd_kafka_queue_new": (_pointer, _pointer),
    "rd_kafka_queue_get_main": (_pointer, _pointer),
    "rd_kafka_queue_get_consumer": (_pointer, _pointer),
    "rd_kafka_queue_get_partition": (_pointer, _pointer, _text, ctypes.c_int32),
    "rd_kafka_queue_forward": (None, _pointer, _pointer),
    "rd_kafka_queue_destroy": (None, _pointer),
    "rd_kafka_queue_poll": (_pointer, _pointer, _int),
    "rd_kafka_event_type": (_int, _pointer),
    "rd_kafka_event_log": (_int, _pointer, _pointer, _pointer, _pointer),
    "rd_kafka_event_error": (_int, _pointer),
    "rd_kafka_event_error_string": (_text, _pointer),
    "rd_kafka_event_message_next": (_pointer, _pointer),
    "rd_kafka_event_destroy": (None, _pointer),
    "rd_kafka_fatal_error": (_int, _pointer, _pointer, _size),
    "rd_kafka_topic_new": (_pointer, _pointer, _text, _pointer),
    "rd_kafka_topic_name": (_text, _pointer),
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
    "rd_kafka_message_leader_epoch": (ctypes.c_int32, _pointer),
    "rd_kafka_message_headers": (_int, _pointer, _pointer),
    "rd_kafka_header_cnt": (_size, _pointer),
    "rd_kafka_header_get_all": (_int, _pointer, _size, _pointer, _pointer, _pointer),
    "rd_kafka_message_destroy": (None, _pointer),
    "rd_kafka_produce_batch": (_int, _pointer, ctypes.c_int32, _int, _pointer, _int),
    "rd_kafka_produceva": (_pointer, _pointer, _pointer, _size),
    "rd_kafka_error_code": (_int, _pointer),
    "rd_kafka_error_string": (_text, _pointer),
    "rd_kafka_error_destroy": (None, _pointer),
    "rd_kafka_flush": (_int, _pointer, _int),
    "rd_kafka_purge": (_int, _pointer, _int),
    "rd_kafka_outq_len": (_int, _pointer),
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


def text_of(given: bytes | None) -> str:
    """A text of librdkafka's; empty if there is none."""
    return (given or b"").decode(errors="replace")


def check(code: int) -> None:
    """Raise the error that a function returned.

    Raises:
        KafkaException: The code is not 0.
    """
    if code:
        raise KafkaException(KafkaError(code))


def is_known() -> bool:
    """Whether the layouts that are read here were checked: of librdkafka's messages, and of confluent-kafka's clients."""
    both = (confluent_kafka.libversion(), confluent_kafka.version())
    return ctypes.sizeof(ctypes.c_void_p) == 8 and all(map(_is_checked, both))


def _is_checked(version: Any) -> bool:
    """Whether a version was checked; some releases of confluent-kafka return a text, others a tuple that begins with it."""
    parts = (version if isinstance(version, str) else str(version[0])).split(".")
    return parts[0] == "2" and len(parts) > 1 and parts[1].isdigit() and _FIRST <= int(parts[1]) <= _LAST


def client_of(client: Any) -> int:
    """The librdkafka client of an object of confluent-kafka: the first member of its structure, behind Python's."""
    return ctypes.c_size_t.from_address(id(client) + object.__basicsize__).value


def client(kind: int, settings: Mapping[str, Any], events: int = 0) -> int:
    """Create a client.

    Args:
        kind: `PRODUCER` or `CONSUMER`.
        settings: Settings by librdkafka's names. The `logger` of confluent-kafka's clients is left out: see `Logs`.
        events: Events that its queue has instead of calling functions: `RD_KAFKA_EVENT_...`, added.

    Raises:
        KafkaException: A setting is invalid.
    """
    library, text = functions(), ctypes.create_string_buffer(_TEXT_BYTES)
    conf = library.rd_kafka_conf_new()
    library.rd_kafka_conf_set_events(conf, events)
    own = {name: value for name, value in settings.items() if name != "logger"} | {"log.queue": True}
    for name, value in own.items():
        written = str(value).lower() if isinstance(value, bool) else str(value)
        if library.rd_kafka_conf_set(conf, name.encode(), written.encode(), text, _TEXT_BYTES):
            library.rd_kafka_conf_destroy(conf)
            raise KafkaException(KafkaError(KafkaError._INVALID_ARG, text_of(text.value)))
    made: int | None = library.rd_kafka_new(kind, conf, text, _TEXT_BYTES)
    if made is None:
        error = library.rd_kafka_last_error()
        library.rd_kafka_conf_destroy(conf)
        what = f"Failed to create {'consumer' if kind == CONSUMER else 'producer'}: {text_of(text.value)}"
        raise KafkaException(KafkaError(error, what))
    if kind == CONSUMER:
        library.rd_kafka_poll_set_consumer(made)
    return made


def released(owner: object, release: Callable[..., None], *arguments: Any) -> "weakref.finalize[..., Any]":
    """Release what an object has of a client when it is collected, or when the process ends.

    A daemon thread runs on while the process ends: what belongs to it is not released then.
    """
    made = weakref.finalize(owner, release, *arguments)
    made.atexit = not threading.current_thread().daemon
    return made


class Logs:
    """The log lines of a client, which its user passes on to a logger.

    Attributes:
        queue: The client's queue, to be destroyed before it.
    """

    def __init__(self, kafka: int, logger: logging.Logger) -> None:
        self._kafka = kafka
        self._logger = logger
        self.queue: int = functions().rd_kafka_queue_new(kafka)
        functions().rd_kafka_set_log_queue(kafka, self.queue)

    def pass_on(self) -> None:
        """Pass on the lines so far."""
        library, facility, text, level = functions(), ctypes.c_char_p(), ctypes.c_char_p(), ctypes.c_int()
        name = library.rd_kafka_name(self._kafka)
        while event := library.rd_kafka_queue_poll(self.queue, 0):
            places = map(ctypes.byref, (facility, text, level))
            if library.rd_kafka_event_type(event) == _LOG_EVENT and not library.rd_kafka_event_log(event, *places):
                words = map(text_of, (facility.value, name, text.value))
                self._logger.log(_LEVELS[level.value & 7], "%s [%s] %s", *words)
            library.rd_kafka_event_destroy(event)


class Message(ctypes.Structure):
    """`rd_kafka_message_t`."""

    _fields_ = (
        ("err", ctypes.c_int),
        ("topic", ctypes.c_void_p),
        ("partition", ctypes.c_int32),
        ("payload", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
        ("key", ctypes.c_void_p),
        ("key_size", ctypes.c_size_t),
        ("offset", ctypes.c_int64),
        ("private", ctypes.c_void_p),
    )

    @property
    def error(self) -> KafkaError:
        """The error of a consumed message whose `err` is not zero, with librdkafka's words for it.

        For a message that was not delivered, librdkafka would give the bytes of the payload as these words.
        """
        return KafkaError(self.err, text_of(functions().rd_kafka_message_errstr(ctypes.addressof(self))))


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
