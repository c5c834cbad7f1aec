import re
import tomllib
from importlib import metadata
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PACKAGES = ["envelope", "persistence", "aggregations", "jobs"]


def test_the_wheel_holds_the_four_packages_and_nothing_else(names: set[str]) -> None:
    assert {name.partition("/")[0] for name in names} == {*PACKAGES, f"headwater-{version('headwater')}.dist-info"}
    assert not [name for name in names if "__pycache__" in name]


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_is_typed(package: str, names: set[str]) -> None:
    assert f"{package}/py.typed" in names


def test_the_wheel_holds_the_stubs_the_licence_and_the_demo_s_data(names: set[str]) -> None:
    assert {"envelope/envelope_pb2.py", "envelope/envelope_pb2.pyi"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert [name for name in names if name.startswith("jobs/data/") and name.endswith(".parquet")]


def test_the_wheel_holds_the_envelope_s_schema_and_beside_it_the_conformance_vectors(
    names: set[str], installed
) -> None:
    files = ["envelope.proto", "conformance.json"]
    assert {f"envelope/proto/headwater/envelope/v1/{name}" for name in files} == {n for n in names if "/proto/" in n}
    [folder] = installed.python("import envelope; print(*envelope.__path__)").splitlines()
    for name in files:
        shipped = Path(folder, "proto/headwater/envelope/v1", name)
        assert shipped.read_bytes() == (ROOT / "proto/headwater/envelope/v1" / name).read_bytes()


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_is_imported_from_the_installed_wheel(package: str, installed) -> None:
    assert installed.python(f"import {package}; print({package}.__file__)").startswith(str(installed.home / "lib"))


def test_our_envelope_is_imported_although_another_project_has_a_package_of_that_name(installed) -> None:
    assert (installed.home / "other" / "envelope" / "__init__.py").exists()
    found = installed.python("import envelope.codec; print(envelope.codec.__file__)")
    assert found.startswith(str(installed.home / "lib"))


def test_the_installed_command_shows_its_help(installed) -> None:
    done = installed.run("headwater", "--help")
    assert done.returncode == 0, done.stderr
    for verb in ("demo", "stack", "republish", "run", "inspect"):
        assert verb in done.stdout


@pytest.fixture(scope="module")
def documentation(installed) -> Path:
    """The folder that `headwater --help` names."""
    [page] = re.findall(r"^ *Documentation: (.+)$", installed.run("headwater", "--help").stdout, re.MULTILINE)
    return Path(page).parent


def test_the_help_names_the_documentation_which_is_in_the_wheel(installed, documentation, names: set[str]) -> None:
    assert documentation.is_relative_to(installed.home / "lib")
    assert (documentation / "index.md").read_text().startswith("# headwater")
    pages = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")}
    assert {f"jobs/{path}" for path in pages} <= names


def test_no_link_of_the_documentation_in_the_wheel_is_dead(documentation) -> None:
    for page in documentation.rglob("*.md"):
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.relative_to(documentation)}: {target}"


def test_nothing_below_jobs_loads_spark_or_a_kafka_client(installed) -> None:
    loaded = installed.python(
        "import sys, envelope, persistence, aggregations; "
        "print([name for name in ('pyspark', 'confluent_kafka', 'redis', 'cassandra') if name in sys.modules])"
    )
    assert loaded == "[]"


def test_what_spark_s_data_frames_ask_for_is_installed_with_it() -> None:
    """`DataFrame.mapInArrow` raises without them: Spark calls them its extra `sql`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {one.name for one in map(Requirement, project["dependencies"])}
    extra = [one for one in map(Requirement, metadata.requires("pyspark") or ()) if str(one.marker) == 'extra == "sql"']
    assert {"pandas", "pyarrow"} <= {one.name for one in extra} <= required
