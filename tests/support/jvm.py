"""Builds the Java example: resolves its jars, generates the stubs of the schema, and compiles both."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.stack import jars
from jobs.stack.java import java

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "examples" / "jvm"
SCHEMA = "headwater/envelope/v1/envelope.proto"
PAGE = ROOT / "docs" / "guides" / "jvm.md"


def coordinates() -> tuple[str, ...]:
    """What the guide tells a build to depend on, and a log binding."""
    found = re.findall(r"`([\w.-]+:[\w.-]+:[\w.-]+)`", PAGE.read_text())
    assert found
    return (*found, "org.slf4j:slf4j-simple:1.7.36@jar")


def compiled(into: Path) -> list[str]:
    """Compile the example, and return the command that runs one of its classes."""
    compiler = Path(java()).with_name("javac")
    if not compiler.exists() and shutil.which("javac") is None:
        pytest.skip("no javac: a Java runtime has none")
    class_path = [str(jar) for jar in jars.resolve("jvm-example", coordinates())]
    generated, classes = into / "generated", into / "classes"
    generated.mkdir()
    protoc = [str(Path(sys.executable).with_name("protoc")), f"-I{ROOT / 'proto'}", f"--java_out={generated}", SCHEMA]
    javac = [str(compiler) if compiler.exists() else "javac", "--release", "17", "-proc:none", "-d", str(classes)]
    strict = ["-Xlint:all,-serial", "-Werror", "-cp", ":".join([str(classes), *class_path])]
    _run(protoc)
    _run([*javac, "-nowarn", "-cp", ":".join(class_path), *map(str, generated.rglob("*.java"))])
    _run([*javac, *strict, *map(str, SOURCES.glob("*.java"))])
    options = ["-Xmx128m", "-XX:TieredStopAtLevel=1", "-Dorg.slf4j.simpleLogger.defaultLogLevel=error"]
    return [java(), *options, "-cp", ":".join([str(classes), *class_path])]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr or done.stdout
