"""A flow as a picture: complete, well-formed, without overlaps and without secrets."""

from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree as ET

import polars as pl
import pytest

from aggregations.definition.aggregates import count, total
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
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


def test_no_boxes_overlap_and_all_are_inside() -> None:
    root = ET.fromstring(FLOW.describe_svg({}))
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
