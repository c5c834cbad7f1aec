"""The definition hash of a stage: it changes with what the fold does, and with nothing else."""

import functools
import importlib.util
import os
import pickle
import subprocess
import sys
import textwrap

import polars as pl
import pytest

from aggregations.code import describe_callable, describe_object
from aggregations.fields import Fields, count, total
from aggregations.operators import Aggregate
from tests.support.pure import bare

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
from aggregations.operators import Aggregate
print(Aggregate("a", lambda e: e["tail"], fold).definition)
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
    stage = Aggregate("a", pl.col("x") + 1, Fields(n=count()))
    assert pickle.loads(pickle.dumps(stage)).definition == stage.definition


def test_fields_are_known_by_all_that_they_read():
    base = definition(Fields(s=total(pl.col("x").round(1))))
    assert base == definition(Fields(s=total(pl.col("x").round(1))))
    assert base != definition(Fields(s=total(pl.col("x").round(2))))
    assert definition(Fields(s=total("x"))) == definition(Fields(s=total(pl.col("x"))))


def test_steps_before_a_stage_are_no_part_of_it():
    from aggregations.flow import Flow

    flow = Flow("f").source(bare())
    plain = flow.aggregate("a", "tail", Fields(n=count()))
    filtered = flow.filter("late").aggregate("a", "tail", Fields(n=count()))
    assert plain.stages[0].aggregate.definition == filtered.stages[0].aggregate.definition
