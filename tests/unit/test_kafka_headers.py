"""Headers of messages whose names are not UTF-8 are read, and do not end the process."""

from confluent_kafka import Consumer, TopicPartition

from persistence.kafka.headers import headers_of
from tests.support.raw_headers import Names, produce_raw

SENT: list[Names] = [
    [],
    [(b"a", b"1"), (b"a\xffb", b"2"), (b"c", None)],
    [("größe".encode(), b"\xff"), (b"", b""), (b"", None)],
    [(b"\x80", None), (b"\xff", b"")],
]
READ: list[list[tuple[str, bytes | None]]] = [
    [],
    [("a", b"1"), ("\ufffd", b"2"), ("c", None)],
    [("größe", b"\xff"), ("", b""), ("", None)],
    [("\ufffd", None), ("\ufffd", b"")],
]
TIMES = 50
"""So many that Python specialises the calls."""


def test_names_that_are_not_utf_8_are_replaced_whenever_headers_are_read() -> None:
    settings = {"bootstrap.servers": "x", "group.id": "g", "auto.offset.reset": "error", "log_level": 0}
    mock = Consumer({**settings, "test.mock.num.brokers": 1})
    broker = mock.list_topics("t", 10).brokers[1]
    servers = f"{broker.host}:{broker.port}"
    produce_raw(servers, "t", [(b"k", b"v", names) for names in SENT * TIMES])
    consumer = Consumer({**settings, "bootstrap.servers": servers})
    consumer.assign([TopicPartition("t", 0, 0)])
    messages = []
    while len(messages) < len(SENT) * TIMES:
        messages += consumer.consume(len(SENT) * TIMES - len(messages), 10)
    for _ in range(2):
        assert [headers_of(one) for one in messages] == READ * TIMES
        assert [one.value() for one in messages] == [b"v"] * len(messages)
    consumer.close()
    mock.close()
