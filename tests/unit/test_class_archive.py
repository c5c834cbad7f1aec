"""Which JVM writes the archive of Spark's classes, which one reads it, and what is left of one that was not completed."""

import subprocess
import sys
from pathlib import Path

import pytest

from aggregations.spark.class_archive import ClassArchive


@pytest.fixture
def java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setenv("HEADWATER_CACHE", str(tmp_path / "cache"))
    home = tmp_path / "java"
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "java").write_text("17")
    return {"JAVA_HOME": str(home)}


def jvm(code: str = "") -> "subprocess.Popen[bytes]":
    """A process that runs code after its standard input is closed, as a JVM ends."""
    return subprocess.Popen([sys.executable, "-c", f"import sys; sys.stdin.read(); {code}"], stdin=subprocess.PIPE)


def written(options: str) -> Path:
    """The file that a JVM with these options writes."""
    return Path(options.partition("-XX:ArchiveClassesAtExit=")[2].partition('"')[0])


def test_the_first_jvm_writes_the_archive_that_the_next_one_reads(java: dict[str, str]) -> None:
    archive = ClassArchive("/spark", {}, java)
    path = written(archive.options())
    assert ClassArchive("/spark", {}, java).options() == ""  # another one writes it
    archive.finish(jvm(f"open({str(path)!r}, 'w').write('classes')"))
    found = ClassArchive("/spark", {}, java).options().partition("-XX:SharedArchiveFile=")[2].partition('"')[0]
    assert Path(found).read_text() == "classes"
    assert not path.exists()
    # Another Spark, or another build of Java, has its own.
    assert written(ClassArchive("/other", {}, java).options()).name
    Path(java["JAVA_HOME"], "bin", "java").write_text("17.1")
    assert written(ClassArchive("/spark", {}, java).options()).name


@pytest.mark.parametrize("end", ["sys.exit(1)", "import os; os.kill(os.getpid(), 9)"])
def test_an_archive_that_is_not_complete_is_deleted_and_written_by_the_next_jvm(java: dict[str, str], end: str) -> None:
    archive = ClassArchive("/spark", {}, java)
    path = written(archive.options())
    archive.finish(jvm(f"open({str(path)!r}, 'w').write('cla'); {end}"))
    assert not path.exists()
    (path.parent / f"{path.name.split('.')[0]}.77.tmp").write_text("of a process that was killed")
    again = ClassArchive("/spark", {}, java)
    assert written(again.options()).parent == path.parent
    assert list(path.parent.glob("*.tmp")) == []


def test_without_java_or_a_writable_cache_there_is_no_archive(java: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    assert ClassArchive("/spark", {}, java).options() == ""
    assert ClassArchive("/spark", {}, {"JAVA_HOME": str(tmp_path / "none")}).options() == ""
    assert ClassArchive("/spark", {}, {"PATH": str(tmp_path)}).options() == ""


def test_a_process_that_was_forked_leaves_the_jvm_and_its_archive_alone(
    java: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = ClassArchive("/spark", {}, java)
    archive.options()
    running = jvm()
    monkeypatch.setattr("os.getpid", lambda: -1)
    archive.finish(running)
    assert running.poll() is None
    monkeypatch.undo()
    running.communicate()


@pytest.mark.parametrize(
    ("conf", "environment"),
    [
        ({}, {"SPARK_SUBMIT_OPTS": "-Xshare:off"}),
        ({}, {"JAVA_TOOL_OPTIONS": "-XX:SharedArchiveFile=mine.jsa"}),
        ({"spark.driver.extraJavaOptions": "-XX:ArchiveClassesAtExit=mine.jsa"}, {}),
        ({"spark.driver.extraClassPath": "/jars"}, {}),
        ({}, {"HADOOP_CONF_DIR": "/etc/hadoop"}),
        ({}, {"SPARK_CONF_DIR": str(Path(__file__).parent)}),
    ],
)
def test_the_user_s_own_options_win_and_directories_on_the_class_path_prevent_an_archive(
    java: dict[str, str], conf: dict[str, str], environment: dict[str, str]
) -> None:
    assert ClassArchive("/spark", conf, java | environment).options() == ""
    other = {"spark.driver.extraJavaOptions": "-Xss4m"}
    assert written(ClassArchive("/spark", other, java | {"SPARK_CONF_DIR": "/none"}).options()).name
