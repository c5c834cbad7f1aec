"""The project that `headwater new` writes, from sample orders to states, on a real broker."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from persistence.kafka import KafkaSettings
from tests.support.republish import read_all

pytestmark = [pytest.mark.integration, pytest.mark.spark, pytest.mark.slow, pytest.mark.kills]

ROOT = Path(__file__).parents[2]


def test_a_new_project_counts_every_order_once_although_its_republisher_is_killed(kafka: str, tmp_path: Path) -> None:
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HEADWATER_KAFKA_BOOTSTRAP": kafka,
    }
    project = tmp_path / "shop"

    def done(*command: str) -> str:
        ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    def shown(stage: str) -> dict[str, dict[str, object]]:
        lines = done("sh", "-c", f"cd shop && headwater inspect shop:flow --stage {stage} --json").splitlines()
        return {view["key"]: view["state"] for view in map(json.loads, lines)}

    done("headwater", "new", "shop")
    done("make", "-C", "shop", "crash", "ORDERS=150")
    assert " records folded" in done("make", "-C", "shop", "produce", "republish", "submit", "ORDERS=50")

    pieces: Counter[str] = Counter()
    cents: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for record in read_all(KafkaSettings(kafka), "shop.orders"):
        if record.value() == b"not JSON":
            continue
        order = json.loads(record.value())
        for line in order["lines"]:
            lines[line["product"]] += 1
            pieces[line["product"]] += line["pieces"]
            cents[order["customer"]] += line["pieces"] * line["price_cents"]
    # The amount sent before the kill depends on the machine; all of it is sent twice.
    assert len(read_all(KafkaSettings(kafka), "shop.lines")) > lines.total()
    products, customers = shown("product"), shown("customer")
    assert {name: (state["lines"], state["pieces"]) for name, state in products.items()} == {
        name: (lines[name], pieces[name]) for name in pieces
    }
    assert {name: state["cents"] for name, state in customers.items()} == cents
    assert (project / ".headwater" / "states").exists()
    assert "bad_payload" in done("sh", "-c", "cd shop && make show")
