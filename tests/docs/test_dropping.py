"""The recipes that drop a generation leave nothing of it, and everything of the others."""

import contextlib
import json
import re
import sqlite3
import textwrap
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest

from aggregations import Fields, Flow, Json, MemoryRunner, Record, Topic, bind, count

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "rebuild.md").read_text()
FLOW = (
    Flow("fleet")
    .source(Topic("legs", payload=Json({"tail": str, "carrier": str}), envelope=False))
    .aggregate("air", key="tail", fold=Fields(legs=count()))
    .aggregate("aircraft", key="tail", fold=Fields(legs=count()))  # the name of the first stage begins this one
)


def fold(url: str, generation: int) -> dict[str, dict[bytes, object]]:
    """Fold three records into a generation, unless it has them, and return its results."""
    runner = MemoryRunner(FLOW, bind(FLOW, {}, url), generation=generation)
    if not runner.results("air"):
        runner.process(
            Record("legs", 0, offset, None, json.dumps({"tail": f"N{offset}", "carrier": "UA"}).encode())
            for offset in range(3)
        )
    return {stage.name: runner.results(stage.name) for stage in FLOW.stages}


def drop_sqlite(path: Path) -> list[object]:
    """Run the recipe, and return what is left of the stages' names and of the states."""
    [recipe] = re.findall(r"^```sql\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript(recipe)
        rows = connection.execute("SELECT flow.generation, stage.name FROM stage JOIN flow ON flow.id = stage.flow")
        [(states,)] = connection.execute("SELECT count(*) FROM state")
        return [sorted(rows), states]


def drop_lmdb(path: Path) -> list[object]:
    [recipe] = re.findall(r"^LMDB, in Python.*?\n\n(.*?)^SQLite:", PAGE, re.MULTILINE | re.DOTALL)
    exec(textwrap.dedent(recipe).replace(".headwater/states", str(path)), {})
    names, states = set(), 0
    for shard in sorted(path.iterdir()):
        with lmdb.open(str(shard), readonly=True) as environment, environment.begin() as transaction:
            keys = [bytes(key) for key, _ in transaction.cursor()]
            numbers = {
                json.loads(transaction.get(key))["number"].to_bytes(4): key for key in keys if key.startswith(b"stage/")
            }
        names |= {(int(key.split(b"/")[2]), key.split(b"/")[3].decode()) for key in numbers.values()}
        rest = [key for key in keys if not re.match(rb"[a-z]+/fleet/2|[a-z]+$", key)]
        assert all(key[:4] in numbers for key in rest), rest
        states += len(rest)
    return [sorted(names), states]


@pytest.mark.parametrize(("scheme", "drop"), [("sqlite", drop_sqlite), ("lmdb", drop_lmdb)])
def test_a_dropped_generation_is_gone_and_the_others_are_whole(
    scheme: str, drop: Callable[[Path], list[object]], tmp_path: Path
) -> None:
    url = f"{scheme}://{tmp_path / 'states'}"
    fold(url, 1)
    kept = fold(url, 2)
    names, states = drop(tmp_path / "states")
    assert names == [(2, "air"), (2, "aircraft")]
    assert states == 6
    assert fold(url, 2) == kept
    assert fold(url, 1) == kept, "it begins anew"
