import pytest

from persistence.commit.faults import Fault, Injector, use
from persistence.commit.order import Step, commit, steps_of_driver, steps_of_tasks, store_order
from persistence.commit.steps import CommitStep
from persistence.errors import Transient


def a_commit(log):
    def note(name):
        return lambda: log.append(name)

    commit(
        note("publish"),
        [("first", note("persist first")), ("second", note("persist second")), ("third", note("persist third"))],
        [("redis", note("manifest redis")), ("cassandra", note("manifest cassandra"))],
    )


IN_ORDER = [
    "publish",
    "persist third",
    "persist second",
    "persist first",
    "manifest cassandra",
    "manifest redis",
]


def test_the_last_stage_is_persisted_first_and_manifests_come_downstream_first():
    log = []
    a_commit(log)
    assert log == IN_ORDER


def test_every_effect_passes_its_fault_point():
    with use(Injector()) as faults:
        a_commit([])
    assert list(faults.reached) == [
        "publish",
        "persist:third",
        "persist:second",
        "persist:first",
        "manifest:cassandra",
        "manifest:redis",
    ]


def test_an_engine_whose_tasks_and_driver_share_a_commit_takes_the_same_steps():
    with use(Injector()) as faults:
        a_commit([])
    steps = [*steps_of_tasks(["first", "second", "third"]), *steps_of_driver(["redis", "cassandra"])]
    assert [step.point for step in steps] == list(faults.reached)
    assert steps_of_tasks([]) == [Step(CommitStep.PUBLISH)], "a flow without a stage publishes"


@pytest.mark.parametrize("done", range(len(IN_ORDER)))
def test_an_error_in_a_step_ends_the_batch_there(done):
    with use(Injector()) as faults:
        a_commit([])
    point = list(faults.reached)[done]
    log = []
    with use(Injector([Fault.parse(f"{point}.error")])), pytest.raises(Transient):
        a_commit(log)
    assert log == IN_ORDER[:done]


def test_steps_are_numbered_as_the_protocol_numbers_them():
    numbers = [
        int(line.split(".")[0]) for line in commit.__doc__.splitlines() if line.strip()[:2].rstrip(".").isdigit()
    ]
    assert numbers == [step.number for step in CommitStep]
    for step in CommitStep:
        assert f"{step.number}. `{step}" in commit.__doc__


def test_stores_are_ordered_by_their_first_stage():
    assert store_order(["a", "a", "b", "c", "c"]) == ["a", "b", "c"]
    assert store_order([]) == []


def test_a_store_that_comes_back_after_another_is_refused():
    with pytest.raises(ValueError, match="'a' come before and after stages of 'c'"):
        store_order(["a", "b", "c", "a"])
