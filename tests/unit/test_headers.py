"""The envelope's mirror in headers, and CloudEvents in binary mode."""

from itertools import product

import pytest

from envelope import Envelope, EnvelopeError, Reason
from envelope.headers import MIRRORED, from_cloudevents, mirror

EVENT = [
    ("ce_specversion", b"1.0"),
    ("ce_id", b"A234-1234-1234"),
    ("ce_source", b"/mycontext"),
    ("ce_type", b"com.example.someevent"),
    ("ce_time", b"2018-04-05T17:31:00.000001Z"),
    ("content-type", b"application/json"),
    ("traceparent", b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
    ("ce_comexampleextension1", b"value"),
    ("other", b"\xff"),
]


def without(*names: str) -> list:
    return [header for header in EVENT if header[0] not in names]


def test_a_cloudevent_becomes_an_envelope() -> None:
    event = from_cloudevents(EVENT, b"{}", b"key")
    assert isinstance(event.event_time_us, int)
    assert event == Envelope(
        payload=b"{}",
        key=b"key",
        event_id="/mycontext#A234-1234-1234",
        event_time_us=1_522_949_460_000_001,
        payload_type="com.example.someevent",
        content_type="application/json",
        producer="/mycontext",
        traceparent="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    )


def test_the_mirror_of_that_envelope_says_the_same() -> None:
    headers = mirror(from_cloudevents(EVENT, b"{}", None), "orders:3:17", "republisher")
    assert dict(headers) == dict(EVENT[:7]) | {"hw-root": b"orders:3:17"}
    assert {name for name, _ in headers} <= MIRRORED


def test_the_mirror_of_an_envelope_that_names_nothing_is_still_a_cloudevent() -> None:
    headers = dict(mirror(Envelope(b"", event_time_us=2**62), "orders:3:17", "legs"))
    assert headers == {
        "ce_specversion": b"1.0",
        "ce_id": b"orders:3:17",
        "ce_source": b"legs",
        "ce_type": b"message",
        "hw-root": b"orders:3:17",
    }


@pytest.mark.parametrize("name", ["ce_specversion", "ce_id", "ce_source", "ce_type"])
def test_a_cloudevent_without_a_required_attribute_is_refused(name: str) -> None:
    with pytest.raises(EnvelopeError, match=name) as caught:
        from_cloudevents(without(name), b"", None)
    assert caught.value.reason is Reason.MISSING_FIELD


@pytest.mark.parametrize(
    ("name", "value", "reason", "text"),
    [
        ("ce_specversion", b"2.0", Reason.UNSUPPORTED_FORMAT, "the CloudEvents version is not 1$"),
        ("ce_specversion", b"10.0", Reason.UNSUPPORTED_FORMAT, "the CloudEvents version is not 1$"),
        ("ce_time", b"yesterday", Reason.BAD_PAYLOAD, "ce_time is not an RFC 3339 time$"),
        ("ce_time", b"2018-04-05T17:31:60Z", Reason.BAD_PAYLOAD, "ce_time is not an RFC 3339 time$"),
        ("ce_time", b"9999-12-31T23:59:60Z", Reason.BAD_PAYLOAD, "ce_time is not an RFC 3339 time$"),
        ("ce_time", b"2018-04-05T17:31:00", Reason.BAD_PAYLOAD, "ce_time has no offset from UTC$"),
        ("ce_type", b"\xff", Reason.BAD_PAYLOAD, "a CloudEvents header is not UTF-8$"),
    ],
)
def test_a_cloudevent_with_a_wrong_attribute_is_refused(name: str, value: bytes, reason: Reason, text: str) -> None:
    with pytest.raises(EnvelopeError, match=text) as caught:
        from_cloudevents([*without(name), (name, value)], b"", None)
    assert caught.value.reason is reason


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("1990-12-31T23:59:60Z", "1991-01-01T00:00:00Z"),
        ("1990-12-31T15:59:60.25-08:00", "1991-01-01T00:00:00.25Z"),
        ("1985-04-12t23:20:50.52z", "1985-04-12T23:20:50.52Z"),
        ("1937-01-01T12:00:27.87+00:20", "1937-01-01T11:40:27.87Z"),
    ],
)
def test_the_examples_of_rfc_3339_are_times(text: str, same: str) -> None:
    """Section 5.8 of it: leap seconds, and small letters."""
    event, other = (
        from_cloudevents([*without("ce_time"), ("ce_time", one.encode())], b"", None) for one in (text, same)
    )
    assert event.event_time_us == other.event_time_us is not None


def test_events_of_different_sources_have_different_ids_whatever_these_contain() -> None:
    """CloudEvents' issues 331 and 391: `/b` with id `7#1`, and `/b#7` with id `1`, were one event for a filter."""
    parts = ["/b", "/b#7", "/b%237", "/b%25", "/b%"]
    ids = ["1", "7#1", "#1", "%231", "23#1"]
    events = [
        from_cloudevents(
            [*without("ce_source", "ce_id"), ("ce_source", one.encode()), ("ce_id", two.encode())], b"", None
        )
        for one in parts
        for two in ids
    ]
    assert len({event.event_id for event in events}) == len(parts) * len(ids)
    for event, (_, two) in zip(events, product(parts, ids), strict=True):
        assert dict(mirror(event, "orders:3:17", "legs"))["ce_id"] == two.encode()


def test_an_event_with_nothing_but_what_is_required_has_the_envelopes_defaults() -> None:
    assert from_cloudevents(EVENT[:4], b"{}", None) == Envelope(
        b"{}", event_id="/mycontext#A234-1234-1234", payload_type="com.example.someevent", producer="/mycontext"
    )


def test_cloudevents_own_trace_context_comes_before_the_headers() -> None:
    assert from_cloudevents([*EVENT, ("CE_TraceParent", b"00-own")], b"", None).traceparent == "00-own"
    assert from_cloudevents([*EVENT, ("ce_traceparent", b"")], b"", None).traceparent == EVENT[6][1].decode()


def test_every_missing_attribute_is_named() -> None:
    with pytest.raises(EnvelopeError, match=r"missing header ce_id, ce_type$"):
        from_cloudevents([("ce_specversion", b"1.0"), ("ce_source", b"s"), ("ce_type", b"")], b"", None)


def test_without_a_time_the_event_has_none() -> None:
    event = from_cloudevents(without("ce_time"), b"", None)
    assert event.event_time_us is None
    assert "ce_time" not in dict(mirror(event, "orders:3:17", "legs"))
