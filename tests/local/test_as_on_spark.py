"""What is tested on Spark is the same without it: the tests of `tests/spark`, on the local runner."""

from types import ModuleType
from typing import Any

import pytest

from tests.spark import (
    test_engine,
    test_engine_aggregates,
    test_engine_branches,
    test_engine_dead_letters,
    test_engine_discard,
    test_engine_filters,
    test_engine_growth,
    test_engine_lookups,
    test_engine_outputs,
    test_engine_relay,
    test_engine_run,
    test_engine_scatter,
    test_engine_sources,
    test_engine_start,
    test_engine_topic_life,
    test_engine_topics,
    test_engine_went_back,
    test_engine_windows,
)

pytestmark = [pytest.mark.integration]

OF_SPARK = {
    # Processes of Spark are killed, and results are cut off on their way from them.
    "test_a_process_that_dies_is_replaced_and_its_batch_tried_again",
    "test_results_that_break_off_are_not_taken_for_complete_ones",
    # It sees no effect of a task. All effects of a batch: `tests/unit/test_local_executor.py`.
    "test_the_driver_writes_manifests_downstream_first_then_returns_then_tells_the_group",
    # They call `run_flow`; the same is in `test_local_run.py`.
    "test_a_store_in_the_memory_of_one_process_is_refused",
    "test_a_store_that_cannot_be_opened_is_one_line_with_the_remedy",
    "test_a_broker_that_does_not_answer_is_one_line_with_the_remedy",
    "test_runs_of_one_flow_name_in_one_process_keep_their_states_apart",
}


def without_spark(module: ModuleType) -> dict[str, Any]:
    """The tests of a module that need no Spark context, and do not look at its jobs."""
    found = {name: one for name, one in vars(module).items() if name.startswith("test_") and callable(one)}
    return {
        name: one
        for name, one in found.items()
        if name not in OF_SPARK and {"spark", "jobs"}.isdisjoint(_arguments(one))
    }


def _arguments(function: Any) -> tuple[str, ...]:
    code = function.__code__
    return code.co_varnames[: code.co_argcount]


table = test_engine_lookups.table

for one in (
    test_engine,
    test_engine_aggregates,
    test_engine_branches,
    test_engine_dead_letters,
    test_engine_discard,
    test_engine_filters,
    test_engine_growth,
    test_engine_lookups,
    test_engine_outputs,
    test_engine_relay,
    test_engine_run,
    test_engine_scatter,
    test_engine_sources,
    test_engine_start,
    test_engine_topic_life,
    test_engine_topics,
    test_engine_went_back,
    test_engine_windows,
):
    globals().update(without_spark(one))
