"""The files in deploy/, the lock and the Makefile agree with headwater: its options, its Spark and its Python."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import yaml
from packaging.specifiers import SpecifierSet
from typer.main import get_command

from jobs.cli import app
from persistence.redis.settings import read_settings

ROOT = Path(__file__).parents[2]
CONTAINER = ROOT / "deploy" / "container" / "Dockerfile"
PROJECT: Any = tomllib.loads((ROOT / "pyproject.toml").read_text())
FLEET: Any = yaml.safe_load((ROOT / "deploy" / "kubernetes" / "fleet.yaml").read_text())


def argument(name: str) -> str:
    return str(re.findall(rf"^ARG {name}=(\S+)$", CONTAINER.read_text(), re.MULTILINE)[0])


def test_the_container_file_passes_hadolint() -> None:
    program = Path(sys.executable).with_name("hadolint")
    found = subprocess.run([program, CONTAINER], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_manifest_gives_options_that_run_accepts_and_a_store_that_opens_with_a_password_file() -> None:
    group: Any = get_command(app)
    parsed = group.commands["run"].make_context("headwater run", ["fleet:flow", *FLEET["spec"]["arguments"]]).params
    assert parsed["json"]
    [store] = parsed["store"]
    mounted = {one["path"] for one in FLEET["spec"]["driver"]["secrets"]}
    assert mounted == {one["path"] for one in FLEET["spec"]["executor"]["secrets"]} == {"/etc/fleet"}
    assert "/etc/fleet/redis-password" in str(read_settings(store).password)
    assert str(parsed["kafka_settings"]) == "/etc/fleet/kafka.toml"


def test_the_image_has_the_spark_that_every_test_runs_with_and_a_python_that_headwater_supports() -> None:
    [spark] = re.findall(r"^pyspark==(\S+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    assert FLEET["spec"]["sparkVersion"] == argument("SPARK_VERSION") == spark
    assert argument("PYTHON_VERSION") in SpecifierSet(PROJECT["project"]["requires-python"])


def test_the_tests_run_with_the_newest_spark_that_headwater_allows_and_make_spark_with_the_oldest() -> None:
    [spark] = [text for text in PROJECT["project"]["dependencies"] if text.startswith("pyspark")]
    allowed = SpecifierSet(spark.removeprefix("pyspark"))
    lines = [f"4.{minor}" for minor in range(20) if f"4.{minor}" in allowed]
    [tested] = [text.removeprefix("pyspark==") for text in PROJECT["tool"]["uv"]["constraint-dependencies"]]
    [oldest] = re.findall(r"^SPARK \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert f"pyspark=={tested} " in (ROOT / "requirements.lock").read_text()
    assert tested.startswith(f"{lines[-1]}.")
    assert oldest.startswith(f"{lines[0]}.")


def test_the_flow_is_imported_from_where_the_image_puts_it() -> None:
    directory = FLEET["spec"]["mainApplicationFile"].removeprefix("local://").rpartition("/")[0]
    text = CONTAINER.read_text()
    assert f"COPY . {directory}\n" in text
    assert f"PYTHONPATH={directory}\n" in text
