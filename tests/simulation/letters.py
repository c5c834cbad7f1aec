"""Dead letters of a world, and their redrive by the real code, from the bytes and headers of a dead letter."""

import msgspec

from aggregations.definition.element import Record
from aggregations.definition.flow import Flow
from aggregations.report import DeadLetter
from envelope import EnvelopeError, Hop, Reason
from envelope import deadletter as dead
from envelope.deadletter import DeadLetterRecord, Form, dead_letter_record, own_headers
from jobs.dead_letters import redrive
from tests.simulation.functions import Payload
from tests.simulation.oracle import Violation
from tests.simulation.service import Outgoing, payload_of
from tests.simulation.topology import FLOW

_MOST_BYTES = 1 << 20
_encode_json = msgspec.json.Encoder().encode


def record_of(letter: DeadLetter, flow: Flow[object], generation: int = 1) -> DeadLetterRecord:
    """The record of a flow's dead letter in the dead-letter topic."""
    record = letter.record
    facts = dead.DeadLetterHeaders(
        record.topic,
        record.partition,
        record.offset,
        letter.reason,
        topic_id=record.topic_id,
        stage=letter.stage,
        application=flow.name,
        generation=generation,
        hole=letter.hole,
        items=letter.items,
        form=Form.ENVELOPE if flow.source_of(record.topic).envelope else Form.PAYLOAD,
    )
    return dead_letter_record(facts, record.key, record.value, record.headers, _MOST_BYTES)


def facts_of(letter: Record) -> dead.DeadLetterHeaders:
    """The facts in a record of a dead-letter topic."""
    facts = dead.DeadLetterHeaders.read(letter.headers)
    assert facts is not None
    return facts


def is_like(one: dead.DeadLetterHeaders, other: dead.DeadLetterHeaders) -> bool:
    """Whether two dead letters are of copies of one record that was rejected at the same place of the flow."""
    same = (one.stage, one.reason) == (other.stage, other.reason)
    return same and (one.topic, one.partition, one.offset) != (other.topic, other.partition, other.offset)


def brought_back(letter: Record, facts: dead.DeadLetterHeaders, *, mend: bool) -> Outgoing:
    """The redriven message of a dead letter.

    Args:
        letter: The record in a dead-letter topic.
        facts: Its facts.
        mend: Mend its payload for the reader that rejected it; otherwise redrive it byte for byte.

    Raises:
        Violation: It cannot be redriven.
    """
    new = _encode_json(_mended(payload_of(letter.value), facts.application))
    place = Hop(letter.topic, letter.partition, letter.offset, topic_id=letter.topic_id)
    try:
        value = redrive.redriven(
            letter.key,
            letter.value,
            letter.headers,
            facts,
            place,
            (lambda key, value: new) if mend else None,
            asserted=facts.reason is Reason.UNPROVEN,
        )
    except EnvelopeError as error:
        raise Violation(f"a dead letter of {facts.application} cannot be redriven: {error}") from error
    headers = own_headers(letter.headers)
    return Outgoing(facts.topic, letter.key, value, headers, facts.partition, facts.stage, facts.application)


def _mended(payload: Payload, application: str) -> Payload:
    """The payload after a fix for an application."""
    if application == FLOW:
        return {**payload, "bad": ""}
    return {**payload, "fixed": f"{payload['fixed']} {application}"}
