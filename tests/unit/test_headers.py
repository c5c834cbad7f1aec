"""The envelope's twin in headers, and CloudEvents in binary mode."""

import pytest

from envelope import Envelope, EnvelopeError, Reason
from envelope.headers import TWIN, from_cloudevents, twin

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


def without(name: str) -> list:
    return [header for header in EVENT if header[0] != name]


def test_a_cloudevent_becomes_an_envelope() -> None:
    assert from_cloudevents(EVENT, b"{}", b"key") == Envelope(
        payload=b"{}",
        key=b"key",
        event_id="/mycontext#A234-1234-1234",
        event_time_us=1_522_949_460_000_001,
        payload_type="com.example.someevent",
        content_type="application/json",
        producer="/mycontext",
        traceparent="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    )


def test_the_twin_of_that_envelope_says_the_same() -> None:
    headers = twin(from_cloudevents(EVENT, b"{}", None), "orders:3:17", "republisher")
    assert dict(headers) == dict(EVENT[:7]) | {"hw-root": b"orders:3:17"}
    assert {name for name, _ in headers} <= TWIN


def test_the_twin_of_an_envelope_that_names_nothing_is_still_a_cloudevent() -> None:
    headers = dict(twin(Envelope(b"", event_time_us=2**62), "orders:3:17", "legs"))
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
    ("name", "value", "reason"),
    [
        ("ce_specversion", b"2.0", Reason.UNSUPPORTED_FORMAT),
        ("ce_time", b"yesterday", Reason.BAD_PAYLOAD),
        ("ce_time", b"2018-04-05T17:31:00", Reason.BAD_PAYLOAD),
        ("ce_type", b"\xff", Reason.BAD_PAYLOAD),
    ],
)
def test_a_cloudevent_with_a_wrong_attribute_is_refused(name: str, value: bytes, reason: Reason) -> None:
    with pytest.raises(EnvelopeError) as caught:
        from_cloudevents([*without(name), (name, value)], b"", None)
    assert caught.value.reason is reason


def test_without_a_time_the_event_has_none() -> None:
    assert from_cloudevents(without("ce_time"), b"", None).event_time_us is None
