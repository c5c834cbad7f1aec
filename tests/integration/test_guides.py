"""What the guides for producers and copies define, run on a real broker."""

import json
import sqlite3
import uuid
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from aggregations import Fields, Flow, Json, Topic, bind, count
from aggregations.engine.options import RunOptions
from aggregations.local import run_local
from envelope import Envelope, Verdict
from jobs import pointer_of
from persistence.kafka import AcknowledgedProducer, KafkaSettings, Topics
from tests.support.guides import load
from tests.support.sessions import written

pytestmark = pytest.mark.integration


def test_the_guide_to_replays(
    settings: KafkaSettings, topics: Topics, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sales, dead = (f"{name}-{uuid.uuid4().hex}" for name in ("sales", "dead"))
    for name in (sales, dead):
        topics.create(name, 1)
    with AcknowledgedProducer(settings) as producer:
        for _ in range(3):
            producer.send(sales, b'{"article": "pear"}', b"pear")
        producer.flush()
    source = Topic(sales, payload=Json({"article": str}), envelope=False)
    flow = Flow("sales").source(source).aggregate("article", key="article", fold=Fields(sales=count()))
    stores = bind(flow, {}, f"sqlite://{tmp_path}/states.db")
    options = RunOptions(kafka=settings, stores=stores, dead_letters=dead)
    run_local(flow, replace(options, until_caught_up=True))
    defined = load("replay.md")
    assert defined["corrected"](flow, options, "a test", 0) == 2
    assert "3 offsets to read, 1 states\ngeneration 2 is 0 offsets behind" in capsys.readouterr().out
    assert defined["taken_back"](flow, options, "a test") == 1
    with closing(sqlite3.connect(tmp_path / "states.db")) as database, database:
        database.execute("DELETE FROM state WHERE key = ?", (b"pear",))
    assert defined["corrected"](flow, options, "a test", 0) == 1
    assert pointer_of(flow, stores).changes[-1].what == "abandon"


def test_the_guide_to_producer_sessions(settings: KafkaSettings, topics: Topics, tmp_path: Path) -> None:
    name, file = f"orders-{uuid.uuid4().hex}", tmp_path / "lines"
    topics.create(name, 2)
    defined = load("producer-session.md", orders=name)
    for content in ("a\nb\n", "a\nb\nc\n"):
        file.write_text(content)
        defined["send_lines"](file, settings)
    assert sorted(one.payload for one in written(settings, name)) == [b"a\n", b"b\n", b"c\n"]
    saved = tmp_path / "state"
    with defined["begin"](settings, saved) as session:
        assert session.last_sequence_id() == 4
        defined["save"](session, saved)
        with pytest.raises(SystemExit, match="sequence id 5 does not ascend: 9 was sent"):
            for _ in range(2):
                defined["send_batch"](session, b"batch")
    with defined["begin"](settings, saved) as session:
        assert session.last_sequence_id() == 9
    other = load("producer-session.md", orders=name, **{"till-3": "till-4"})
    other["send_exclusively"](settings)
    assert (written(settings, name)[-1].producer in {"till-3", "till-4"}, len(written(settings, name))) == (True, 5)


def test_the_guide_to_sequence_maps(
    settings: KafkaSettings, topics: Topics, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    payments, orders = f"payments.{uuid.uuid4().hex}", f"orders-{uuid.uuid4().hex}"
    for name in (payments, orders):
        topics.create(name, 1)
    names = {"payments.eu": payments, "orders": orders, "redis://states:6379": f"sqlite://{tmp_path}/snapshots"}
    names |= {store: f"{store}-{orders}" for store in ("memory://sequence-maps", "memory://readers")}
    defined = load("sequence-maps.md", **names, gateway=f"gateway-{uuid.uuid4().hex}")
    sent = [Envelope(b"12.50", producer="till-7", sequence=number) for number in (7, 8, 8)]
    for last, verdicts in ((None, ["accepted", "accepted", "duplicate"]), (8, ["duplicate"] * 3)):
        defined["serve"]([sent], settings)
        said = capsys.readouterr().out.splitlines()
        assert said == [str(last), repr([Verdict(one) for one in verdicts])]
    assert [one.sequence for one in written(settings, payments)] == [7, 8]


def test_the_guide_to_copies(
    settings: KafkaSettings, topics: Topics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {one: f"{one}-{uuid.uuid4().hex}" for one in ("sales", "shop")}
    topics.create(names["sales"], 2)
    topics.create("headwater.positions", 1, {"cleanup.policy": "compact"})
    monkeypatch.chdir(tmp_path)
    with sqlite3.connect("shop.db") as connection:
        connection.execute("CREATE TABLE sales (number INTEGER PRIMARY KEY, till TEXT)")
        connection.executemany("INSERT INTO sales VALUES (?, ?)", [(1, "a"), (2, "b")])
    connection.close()
    # The table keeps its name: it is part of the query's text, not a text of its own.
    defined = load("copy.md", **names)
    assert [defined["copy_sales"](settings) for _ in range(2)] == [2, 0]
    got = written(settings, names["sales"])
    assert sorted((json.loads(one.payload)["number"], one.key, one.event_id) for one in got) == [
        (1, b"a", "1"),
        (2, b"b", "2"),
    ]
