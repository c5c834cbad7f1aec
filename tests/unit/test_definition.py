"""The definition hash of a stage: it changes with what it folds and how, and with nothing else."""

import ast
import functools
import importlib.util
import os
import pickle
import subprocess
import sys
import textwrap

import polars as pl
import pytest

from aggregations.definition import fingerprint as canonical
from aggregations.definition.aggregates import count, total
from aggregations.definition.fields import Fields
from aggregations.definition.fingerprint import describe_callable, describe_object
from aggregations.definition.flow import Flow
from aggregations.definition.operators import Aggregate
from aggregations.definition.source import Json, Topic
from envelope import Limits
from tests.support.pure import COLUMNS, TOPIC, bare, wrapped

BEFORE = '''
class Sum:
    """Adds."""

    def __init__(self, column):
        self.column = column

    def zero(self):
        return 0

    def fold(self, state, element):
        # The next line adds.
        return state + element[self.column]
'''


@pytest.fixture
def written(tmp_path):
    """Writes a module and gives what one expression of it makes."""

    def write(source, expression):
        path = tmp_path / f"m{len(list(tmp_path.iterdir()))}.py"
        path.write_text(textwrap.dedent(source))
        spec = importlib.util.spec_from_file_location("written", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return eval(expression, vars(module))

    return write


def definition(fold, key="tail"):
    return Aggregate("a", key, fold).definition


def test_comments_docstrings_and_layout_are_no_part_of_it(written):
    after = BEFORE.replace("    # The next line adds.\n    ", "").replace('"""Adds."""', '"""Adds all."""')
    after = after.replace("return state + element[self.column]", "return (\n            state + element[self.column])")
    assert definition(written(BEFORE, "Sum('x')")) == definition(written(after, "Sum('x')"))


def test_code_arguments_and_key_are_part_of_it(written):
    base = definition(written(BEFORE, "Sum('x')"))
    assert base != definition(written(BEFORE.replace("state +", "state -"), "Sum('x')"))
    assert base != definition(written(BEFORE, "Sum('y')"))
    assert base != definition(written(BEFORE, "Sum('x')"), key="carrier")


def test_arguments_in_slots_count_as_well(written):
    source = BEFORE.replace("    def __init__", "    __slots__ = ('column',)\n\n    def __init__", 1)
    assert definition(written(source, "Sum('x')")) != definition(written(source, "Sum('y')"))


def test_the_code_of_a_base_class_is_part_of_it(written):
    source = BEFORE + "\nclass Mine(Sum):\n    pass\n"
    changed = source.replace("state +", "state -")
    assert definition(written(source, "Mine('x')")) != definition(written(changed, "Mine('x')"))


SAME_IN_EVERY_PROCESS = """
import sys
sys.path.insert(0, {folder!r})
from held import fold
from aggregations.definition.flow import Flow
from aggregations.definition.source import Topic
flow = Flow("f").source(Topic("legs", envelope=False)).filter(lambda e: e["late"]).map(lambda e: e.value)
flow = flow.aggregate("a", lambda e: e["tail"], fold, emit=lambda e, state: [state]).aggregate("b", fold.pick, fold)
print([stage.definition for stage in flow.stages])
"""
HELD = """
class Rule:
    pass

class Fold:
    def __init__(self):
        self.rule, self.codes, self.pick = Rule(), {"b", "a", "c"}, lambda value: value + 1
    def zero(self):
        return 0
    def fold(self, state, element):
        return self.pick(state)

fold = Fold()
"""


def test_it_is_the_same_in_every_process_even_where_repr_shows_an_address_or_a_set(tmp_path):
    (tmp_path / "held.py").write_text(HELD)
    program = SAME_IN_EVERY_PROCESS.format(folder=str(tmp_path))
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in (1, 2)
    }
    assert len(found) == 1


def test_functions_that_an_argument_holds_are_part_of_it(written):
    changed = HELD.replace("value + 1", "value + 2")
    assert describe_object(written(HELD, "fold")) != describe_object(written(changed, "fold"))


def test_a_lambda_is_known_by_its_own_code_wherever_it_stands(written):
    source = """
    keys = [lambda e: e["a"], lambda e: e["b"]]
    same = (lambda   e:
        e["a"])  # moved, and spread over lines
    """
    first, second, same = (
        describe_callable(written(source, expression)) for expression in ("keys[0]", "keys[1]", "same")
    )
    assert first == same != second


def test_what_a_function_closes_over_and_its_defaults_are_part_of_it(written):
    source = """
    import functools
    def by(column, default=None):
        def key(element, default=default):
            return element[column] or default
        return key
    """
    assert describe_callable(written(source, "by('a')")) == describe_callable(written(source, "by('a')"))
    assert describe_callable(written(source, "by('a')")) != describe_callable(written(source, "by('b')"))
    assert describe_callable(written(source, "by('a')")) != describe_callable(written(source, "by('a', 1)"))


def test_partials_methods_builtins_and_callable_objects_have_a_text():
    assert describe_callable(functools.partial(max, 1)) != describe_callable(functools.partial(max, 2))
    assert describe_callable(str.upper) != describe_callable(str.lower)
    assert describe_callable("abc".upper) != describe_callable("abd".upper)


def test_a_function_that_closes_over_itself_ends():
    def again(element):
        return again(element)

    assert describe_callable(again)


def test_code_typed_into_an_interpreter_is_known_by_its_bytecode():
    one, other = eval("lambda e: e + 1"), eval("lambda e: e + 2")
    assert describe_callable(one) != describe_callable(other)


def test_it_travels_with_the_stage_because_a_worker_may_not_have_the_source():
    flow = two(Flow("f").source(bare()).filter("late"))
    assert pickle.loads(pickle.dumps(flow)).stages == flow.stages


def test_fields_are_known_by_all_that_they_read():
    base = definition(Fields(s=total(pl.col("x").round(1))))
    assert base == definition(Fields(s=total(pl.col("x").round(1))))
    assert base != definition(Fields(s=total(pl.col("x").round(2))))
    assert definition(Fields(s=total("x"))) == definition(Fields(s=total(pl.col("x"))))


def made(build, topic=None):
    """Definitions of the stages of a flow."""
    return [stage.definition for stage in build(Flow("f").source(topic or bare())).stages]


def two(flow, key="tail", **options):
    return flow.aggregate("a", key, COUNT, **options).aggregate("b", "carrier", COUNT)


COUNT = Fields(n=count())
STEPS = {
    "a filter": lambda flow: flow.filter("late"),
    "another filter": lambda flow: flow.filter(~pl.col("late")),
    "a filter in Python": lambda flow: flow.filter(lambda element: element["late"]),
    "a column": lambda flow: flow.map(minutes=pl.col("minutes") * 2),
    "a map in Python": lambda flow: flow.map(lambda element: element.value),
    "a flat-map": lambda flow: flow.flat_map(lambda element: [element.value]),
    "a diversion": lambda flow: flow.divert("late"),
}


def test_what_decides_which_elements_reach_a_stage_is_part_of_its_definition_and_of_all_behind_it():
    plain = made(two)
    found = [made(lambda flow, step=step: two(step(flow))) for step in STEPS.values()]
    for stage in (0, 1):
        assert len({plain[stage], *(one[stage] for one in found)}) == 1 + len(STEPS)


def test_a_step_between_two_stages_is_part_of_the_second_one_only():
    plain = made(two)
    between = made(lambda flow: flow.aggregate("a", "tail", COUNT).filter("late").aggregate("b", "carrier", COUNT))
    assert between[0] == plain[0]
    assert between[1] != plain[1]


def test_the_order_of_steps_is_part_of_it():
    early = made(lambda flow: two(flow.map(late=~pl.col("late")).filter("late")))
    assert early != made(lambda flow: two(flow.filter("late").map(late=~pl.col("late"))))


def test_what_a_stage_emits_is_part_of_those_behind_it_and_with_it_its_state():
    def emitting(emit, **options):
        return made(lambda flow: two(flow, emit=emit, **options))

    plain, emitted = made(two), emitting(lambda element, state: [element.value])
    assert emitted[0] == plain[0]
    assert len({plain[1], emitted[1], emitting(lambda element, state: [state])[1]}) == 3
    assert emitted[1] != emitting(lambda element, state: [element.value], key="carrier")[1]
    assert made(lambda flow: two(flow, key="carrier"))[1] == plain[1]


def test_what_only_passes_elements_on_is_no_part_of_it():
    assert made(lambda flow: two(flow.publish("out"))) == made(two)
    published = made(
        lambda flow: flow.aggregate("a", "tail", COUNT).publish_states("s").aggregate("b", "carrier", COUNT)
    )
    assert published == made(two)


def of_source(topic=None, **options):
    return made(lambda flow: flow.aggregate("a", "tail", COUNT, **options), topic)


def test_what_names_lanes_and_positions_is_part_of_it():
    others = [
        of_source(co_partitioned=False),
        of_source(Topic("mirror", Json(COLUMNS), envelope=False)),
        of_source(wrapped()),
        of_source(bare(cluster="paris")),
        of_source(bare(siblings="drop")),
        of_source(bare(siblings="group")),
    ]
    assert len({of_source()[0], *(hashes[0] for hashes in others)}) == 1 + len(others)


def test_a_wider_history_more_lanes_another_limit_and_more_columns_are_no_part_of_it():
    assert of_source(history=1024, lanes=9) == of_source()
    assert of_source(bare(limits=Limits(payload_bytes=1))) == of_source()
    assert of_source(Topic(TOPIC, Json(COLUMNS | {"more": int}), envelope=False)) == of_source()


def test_where_the_keys_of_one_stage_are_is_no_matter_of_another():
    """Each stage names its lanes by its own key."""
    spread = made(lambda flow: two(flow, co_partitioned=False))
    assert (spread[0] != made(two)[0], spread[1] == made(two)[1]) == (True, True)


def test_a_definition_is_found_while_another_thread_formats_tracebacks(monkeypatch):
    parse, failures = ast.parse, iter([SystemError, SystemError])

    def parsing(*arguments, **options):
        if failure := next(failures, None):
            raise failure("AST constructor recursion depth mismatch (before=210, after=61)")
        return parse(*arguments, **options)

    expected = describe_callable(bare)
    canonical._source_of_code.cache_clear()  # it would not be parsed again
    monkeypatch.setattr(ast, "parse", parsing)
    assert describe_callable(bare) == expected
    assert next(failures, None) is None
