"""The reference page names every option, variable and exit code that the code has, with its default."""

import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from aggregations.engine.clients import NEEDED
from aggregations.run.risks import Risk
from envelope import Reason, Verdict
from jobs.cli.errors import Exit
from persistence.cassandra.settings import CassandraSettings, Replication
from persistence.errors import Terminal
from persistence.redis.settings import RISKS, RedisSettings
from persistence.registry import open_store, schemes
from tests.simulation.stores import SCHEME as SIMULATED

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference.md").read_text()
URLS = {
    "sqlite": "sqlite://states.db",
    "lmdb": "lmdb://states",
    "redis": "redis://host",
    "cassandra": "cassandra://host/fleet",
}
DEFAULTS = {"cassandra": CassandraSettings, "redis": RedisSettings}


def section(title: str) -> str:
    """The text under a heading, up to the next one."""
    _, body = re.split(rf"^#+ {title}$", PAGE, maxsplit=1, flags=re.MULTILINE)
    return re.split(r"^#+ ", body, maxsplit=1, flags=re.MULTILINE)[0]


def rows(text: str) -> dict[str, list[str]]:
    """Table rows by each name in their first column: the other columns."""
    found = {}
    for line in text.splitlines():
        if line.startswith("| `"):
            first, *others = (cell.strip() for cell in line.strip("|").split("|"))
            found |= dict.fromkeys(re.findall(r"`([^`]+)`", first), others)
    return found


def options(store: str) -> list[str]:
    """The options that a store's URL takes, as its own error lists them."""
    with pytest.raises(Terminal, match="Known options: ") as refused:
        open_store(f"{URLS[store]}?no-such-option=1")
    return str(refused.value).partition("Known options: ")[2].rstrip(".").split(", ")


def defaults() -> Iterator[tuple[str, str, str]]:
    for store, settings in DEFAULTS.items():
        for field in fields(settings):
            value: Any = field.default
            if isinstance(value, Replication):
                value = value.everywhere
            if (
                value is not MISSING
                and isinstance(value, int | float | str)
                and value != ""
                and field.name in options(store)
            ):
                yield store, field.name, f"{value:g}" if isinstance(value, float) else str(value)


@pytest.mark.parametrize("store", URLS)
def test_every_option_of_a_store_is_there_and_no_other(store: str) -> None:
    shown = {name for name in rows(section(store)) if not re.search(r"[:/]", name)}
    assert shown == set(options(store))


@pytest.mark.parametrize(("store", "option", "value"), [*defaults()])
def test_a_default_is_the_code_s(store: str, option: str, value: str) -> None:
    assert rows(section(store))[option][0] == value


def test_every_scheme_and_every_risk_of_a_store_is_there() -> None:
    # The simulator's is there once its tests have run in this process.
    assert [scheme for scheme in schemes() if f"`{scheme}://" not in PAGE and scheme != SIMULATED] == []
    assert [risk for risk in RISKS if f"`{risk}`" not in section("redis")] == []


def test_every_variable_in_the_code_is_there_and_no_other() -> None:
    texts = [path.read_text() for top in ("persistence", "aggregations", "jobs") for path in (ROOT / top).rglob("*.py")]
    texts += [(ROOT / "jobs" / "data" / "spark-log4j2.properties").read_text()]
    used = set(re.findall(r"HEADWATER_[A-Z_]*[A-Z]", "\n".join(texts)))
    used = {name for name in used if not name.startswith("HEADWATER_KAFKA")} | {"HEADWATER_KAFKA_BOOTSTRAP"}
    assert set(rows(section("Environment"))) - {"HEADWATER_KAFKA_*", "HEADWATER_KAFKA_SASL_USERNAME"} == used


def test_every_setting_that_a_flow_s_consumer_needs_is_there() -> None:
    text = section("Kafka's settings")
    assert [name for name in NEEDED if f"`{name}`" not in text] == []


def test_every_exit_code_is_there() -> None:
    assert [int(code) for code in re.findall(r"^\| (\d) \|", section("Exit codes"), re.MULTILINE)] == [*map(int, Exit)]


def codes(page: str, title: str) -> set[str]:
    """The names in the first column of a section's table; every row has all of its cells."""
    body = re.split(rf"^## {title}$", (ROOT / "docs" / page).read_text(), maxsplit=1, flags=re.MULTILINE)[1]
    lines = [line for line in re.split(r"^## ", body, maxsplit=1, flags=re.MULTILINE)[0].splitlines() if "| `" in line]
    assert all(cell.strip() for line in lines for cell in line.strip("|").split("|"))
    return {re.findall(r"`([^`]+)`", line)[0] for line in lines}


@pytest.mark.parametrize(("title", "enum"), [("Verdicts", Verdict), ("Reason codes", Reason), ("Risks", Risk)])
def test_every_verdict_reason_and_risk_is_there_with_cause_and_remedy(title: str, enum: type[StrEnum]) -> None:
    assert codes("reference/verdicts.md", title) == {one.value for one in enum}
