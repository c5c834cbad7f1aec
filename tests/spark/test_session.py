"""Whose context a flow runs in, and what is left of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest
from pyspark import SparkContext

from aggregations.spark.session import master_of, session
from tests.support.spark import FAST

pytestmark = pytest.mark.spark

OWN = """
import os, signal, threading
from pyspark import SparkContext
from aggregations.spark.retry import StoppedError
from aggregations.spark.session import session
from tests.support.spark import FAST
signal.signal(signal.SIGINT, lambda *_: print("interrupted"))
before = dict(os.environ)
stop = threading.Event()
stop.set()
try:
    with session("stopped", master="local[1]", conf=FAST, stop=stop):
        print("started")
except StoppedError:
    print("stopped")
with session("own", master="local[1]", conf=FAST) as spark:
    assert spark.parallelize(range(3)).count() == 3
    jvm = spark._gateway.proc.pid
    print("group", os.getpgid(jvm) == os.getpgid(0))
    os.kill(jvm, signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    assert spark.parallelize(range(3)).count() == 3
assert dict(os.environ) == before
assert SparkContext._active_spark_context is None
print("restored")
"""

SUBMITTED = """
import json
from aggregations.spark.session import master_of, session
before = master_of("local[7]", {"spark.master": "local[6]"})
with session("ours", master="local[7]", conf={"spark.my.setting": "ours", "spark.my.other": "ours"}) as spark:
    conf = spark.getConf()
    names = ["spark.master", "spark.app.name", "spark.my.setting", "spark.my.other", "spark.python.daemon.module"]
    found = {name: conf.get(name) for name in names}
    polars = spark.parallelize([0]).map(lambda _: __import__("os").environ["POLARS_MAX_THREADS"]).first()
    print(json.dumps([before, master_of("local[7]", {}), spark.master, found, polars]))
"""


def test_what_was_submitted_wins_over_the_program_and_that_over_the_engine(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SUBMITTED)
    command = [str(Path(pyspark.__file__).parent / "bin" / "spark-submit"), "--master", "local[1]", "--name", "theirs"]
    command += ["--conf", "spark.my.setting=theirs"]
    command += [text for name, value in FAST.items() for text in ("--conf", f"{name}={value}")]
    ended = subprocess.run(
        [*command, str(tmp_path / "program.py")],
        env={**os.environ, "PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in ended.stdout.splitlines() if line.startswith("[")]
    assert lines, ended.stdout + ended.stderr
    found = {
        "spark.master": "local[1]",
        "spark.app.name": "theirs",
        "spark.my.setting": "theirs",
        "spark.my.other": "ours",
        "spark.python.daemon.module": "aggregations.spark.daemon",
    }
    assert json.loads(lines[-1]) == ["local[1]", "local[1]", "local[1]", found, "1"]
    assert (
        "spark-submit was given spark.master, spark.my.setting; the program's own setting is not used" in ended.stdout
    )


def test_a_session_of_our_own_can_be_stopped_while_it_starts_leaves_nothing_behind_and_no_signal_ends_its_jvm() -> None:
    ended = subprocess.run([sys.executable, "-c", OWN], capture_output=True, text=True, check=False)
    assert ended.stdout.split() == ["stopped", "group", "False", "interrupted", "restored"], ended.stderr


def test_a_context_that_there_is_is_used_as_it_is_and_stays(spark: SparkContext) -> None:
    before = spark.getConf().getAll()
    with session("another", master="local[7]", conf={"spark.my.setting": "3"}) as found:
        assert found is spark
    assert spark.getConf().getAll() == before
    assert spark.parallelize(range(3)).count() == 3
    assert master_of("local[7]", {}) == spark.master
