"""Reasons to refuse a run on Spark before anything is opened, and the values that Spark redacts."""

import ast
import inspect
import re
import subprocess
import sys
from importlib import import_module

import pytest

from aggregations.definition.aggregates import count
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Topic
from aggregations.engine.options import RunOptions
from aggregations.errors import FlowError
from aggregations.spark.checks import check_given
from aggregations.spark.jvm import environment_of
from aggregations.spark.session import _settings
from persistence.registry import risks

FLOW = Flow("fleet").source(Topic("legs", envelope=False)).aggregate("a", "value", Fields(n=count()))


@pytest.mark.parametrize("master", ["spark://head:7077", "yarn", "k8s://https://head"])
def test_a_file_of_this_machine_is_no_store_for_workers_of_others(master: str) -> None:
    for url in ("sqlite:///tmp/a.db", "lmdb:///tmp/a"):
        with pytest.raises(FlowError, match=f"stage 'a': {url} is a file of this machine.*Redis"):
            check_given(FLOW, RunOptions(stores={"a": url}), master)
    check_given(FLOW, RunOptions(stores={"a": "redis://here"}), master)


@pytest.mark.parametrize("master", ["local", "local[*]", "local[2]"])
def test_a_file_is_a_store_for_workers_of_this_machine(master: str) -> None:
    check_given(FLOW, RunOptions(stores={"a": "sqlite:///tmp/a.db"}), master)


def test_a_risk_that_there_is_not_is_refused_with_the_names_of_those_that_there_are() -> None:
    with pytest.raises(FlowError, match=r"unknown risk lost_records; choose from .*lost-records.*topic-recreated"):
        check_given(FLOW, RunOptions(stores={"a": "sqlite:///a.db"}, accept=["lost_records", "beyond-end"]), "local")
    with pytest.raises(FlowError, match="unknown risk eviction"):
        check_given(FLOW, RunOptions(stores={"a": "sqlite:///a.db"}, accept=["eviction"]), "local")
    check_given(FLOW, RunOptions(stores={"a": "redis://here"}, accept=["eviction", "definition"]), "local")
    check_given(FLOW, RunOptions(stores={"a": "cassandra://here/fleet"}, accept=["replication-1"]), "local")


def test_risks_and_settings_of_another_type_are_named() -> None:
    with pytest.raises(FlowError, match=r"accept= takes a list of risks, such as \['definition'\]; got text"):
        check_given(FLOW, RunOptions(stores={"a": "sqlite:///a.db"}, accept="definition"), "local")
    with pytest.raises(FlowError, match=r"conf spark\.cores takes text; got int"):
        check_given(FLOW, RunOptions(stores={"a": "sqlite:///a.db"}), "local", conf={"spark.cores": 2})  # type: ignore[dict-item]


@pytest.mark.parametrize("store", ["redis", "cassandra"])
def test_every_risk_that_a_preflight_can_find_unsafe_is_in_its_list(store: str) -> None:
    modules = {"redis": ["preflight"], "cassandra": ["preflight", "paxos"]}[store]
    found = {
        next(str(one.value) for one in ast.walk(node.args[0]) if isinstance(one, ast.Constant))
        for module in modules
        for node in ast.walk(ast.parse(inspect.getsource(import_module(f"persistence.{store}.{module}"))))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "Finding"
        and any(word.arg == "unsafe" for word in node.keywords)
    }
    # `replication-{count}` is unsafe for one count.
    known = risks(f"{store}://here/fleet")
    assert {next((risk for risk in known if risk.startswith(name)), name) for name in found} == known


def test_what_the_user_wants_redacted_comes_on_top_of_what_has_to_be() -> None:
    key = "spark.redaction.regex"
    ours, both = (re.compile(_settings({"spark.master": "local", **conf})[key]) for conf in ({}, {key: "(?i:card)"}))
    assert ours.search("kafka.sasl.JAAS.config")
    assert both.search("kafka.sasl.JAAS.config")
    assert both.search("my.CARD.number")
    assert not both.search("spark.app.name")


def test_a_jvm_that_reads_no_record_compiles_once_and_the_user_s_own_options_win() -> None:
    ours = environment_of({}, "local[2]")["SPARK_SUBMIT_OPTS"].split()
    assert "-XX:TieredStopAtLevel=1" in ours
    both = environment_of({"SPARK_SUBMIT_OPTS": "-XX:TieredStopAtLevel=4"}, "local[2]")["SPARK_SUBMIT_OPTS"].split()
    assert both == [*ours, "-XX:TieredStopAtLevel=4"]
    assert "SPARK_SUBMIT_OPTS" not in environment_of({}, "spark://master:7077")


def test_the_driver_does_not_load_what_only_tasks_compile() -> None:
    code = "import sys, aggregations.engine.engine; print({'numba', 'llvmlite'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
