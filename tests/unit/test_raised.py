"""Why user code failed: exception and line in log and dead letter, its text in the dead letter alone."""

import json
import logging
import operator
import pickle

import polars as pl
import pytest

from aggregations.definition.aggregates import count
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from envelope import EnvelopeError, Reason
from envelope.raised import Raised
from tests.support.pure import bare, leg, runner

SECRET = "4111 1111 1111 1111"


class Failing:
    """A fold that fails of a record without minutes."""

    def zero(self):
        return 0

    def fold(self, state, element):
        return state + self.helped(element)

    def helped(self, element):
        if element["carrier"]:
            raise LookupError(f"card {element['carrier']}")
        return json.loads(element["tail"])


LINE = Failing.helped.__code__.co_firstlineno


def flow():
    return Flow("fleet").source(bare())


def folded(of, *records):
    run = runner(of)
    run.process(records or [leg(0, "N1", carrier=SECRET)])
    return run.dead_letters


def test_a_dead_letter_names_exception_line_and_text():
    [dead] = folded(flow().aggregate("a", "tail", Failing()))
    assert (dead.reason, dead.detail) == (Reason.FOLD_FAILED, "LookupError in the fold of stage a")
    assert dead.raised == Raised("LookupError", f"test_raised.py:{LINE + 2} in helped", f"card {SECRET}")


def test_of_a_library_it_is_the_user_s_line_that_calls_it():
    [dead] = folded(flow().aggregate("a", "tail", Failing()), leg(0, "N1"))
    assert dead.raised.kind == "JSONDecodeError"
    assert dead.raised.at == f"test_raised.py:{LINE + 3} in helped"


def broken(element):
    raise ValueError(SECRET)


@pytest.mark.parametrize(
    "of",
    [
        flow().map(broken).aggregate("a", lambda e: "k", Fields(n=count())),
        flow().filter(broken).aggregate("a", "tail", Fields(n=count())),
        flow().divert(broken).aggregate("a", "tail", Fields(n=count())),
        flow().flat_map(broken).aggregate("a", lambda e: "k", Fields(n=count())),
        flow().aggregate("a", broken, Fields(n=count())),
        flow().aggregate("a", "tail", Fields(n=count()), emit=lambda element, state: broken(element)),
        flow().aggregate("a", "tail", Fields(n=count())).publish("out", key=broken),
        flow().aggregate("a", "tail", Fields(n=count())).publish("out", value=broken),
    ],
    ids=["map", "filter", "divert", "flat_map", "key", "emit", "publish key", "publish value"],
)
def test_every_function_of_a_flow_is_named(of):
    [dead] = folded(of)
    assert dead.raised == Raised("ValueError", f"test_raised.py:{broken.__code__.co_firstlineno + 1} in broken", SECRET)
    assert SECRET not in dead.detail


def test_a_function_without_a_line_of_its_own_has_none():
    [dead] = folded(flow().aggregate("a", operator.itemgetter("nothing"), Fields(n=count())))
    assert (dead.raised.kind, dead.raised.at) == ("KeyError", "")
    assert str(dead.raised) == "KeyError"


def test_what_no_user_code_raised_has_a_detail_alone():
    [dead] = folded(flow().aggregate("a", "carrier", Fields(n=count())), leg(0))
    assert (dead.raised, dead.detail) == (None, "the stage's key is null")
    [dead] = folded(flow().filter(pl.col("tail").cast(pl.Int64) > 0).aggregate("a", "tail", Fields(n=count())))
    assert (dead.raised, dead.detail) == (None, "an expression cannot be evaluated for it")


def test_the_log_has_exception_line_and_count_and_no_value(caplog):
    run = runner(flow().aggregate("a", "tail", Failing()))
    with caplog.at_level(logging.WARNING, logger="headwater"):
        run.process([leg(offset, f"N{offset}", carrier=SECRET) for offset in range(3)])
    assert caplog.messages == [
        f"3 dead letters of stage a: fold_failed, LookupError at test_raised.py:{LINE + 2} in helped"
    ]
    assert run.report.raised.total() == 3


def raised_at(*places):
    """Where an exception counts as raised that comes through a function in each of these (module, file), outermost first."""
    call = None
    for module, file in reversed(places):
        scope = {"__name__": module, "inner": call}
        exec(compile("def run():\n    " + ("inner()" if call else "raise ValueError"), file, "exec"), scope)
        call = scope["run"]
    with pytest.raises(ValueError) as caught:
        call()
    error = caught.value
    while error.__traceback__.tb_frame.f_code.co_name != "run":
        error.__traceback__ = error.__traceback__.tb_next
    return Raised.of(error).at


OWN, ENGINE, DECODER = ("fleet", "/srv/fleet.py"), ("aggregations.x", "/x/engine.py"), ("json.decoder", "/x/decoder.py")
NUMPY, DEMO, COMMAND = (
    ("numpy.core", "/v/site-packages/core.py"),
    ("jobs.demo.flow", "/x/flow.py"),
    ("jobs.cli", "/x/c.py"),
)


@pytest.mark.parametrize(
    ("places", "at"),
    [
        ((ENGINE, OWN, ENGINE), "fleet.py:2 in run"),
        ((OWN, ("routes", "C:\\jobs\\routes.py")), "routes.py:2 in run"),
        ((ENGINE, OWN, NUMPY), "fleet.py:2 in run"),
        ((OWN, DECODER), "fleet.py:2 in run"),
        ((ENGINE, DECODER, NUMPY), "decoder.py:2 in run"),
        ((ENGINE, DEMO, ENGINE), "flow.py:2 in run"),
        ((COMMAND, ENGINE), ""),
    ],
)
def test_the_line_is_the_innermost_of_the_user_or_else_the_outermost_of_a_library(places, at):
    assert raised_at(*places) == at


class Unspeakable(Exception):
    """Its text cannot be had."""

    def __str__(self):
        raise RuntimeError


def test_an_exception_whose_text_raises_or_is_long_is_described_all_the_same():
    assert Raised.of(Unspeakable()) == Raised("Unspeakable")
    assert Raised.of(ValueError("é" * 2000)) == Raised("ValueError", "", "é" * 500)


def test_what_was_raised_goes_with_the_error_from_one_process_to_another():
    error = EnvelopeError(Reason.FOLD_FAILED, "x")
    error.raised = Raised("KeyError", "fleet.py:1 in fold", "'late'")
    assert pickle.loads(pickle.dumps(error)).raised == error.raised
