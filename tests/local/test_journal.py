"""The journal of a run in one process: with a share of the events, after a failed attempt, and at its bounds."""

from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from aggregations.engine import journal as module
from aggregations.report import Report
from envelope import Envelope, encode
from jobs import Outcome, Place, explain
from jobs.cli.errors import Exit
from persistence.commit.faults import Fault, Injector, use
from tests.support.cli import run as headwater
from tests.support.flows import filtered, fleet
from tests.support.journals import Drop, drops_of, entries_of, of_share
from tests.support.world import Sent, World, legs, republished


def test_a_journal_of_a_share_lists_the_same_events_at_every_stage_and_in_every_attempt(
    world: World, topic: Callable[..., str]
) -> None:
    sent, flow = [leg for leg in legs(200) if leg.minutes], fleet(world.topic)
    world.send(republished(sent, [*range(120), *range(90, len(sent)), *range(20)]))
    whole, some, again = (topic(name=name) for name in ("whole", "some", "again"))
    world.run(flow, journal=whole, max_records=60)
    everything = drops_of(entries_of(world, whole))
    world.run(flow, journal=some, journal_share=0.4, max_records=60, generation=2)
    entries, expected = entries_of(world, some), of_share(world, everything, 0.4)
    assert drops_of(entries) == expected
    assert 0 < len(expected) < len(everything)
    assert {entry.share for entry in entries} == {0.4}
    assert [entry.read for entry in entries] == [entry.read for entry in entries_of(world, whole)]

    # The second attempt finds what the first one has persisted, so it drops more: of the same events.
    with use(Injector([Fault.parse("persist:aircraft.error@2")])):
        world.run(flow, journal=again, journal_share=0.4, max_records=60, generation=3)
    repeated = entries_of(world, again)
    assert any(entry.again for entry in repeated)
    found = drops_of(repeated)
    assert {one.stage for one in found} == set(flow.stage_names)
    assert found == of_share(world, found, 0.4)
    places = {(one.stage, one.partition, one.offset) for one in found}
    assert {(one.stage, one.partition, one.offset) for one in expected} <= places


def test_what_a_filter_drops_is_listed_and_explained_as_dropped_however_its_batch_was_folded(
    world: World, topic: Callable[..., str]
) -> None:
    flow, journal = filtered(world.topic, "event id"), topic(name="journal")
    world.send(
        Sent(encode(Envelope(b'{"id": 1}', key=b"k", event_id=event_id)), b"k", partition=0) for event_id in "abacb"
    )
    report = world.run(flow, journal=journal)
    [entry] = entries_of(world, journal)
    expected = {Drop("filter", "duplicate", world.topic, 0, offset) for offset in (2, 4)}
    assert drops_of([entry]) == expected
    assert report.verdicts["filter"]["duplicate"] == 2
    for offset in range(5):
        place = Place(world.topic, 0, offset)
        [found] = explain(flow, place, kafka=world.settings, stores=world.stores(flow), journal=journal, search=0)
        row = found.stages[0]
        dropped = offset in (2, 4)
        assert (row.outcome, row.verdict) == ((Outcome.DROPPED, "duplicate") if dropped else (Outcome.FOLDED, None))


COMPILED = pytest.mark.parametrize("world", [0], indirect=True, ids=["compiled"])
"""What becomes of an entry does not depend on how its batch was folded."""


def sent_again(world: World, batches: int) -> None:
    """Send 200 legs, and then in each batch of 200 records every second one of them again, between new ones."""
    flown = [leg for leg in legs(3000) if leg.minutes][: 200 + 100 * batches]
    world.send(republished(flown, range(200)))
    for batch in range(batches):
        new = iter(range(200 + 100 * batch, 300 + 100 * batch))
        world.send(republished(flown, [one for again in range(0, 200, 2) for one in (again, next(new))]))


@COMPILED
def test_an_entry_that_its_topic_does_not_take_lists_less_and_counts_the_rest(
    world: World, topic: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    flow, journal = fleet(world.topic), topic(name="journal", max_message_bytes=1500, cleanup_policy="compact")
    sent_again(world, 3)
    report = world.run(flow, journal=journal, max_records=200)
    entries = entries_of(world, journal)
    assert [entry.batch for entry in entries] == [*range(1, report.batches + 1)]
    [said] = [one for one in caplog.messages if "journal" in one]
    assert said.endswith("cleanup.policy=compact keeps only the newest entry of each flow. Set it to delete")
    counts = report.verdicts["aircraft"]
    dropped = sum(counts[verdict] for verdict in ("duplicate", "duplicate_in_batch", "below_floor"))
    unlisted = sum(entry.unlisted.get("aircraft", 0) for entry in entries)
    assert 0 < unlisted < dropped == len(drops_of(entries)) + unlisted
    world.check(flow)


REMEDIES = {
    "deleted": "Check that the topic exists, that enough of its replicas are in sync, and that the broker runs",
    "smaller": "raise max.message.bytes of the topic, or send smaller messages",
}


@COMPILED
@pytest.mark.parametrize("trouble", REMEDIES)
def test_a_run_continues_exactly_without_a_journal_that_takes_nothing_and_says_so_once(
    trouble: str,
    world: World,
    topic: Callable[..., str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_PAUSE_SECONDS", 0)  # every batch tries again
    flow, journal, reports = fleet(world.topic), topic(name="journal"), list[Report]()
    admin = AdminClient({"bootstrap.servers": world.settings.bootstrap})
    sent_again(world, 8)

    def harm(report: Report) -> None:
        reports.append(report)
        if len(reports) != 2:
            return
        if trouble == "deleted":
            world.topics.delete([journal])
        else:
            change = ConfigEntry("max.message.bytes", "100", incremental_operation=AlterConfigOpType.SET)
            resource = ConfigResource(ResourceType.TOPIC, journal, incremental_configs=[change])
            [changed] = admin.incremental_alter_configs([resource]).values()
            changed.result(30)

    report = world.run(flow, journal=journal, max_records=200, progress=harm)
    assert report.batches > 5
    [said] = [one for one in caplog.messages if one.startswith(f"journal {journal}")]
    assert REMEDIES[trouble] in said
    assert said.endswith("The run continues; `headwater explain` lacks these batches")
    world.check(flow)


@COMPILED
def test_explain_says_that_the_journal_has_no_entry_any_more_or_that_it_does_not_exist(
    world: World,
    topic: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flow, journal = fleet(world.topic), topic(name="journal")
    sent_again(world, 1)
    world.run(flow, journal=journal, max_records=200)
    place = Place(world.topic, 0, 0)
    given = {"kafka": world.settings, "stores": world.stores(flow), "search": 0}
    [found] = explain(flow, place, journal=journal, **given)
    assert "no entry" not in found.why
    admin = AdminClient({"bootstrap.servers": world.settings.bootstrap})
    [deleted] = admin.delete_records([TopicPartition(journal, 0, 1)]).values()
    deleted.result(30)
    [found] = explain(flow, place, journal=journal, **given)
    assert found.why.endswith("; the journal has no entry of its batch")
    world.topics.delete([journal])
    (tmp_path / "journaled.py").write_text(f"from tests.support.flows import fleet\nflow = fleet({world.topic!r})\n")
    monkeypatch.syspath_prepend(tmp_path)
    words = ["--journal", journal, "--bootstrap", world.settings.bootstrap, "--store", world.stores(flow)["aircraft"]]
    assert headwater(monkeypatch, "explain", "journaled:flow", str(place), *words) == Exit.REFUSED
    [said] = capsys.readouterr().err.splitlines()
    assert said.startswith(
        f"headwater: topic {journal}: Broker: Unknown topic or partition. Create the topic, or correct"
    )
