"""The filter of a republisher, record by record: what it sees, what it refuses, and whose state it is."""

import json
from datetime import timedelta
from typing import Any

import pytest

from envelope import Envelope, Hop, Reason, Verdict, encode
from envelope.filters import (
    Decreasing,
    DedupPolicy,
    EventIdFilter,
    Filter,
    Gaps,
    ProducerFilter,
    Scope,
    SequenceFilter,
    Stamp,
    deduplicate,
    from_envelope,
    from_header,
    from_value,
)
from envelope.redrive import Redrive, redrive_hops
from jobs.environment import UsageError
from jobs.republish import InputRecord, InputTopics, JsonPayload, Processor, Republisher, Wrapping, identity
from jobs.republish.filtering import Overtaken, RecordFilter
from jobs.republish.partition import InputPartition
from jobs.republish.topic_check import TopicReplaced
from persistence.errors import Conflict
from persistence.kafka import KafkaSettings
from persistence.kept import KeptValues
from tests.messages import Leg
from tests.support.pure import fresh_store

DAY = timedelta(days=1)
ENVELOPES = InputTopics("in")
RAW = InputTopics("in", Wrapping.NONE)
JSON = InputTopics("in", Wrapping.NONE, JsonPayload)
NUMBERS = SequenceFilter(from_value("n"))


def part(topic_id: str = "id", number: int = 0) -> InputPartition:
    return InputPartition("in", number, "r", topic_id, None, "")


class Member:
    """A member of the group that has the partition."""

    def __init__(
        self,
        rule: Filter[Any],
        store: str,
        source: InputTopics = JSON,
        *,
        topic_id: str = "id",
        cluster: str = "",
        current: str = "",
    ) -> None:
        self.filter = RecordFilter(rule, store, "r", lambda _: {"in": current or topic_id}, cluster=cluster)
        self.parts = [part(topic_id)]
        self._processor = Processor(identity, via="r", source=source, targets={"out": 1 << 20})
        self.filter.begin(self.parts)

    def verdict(
        self, offset: int, value: bytes, *, key: bytes = b"k", time: int = 0, **facts: Any
    ) -> tuple[Verdict, bool]:
        record = InputRecord("in", 0, offset, key, value, timestamp_ms=time, topic_id="id", **facts)
        self._processor.open(record)
        ruling = self.filter.judge(record)
        return ruling.verdict, ruling.forward

    def numbers(self, *numbers: int, start: int = 0) -> list[Verdict]:
        return [self.verdict(offset, b'{"n": %d}' % n)[0] for offset, n in enumerate(numbers, start=start)]

    def save(self) -> None:
        self.filter.save(self.parts)


def rejected(value: bytes, stage: str = "") -> bytes:
    """The record at offset 0, redriven after this republisher, or its filter, has rejected it."""
    died, letter = Hop("in", 0, 0, topic_id="id", timestamp_ms=1), Hop("dead", 0, 0)
    hops = redrive_hops(died, letter, Redrive(stage, hole=False, application="r"))
    return encode(Envelope(value, hops, key=b"k"))


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        (SequenceFilter(from_value("n"), scope_by=Scope.KEY), "a state for each key"),
        (deduplicate(from_value("id"), DAY), "over all partitions"),
        (EventIdFilter(from_value("id"), DAY, partitions=4), "over all partitions"),
        (ProducerFilter(gaps=Gaps.HOLD), "changes the order of records"),
        (SequenceFilter, "takes a filter"),
        ("sequence", "takes a filter"),
    ],
)
def test_a_filter_whose_states_are_not_those_of_partitions_is_refused(rule: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        republisher(deduplicate=rule, store="memory://s")


def republisher(**options: Any) -> Republisher:
    options = {"name": "r", **options}
    return Republisher(identity, source="in", target="out", settings=KafkaSettings("b:1"), **options)


def test_a_filter_needs_a_store_and_a_store_a_filter_and_both_a_group_that_can_be_a_name() -> None:
    with pytest.raises(UsageError, match="a filter needs a store"):
        republisher(deduplicate=NUMBERS)
    with pytest.raises(UsageError, match="name a filter"):
        republisher(store="memory://s")
    with pytest.raises(UsageError, match=r"named after the group .*: 'republisher.a b' is not a valid name"):
        republisher(deduplicate=NUMBERS, store="memory://s", group="a b")
    republisher(deduplicate=NUMBERS, store="memory://s", name="a b", group="ab")


def test_the_risks_of_the_filter_s_store_can_be_accepted_and_no_others() -> None:
    republisher(deduplicate=NUMBERS, store="redis://host", accept=["no-aof", "compacted-source"])
    with pytest.raises(UsageError, match="unknown risk no-aof; choose from compacted-source, grown-undrained"):
        republisher(deduplicate=NUMBERS, store="memory://s", accept=["no-aof"])


class Own(SequenceFilter):
    """A filter of the user, with a state for each key."""

    def scope(self, arrival: Any) -> bytes | None:
        return bytes(arrival.key)


def test_a_filter_of_the_user_with_another_scope_is_refused_at_its_first_record() -> None:
    with pytest.raises(UsageError, match="scope other than TOPIC:PARTITION"):
        Member(Own(from_value("n")), fresh_store()).numbers(1)


@pytest.mark.parametrize(
    ("source", "value", "extractor"),
    [
        (JSON, b'{"n": 7}', from_value("n")),
        (RAW, b'{"n": 7}', from_value("n")),
        (ENVELOPES, encode(Envelope(b'{"n": 7}', key=b"k")), from_value("n")),
        (
            InputTopics("in", payload=Leg),
            encode(Envelope(Leg(minutes=7).SerializeToString(), key=b"k")),
            from_value("minutes"),
        ),
        (ENVELOPES, encode(Envelope(b"", key=b"k", producer="p", sequence=7)), from_envelope("sequence")),
        (RAW, b"x", from_header("n")),
        (RAW, b"seven", lambda record: len(record.payload) + 2),
    ],
    ids=["json", "raw", "envelope", "protobuf", "sequence of the envelope", "header", "function"],
)
def test_a_filter_reads_the_payload_the_envelope_the_headers_and_the_record(
    source: InputTopics, value: bytes, extractor: Any
) -> None:
    member = Member(SequenceFilter(extractor), fresh_store(), source)
    headers = (("n", b"7"),)
    assert member.verdict(0, value, headers=headers) == (Verdict.ACCEPTED, True)
    assert member.verdict(1, value, headers=headers) == (Verdict.DUPLICATE, False)


def test_the_event_id_that_a_source_makes_and_the_producer_of_an_envelope_are_read() -> None:
    made = InputTopics("in", Wrapping.NONE, JsonPayload, event_id="field:id")
    ids = Member(EventIdFilter(from_envelope("event_id"), DAY), fresh_store(), made)
    assert [ids.verdict(n, b'{"id": "a"}')[1] for n in range(2)] == [True, False]

    producers = Member(ProducerFilter(), fresh_store(), ENVELOPES)
    values = [encode(Envelope(b"x", key=b"k", producer="p", sequence=n)) for n in (0, 1, 1)]
    hop = Hop("raw", 0, 3, via="other", index=0, count=1)
    republished = encode(Envelope(b"x", (hop,), key=b"k", producer="p", sequence=1))
    found = [producers.verdict(n, value)[0] for n, value in enumerate([*values, republished])]
    assert found == [Verdict.ACCEPTED, Verdict.ACCEPTED, Verdict.DUPLICATE, Verdict.UNIDENTIFIED]


def test_a_record_that_the_state_covers_is_skipped_and_the_next_one_is_judged() -> None:
    store = fresh_store()
    first = Member(NUMBERS, store)
    assert first.numbers(1, 2, 2) == ["accepted", "accepted", "duplicate"]
    first.save()
    again = Member(NUMBERS, store)
    assert again.numbers(1, 2, 2, 3) == ["duplicate", "duplicate", "duplicate", "accepted"]


def test_what_was_judged_and_not_saved_is_judged_again_with_the_same_result() -> None:
    store = fresh_store()
    Member(NUMBERS, store).numbers(1, 2)
    assert Member(NUMBERS, store).numbers(1, 2) == ["accepted", "accepted"]


def test_the_older_of_two_members_can_no_longer_write_the_state_and_the_newer_one_is_not_disturbed() -> None:
    store = fresh_store()
    old = Member(NUMBERS, store)
    old.numbers(1, 2)
    new = Member(NUMBERS, store)
    assert new.numbers(1, 2, 3) == ["accepted"] * 3
    with pytest.raises(Overtaken, match="in:0: another process has taken over the state of filter 'sequence'"):
        old.save()
    new.save()
    assert Member(NUMBERS, store).numbers(3, 4, start=3) == ["duplicate", "accepted"]


def test_the_state_of_a_partition_that_was_lost_is_not_written_and_is_loaded_again_with_the_partition() -> None:
    store = fresh_store()
    member = Member(NUMBERS, store)
    member.numbers(1, 2)
    member.parts = []
    member.save()
    member.parts = [part()]
    member.filter.begin(member.parts)
    assert member.numbers(1, 2) == ["accepted", "accepted"]


def test_a_topic_that_was_created_again_and_a_topic_of_another_cluster_have_a_state_of_their_own() -> None:
    store = fresh_store()
    first = Member(NUMBERS, store)
    first.numbers(5, 6)
    first.save()
    assert Member(NUMBERS, store, cluster="west").numbers(1) == ["accepted"]
    assert Member(NUMBERS, store, topic_id="other").numbers(1) == ["accepted"]


def test_a_member_that_was_suspended_since_the_topic_was_created_again_leaves_the_new_topic_s_state_alone() -> None:
    store = fresh_store()
    new = Member(NUMBERS, store, topic_id="new")
    new.numbers(1, 2)
    new.save()
    with pytest.raises(TopicReplaced, match="in:0 belongs to a topic that was deleted and created again"):
        Member(NUMBERS, store, topic_id="old", current="new")
    assert Member(NUMBERS, store, topic_id="new").numbers(2, 3, start=2) == ["duplicate", "accepted"]


def test_a_republisher_warns_once_of_a_partition_whose_keys_are_the_sequence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = fresh_store()
    member = Member(NUMBERS, store)
    for offset in range(20):
        assert member.verdict(offset, b'{"n": %d}' % offset, key=b"order-%d" % offset) == (Verdict.ACCEPTED, True)
    [said] = caplog.messages
    assert said.startswith("in:0: filter sequence: the keys of the last 8 records contain their sequence numbers. ")
    member.save()
    again = Member(NUMBERS, store)
    again.verdict(20, b'{"n": 20}', key=b"order-20")
    assert len(caplog.messages) == 1, "the state remembers that it has warned"


def test_a_policy_names_the_topics_that_the_filter_judges() -> None:
    store, policy = fresh_store(), DedupPolicy(default=True, namespaces={"i": False})
    judging = RecordFilter(NUMBERS, store, "r", lambda _: {}, policy=policy)
    others = [part(), InputPartition("other", 0, "r", "id", None, "")]
    judging.begin(others)
    rulings: dict[str, list[Verdict]] = {"in": [], "other": []}
    processor = Processor(
        identity, via="r", source=InputTopics(("in", "other"), Wrapping.NONE, JsonPayload), targets={"out": 9}
    )
    for topic, found in rulings.items():
        for offset in range(2):
            record = InputRecord(topic, 0, offset, b"k", b'{"n": 1}', topic_id="id")
            processor.open(record)
            found.append(judging.judge(record).verdict)
    judging.save(others)
    assert rulings == {"in": ["unidentified"] * 2, "other": ["accepted", "duplicate"]}
    values = KeptValues(store, "republisher.r", "SequenceFilter", stage="sequence", shared=True)
    assert {key: one.version for key, one in values.load([b"in:0", b"other:0"]).items()} == {b"in:0": 0, b"other:0": 2}


def test_a_policy_without_a_filter_or_of_another_type_is_refused() -> None:
    with pytest.raises(UsageError, match="name a filter"):
        republisher(policy=DedupPolicy(default=True))
    with pytest.raises(UsageError, match="takes a DedupPolicy"):
        republisher(deduplicate=NUMBERS, store="memory://s", policy=True)


def test_a_member_whose_claim_fails_until_its_patience_ends_joins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def conflict(self: KeptValues, keys: Any) -> None:
        raise Conflict(tuple(keys))

    monkeypatch.setattr(KeptValues, "claim", conflict)
    monkeypatch.setattr("jobs.republish.offsets.PATIENCE_SECONDS", 0)
    with pytest.raises(Overtaken, match="in:0: another process has taken over"):
        Member(NUMBERS, fresh_store())


def test_a_warning_says_that_nothing_is_known_of_records_that_the_group_has_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = fresh_store()
    first, read = part(), part()
    read.committed = 7
    for one in (first, read):
        RecordFilter(NUMBERS, store, "r", lambda _: {}).begin([one])
    [said] = caplog.messages
    assert said.startswith("in:0: the group has read it up to offset 7, and the store has no state of filter sequence")
    member = Member(NUMBERS, store)
    member.numbers(1, start=7)
    member.save()
    RecordFilter(NUMBERS, store, "r", lambda _: {}).begin([read])
    assert len(caplog.messages) == 1


def test_a_record_whose_transform_failed_is_passed_on_when_it_is_redriven() -> None:
    member = Member(NUMBERS, fresh_store(), RAW)
    assert member.numbers(1, 2, 3) == ["accepted"] * 3
    assert member.verdict(3, rejected(b'{"n": 1}')) == (Verdict.REDRIVEN, True)
    assert member.verdict(4, b'{"n": 1}') == (Verdict.BELOW_FLOOR, False)

    strict = Member(SequenceFilter(from_value("n"), decreasing=Decreasing.REJECT), fresh_store(), RAW)
    assert strict.numbers(1, 2) == ["accepted"] * 2
    assert strict.verdict(2, rejected(b'{"n": 1}')) == (Verdict.REDRIVEN, True)
    assert strict.verdict(3, rejected(b"{}")) == (Verdict.REJECTED, False)


def test_a_record_that_the_filter_rejected_is_judged_when_it_is_redriven() -> None:
    member = Member(NUMBERS, fresh_store(), RAW)
    assert member.verdict(0, b"{}") == (Verdict.REJECTED, False)
    assert member.numbers(2, 3, start=1) == ["accepted"] * 2
    assert member.verdict(3, rejected(b'{"n": 1}', "sequence")) == (Verdict.REDRIVEN, True)
    assert member.verdict(4, rejected(b'{"n": 3}', "sequence")) == (Verdict.DUPLICATE, False)
    assert member.verdict(5, rejected(b'{"n": 4}', "sequence")) == (Verdict.ACCEPTED, True)
    assert member.verdict(6, rejected(b"{}", "sequence")) == (Verdict.REJECTED, False)


def test_a_redriven_record_has_the_time_of_the_rejected_one() -> None:
    rule = EventIdFilter(from_value("id"), timedelta(milliseconds=10))
    member = Member(rule, fresh_store(), RAW)
    member.verdict(0, b'{"id": "a"}', time=5)
    member.verdict(1, rejected(b'{"id": "b"}'), time=1_000_000)
    assert member.verdict(2, b'{"id": "a"}', time=6) == (Verdict.DUPLICATE, False)


def test_a_stored_state_is_one_readable_value_with_its_position() -> None:
    store = fresh_store()
    member = Member(NUMBERS, store)
    member.numbers(1, 2, start=17)
    member.save()
    kept = member.filter._kept
    assert str(kept.stage) == "flow republisher.r, generation 1, stage sequence"
    [(key, found)] = kept.store.scan(kept.stage)
    value = json.loads(found.value)
    assert key == b"in:0"
    assert (value["kind"], value["positions"], value["value"]) == ("SequenceFilter", {"in": {"0": 19}}, {"seen": 2})


def test_a_name_of_a_producer_that_cannot_be_stored_is_rejected() -> None:
    member = Member(ProducerFilter(lambda record: Stamp(json.loads(record.value)["p"], 1)), fresh_store(), RAW)
    assert member.verdict(0, b'{"p": "\\ud800"}') == (Verdict.REJECTED, False)
    assert member.verdict(1, b'{"p": "a"}') == (Verdict.ACCEPTED, True)
    member.save()


def test_what_cannot_be_judged_has_a_reason() -> None:
    member = Member(NUMBERS, fresh_store(), RAW)
    record = InputRecord("in", 0, 0, b"k", b"{}", topic_id="id")
    member._processor.open(record)
    assert member.filter.judge(record).reason is Reason.MISSING_FIELD
