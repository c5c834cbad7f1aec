"""A flow as a picture: complete, well-formed, without overlaps and without secrets."""

from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import polars as pl
import pytest

from aggregations import Emit, Fields, Flow, Json, Topic, count, hopping, session, total
from aggregations.definition.description import lines_of
from jobs.cli.errors import Exit
from tests.support.cli import run
from tests.support.letters import LEGS

SVG = "{http://www.w3.org/2000/svg}"
FLOW = (
    Flow("fleet")
    .source(LEGS)
    .divert(pl.col("v") < 0)
    .also_to("copies", lambda flow: flow.publish("copies"))
    .branch(
        "late",
        pl.col("v") > 5,
        lambda flow: flow.also_to("inner", lambda flow: flow.publish("late.all")).publish("c", topics=["UA", "DL"]),
    )
    .aggregate("totals", "k", Fields(**{f"sum{n}": total("v") for n in range(20)}))
    .publish_states("totals.changes")
    .aggregate("carriers", "c", Fields(n=count()))
    .publish("out")
)
OTHER = Topic("other", Json({"k": str, "v": int, "sold": int}), time="sold", skew="10m")
ROWS = Topic("rows", Json({"name": str}))
TWO = (
    Flow("two")
    .source(LEGS)
    .filter(pl.col("v") > 0)
    .merge(Flow("b").source(OTHER).also_to("raw", lambda flow: flow.publish("r")))
)
FLOWS = {
    "branches": FLOW,
    "sources of one line": Flow("two").source(LEGS, OTHER).aggregate("totals", "k", Fields(n=count())),
    "merged sources": TWO.aggregate("totals", "k", Fields(n=count())),
    "windows": TWO.aggregate("totals", "k", Fields(n=count()), window=hopping("10m", "5m", late="dead_letter"))
    .publish_states("closed", on="close")
    .aggregate("visits", "k", Fields(n=count()), window=session("5m")),
    "expiry, a table and columns that are passed on": Flow("e")
    .source(LEGS)
    .aggregate("totals", "k", Fields(n=count()), expire_after="30d", emit=Emit(k="k", n="new.n").changed())
    .lookup("names", ROWS, "k", missing="drop")
    .aggregate("last", "k", Fields(n=total("n"))),
    "no stage": Flow("relay").source(LEGS).filter(pl.col("v") > 0).publish("out"),
}


def texts(svg: str) -> list[str]:
    return ["".join(one.itertext()) for one in ET.fromstring(svg).iter(f"{SVG}text")]


def test_it_shows_source_steps_branches_stages_stores_and_outputs() -> None:
    shown = texts(FLOW.describe_svg({"totals": "redis://cache/0", "carriers": "cassandra://db/fleet"}))
    for one in ("legs", "dead letters", "copies", "UA", "DL", "late.all", "totals.changes", "out", "carriers"):
        assert one in shown
    assert {"redis://cache/0", "cassandra://db/fleet", 'late when [col("v") > 5]'} <= {*shown}
    assert [one for one in shown if one in ("also_to", "branch", "aggregate")] == [
        *("also_to", "branch", "also_to"),
        *("aggregate", "aggregate"),
    ]


def test_a_flow_without_a_stage_has_one_store() -> None:
    shown = texts(Flow("relay").source(LEGS).publish("out").describe_svg({"end": "lmdb:///data"}))
    assert {"end", "lmdb:///data", "legs", "out"} <= {*shown}


@pytest.mark.parametrize("flow", FLOWS.values(), ids=list(FLOWS))
def test_it_has_every_line_of_the_description_in_order(flow: Flow[Any]) -> None:
    shown = iter(" ".join(texts(flow.describe_svg())).split())
    words = [word for line in lines_of(flow) for word in (line.step, *line.what.split())]
    assert [word for word in words if word not in shown] == []


@pytest.mark.parametrize("name", ["sources of one line", "merged sources", "windows"])
def test_an_arrow_leads_from_every_source_to_where_they_meet_and_none_into_a_source(name: str) -> None:
    root = ET.fromstring(FLOWS[name].describe_svg())
    boxes = {
        one.text: (int(rect.get("x", "")), int(rect.get("y", "")), int(rect.get("height", "")))
        for one in root.iter(f"{SVG}text")
        for rect in root.iter(f"{SVG}rect")
        if one.get("class") == "name" and int(one.get("y", "")) == int(rect.get("y", 0)) + 19
    }
    arrows = [one.get("d", "") for one in root.iter(f"{SVG}path") if one.get("marker-end")]
    x, y, height = boxes["merge"]
    assert len([d for d in arrows if d.endswith((f"V{y}", f"V{y + height // 2}H{x}"))]) == 2
    assert not [d for d in arrows if d.endswith(f"V{boxes['source'][1]}")]


@pytest.mark.parametrize("flow", FLOWS.values(), ids=list(FLOWS))
def test_no_boxes_overlap_and_all_are_inside(flow: Flow[Any]) -> None:
    root = ET.fromstring(flow.describe_svg({}))
    width, height = int(root.get("width", "")), int(root.get("height", ""))
    found = [one for one in root.iter(f"{SVG}rect") if one.get("class") != "back"]
    places = [tuple(int(one.get(name, "")) for name in ("x", "y", "width", "height")) for one in found]
    for x, y, wide, high in places:
        assert x + wide <= width
        assert y + high <= height
    for (x, y, wide, high), (x2, y2, wide2, high2) in combinations(places, 2):
        assert x + wide <= x2 or x2 + wide2 <= x or y + high <= y2 or y2 + high2 <= y


def test_text_is_escaped() -> None:
    svg = Flow("relay").source(LEGS).filter(pl.col("k") == "<&>").publish("out").describe_svg()
    assert any("<&>" in one for one in texts(svg))
    assert "<&>" not in svg


def test_describe_writes_it_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADWATER_STORE", "redis://user:secret@cache:6379/0")
    assert run(monkeypatch, "describe", "tests.unit.test_picture:FLOW", "--svg", "fleet.svg") == 0
    written = Path("fleet.svg").read_text()
    assert any("cache" in one for one in texts(written))
    assert "secret" not in written
    assert "picture: fleet.svg" in capsys.readouterr().err
    assert run(monkeypatch, "describe", "tests.unit.test_picture:FLOW", "--svg", "no/such.svg") == Exit.USAGE
    assert "--svg no/such.svg: No such file or directory" in capsys.readouterr().err
