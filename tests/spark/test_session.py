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
from aggregations.engine.retry import StoppedError
from aggregations.spark.session import session
signal.signal(signal.SIGINT, lambda *_: print("interrupted"))
before = dict(os.environ)
stop = threading.Event()
stop.set()
try:
    with session("stopped", master="local[1]", stop=stop):
        print("started")
except StoppedError:
    print("stopped")
with session("own", master="local[1]") as spark:
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

ENDED = """
import os, signal, threading
from pyspark import SparkContext
from aggregations.errors import SparkEndedError
from aggregations.spark.action import Action
from aggregations.engine.ranges import Slot
from aggregations.spark.session import session
from tests.support.jobs import changed
from tests.unit.test_spark_tasks import FLOW, JOB
job = changed(JOB, tasks=[Slot(0, ())])

def kill(spark):
    os.kill(spark._gateway.proc.pid, signal.SIGKILL)
    spark._gateway.proc.wait()

def stop(spark):
    spark._jsc.sc().stop()

for end in (kill, stop, SparkContext.stop):
    with session("ends", master="local[1]") as spark:
        action = Action(spark, FLOW)
        end(spark)
        for _ in range(2):
            try:
                action.execute(job)
            except SparkEndedError as error:
                print(error)
    assert SparkContext._active_spark_context is None
with session("next", master="local[1]") as spark:
    assert spark.parallelize(range(3)).count() == 3
kill(spark)
with session("next", master="local[1]") as spark:
    assert spark.parallelize(range(3)).count() == 3
spark = SparkContext(conf=spark.getConf())
kill(spark)
try:
    with session("lent"):
        print("lent")
except SparkEndedError as error:
    print(error)
"""

SHARED = """
import os, threading
from pyspark import SparkContext
from aggregations.spark.session import session
before = dict(os.environ)
found, all_in, one_left = [], threading.Barrier(2), threading.Event()

def run(number):
    with session("shared", master="local[1]") as spark:
        found.append(spark)
        all_in.wait()
        if number:
            one_left.wait()
        print(spark.parallelize(range(3)).count())
    one_left.set()

threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
for one in threads:
    one.start()
for one in threads:
    one.join()
print(found[0] is found[1], SparkContext._active_spark_context, dict(os.environ) == before)
"""

AHEAD = """
import os, subprocess, sys, tempfile
from pathlib import Path
from aggregations.spark import jvm
assert "pyspark" not in sys.modules
try:
    with jvm.jvm_ahead("local[1]", {}):
        refused = jvm._ahead
        raise OSError
except OSError:
    print(refused.process.returncode, refused._directory.exists())
jvm.start_ahead("local[1]", {"spark.app.name": "ahead"})
first = jvm._ahead
jvm.start_ahead("local[7]", {})
assert jvm._ahead is first
from aggregations.spark.session import session
with session("own", master="local[1]") as spark:
    def parents(_):
        daemon, up = os.getppid(), lambda pid: int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        return up(up(daemon))
    server = spark.parallelize([0], 1).map(parents).first()
    print(spark._gateway.proc is first.process, spark.appName, server == first._python_ahead.process.pid)
spark._gateway.shutdown()
first.process.kill()
first.process.wait()
from aggregations.spark.session import _forget_jvm
_forget_jvm()
jvm.start_ahead("local[1]", {})
others = jvm._ahead
os.environ["SET_BY"] = "the flow's own module"
with session("own", master="local[1]") as spark:
    print(others.process.returncode, spark._gateway.proc is others.process, spark._jvm.System.getenv("SET_BY"))
os.environ["JAVA_HOME"] = "/none"
spark._gateway.shutdown()
spark._gateway.proc.kill()
_forget_jvm()
try:
    with session("own", master="local[1]"):
        pass
except Exception as error:
    print(type(error).__name__)
del os.environ["JAVA_HOME"]
jvm.start_ahead("local[1]", {})
print(jvm._ahead.process.pid, jvm._ahead._directory)
sys.exit()  # nothing has used it
"""

ARCHIVED = """
import sys
from aggregations.spark.session import session
with session("own", master="local[1]", conf={"spark.driver.extraJavaOptions": sys.argv[1]}) as spark:
    print(spark.parallelize(range(3)).count())
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


def test_a_jvm_that_was_started_ahead_is_used_if_it_fits_and_ended_if_nobody_uses_it() -> None:
    ended = subprocess.run([sys.executable, "-c", AHEAD], capture_output=True, text=True, check=False)
    lines = ["-9 False", "True own True", "-9 False the flow's own module", "PySparkRuntimeError"]
    *found, left = ended.stdout.splitlines()
    assert found == lines, ended.stderr
    process, directory = left.split()
    assert not Path("/proc", process).exists()
    assert not Path(directory).exists()


def test_spark_s_classes_are_archived_by_the_first_jvm_and_read_by_the_next(tmp_path: Path) -> None:
    loaded = tmp_path / "loaded"
    for options in ("", f"-Xlog:class+load:file={loaded}"):
        ended = subprocess.run(
            [sys.executable, "-c", ARCHIVED, options],
            env={**os.environ, "HEADWATER_CACHE": str(tmp_path / "a cache")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.stdout == "3\n", ended.stderr
        assert "cds" not in ended.stderr
    assert [path.suffix for path in sorted((tmp_path / "a cache" / "classes").iterdir())] == [".jsa", ".lock"]
    (line,) = (line for line in loaded.read_text().splitlines() if "org.apache.spark.SparkContext " in line)
    assert line.endswith("source: shared objects file (top)")


def test_a_jvm_or_context_that_ends_is_said_and_the_next_run_of_the_process_starts_another() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDED], capture_output=True, text=True, check=False)
    jvm = "Spark's JVM ended. Check its memory (--conf spark.driver.memory=...)"
    context = "Spark ended: its context was stopped. Spark's log says why"
    here = "Spark's context was stopped by another part of this program"
    lent = "the SparkContext of this program has ended, or has not started yet. Stop it, or wait"
    assert ended.stdout.splitlines() == [jvm, jvm, context, context, here, here, lent], ended.stderr


def test_runs_that_start_at_the_same_time_share_one_context_until_the_last_one_ends() -> None:
    ended = subprocess.run([sys.executable, "-c", SHARED], capture_output=True, text=True, check=False)
    assert ended.stdout.splitlines() == ["3", "3", "True None True"], ended.stderr


def test_a_context_that_there_is_is_used_as_it_is_and_stays(spark: SparkContext) -> None:
    before = spark.getConf().getAll()
    with session("another", master="local[7]", conf={"spark.my.setting": "3"}) as found:
        assert found is spark
    assert spark.getConf().getAll() == before
    assert spark.parallelize(range(3)).count() == 3
    assert master_of("local[7]", {}) == spark.master
