"""Whose session a flow runs in, and what is left of it."""

import subprocess
import sys

import pytest
from pyspark.sql import SparkSession

from aggregations.spark.session import master_of, session

pytestmark = pytest.mark.spark

OWN = """
import os
from pyspark import SparkContext
from pyspark.sql import SparkSession
from aggregations.spark.session import session
from tests.support.spark import FAST
before = dict(os.environ)
with session("own", master="local[1]", conf=FAST) as spark:
    assert spark.range(3).count() == 3
assert dict(os.environ) == before
assert SparkContext._active_spark_context is None
print("restored")
"""


def test_a_session_of_our_own_leaves_neither_itself_nor_a_variable_behind() -> None:
    ended = subprocess.run([sys.executable, "-c", OWN], capture_output=True, text=True, check=False)
    assert ended.stdout.strip() == "restored", ended.stderr


def test_a_session_that_there_is_is_used_and_has_its_settings_back(spark: SparkSession) -> None:
    name, ours = "spark.sql.shuffle.partitions", "spark.sql.adaptive.enabled"
    spark.conf.set(ours, "true")
    before = spark.conf.get(name)
    with session("another", master="local[7]", conf={name: "3", "spark.app.name": "fixed"}) as found:
        assert found is spark
        assert (found.conf.get(name), found.conf.get(ours)) == ("3", "false")
    assert (spark.conf.get(name), spark.conf.get(ours)) == (before, "true")
    assert spark.range(3).count() == 3
    spark.conf.set(ours, "false")
    assert master_of("local[7]", {}) == spark.sparkContext.master
