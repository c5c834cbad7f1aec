"""Which store a stage is bound to."""

import pytest

from aggregations.errors import FlowError
from aggregations.run.binding import bind
from tests.support.two_stages import COUNT, flow


def test_a_stage_is_bound_by_name_or_by_its_own_url_or_to_the_default():
    own = flow(store="memory://own")
    assert bind(own, {"b": "memory://b"}) == {"a": "memory://own", "b": "memory://b"}
    assert bind(own, {"a": "memory://a"}, "memory://rest") == {"a": "memory://a", "b": "memory://rest"}


def test_a_stage_without_a_store_is_named():
    with pytest.raises(FlowError, match="no store for stage a, b: give --store URL or --store a=URL"):
        bind(flow(), {})
    with pytest.raises(FlowError, match="no store for stage b: give --store URL or --store b=URL"):
        bind(flow(), {"a": "memory://a"})


def test_a_store_for_no_stage_is_refused():
    with pytest.raises(FlowError, match="no stage 'c'; it has a, b"):
        bind(flow(), {"c": "memory://c"})


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("fleet", {}), "flow= takes a Flow; got str"),
        ((flow(), "memory://a"), "stores= takes a mapping of stage names to URLs.*got str"),
        ((flow(), {"a": None}), "the store of stage 'a' takes a URL; got NoneType"),
        ((flow(), {}, 3), "default= takes a URL; got int"),
    ],
)
def test_an_argument_of_another_type_is_named(arguments, match):
    with pytest.raises(FlowError, match=match):
        bind(*arguments)


def test_a_store_that_comes_back_behind_another_one_is_refused_without_showing_its_url():
    three = flow().aggregate("c", "tail", COUNT)
    with pytest.raises(FlowError, match="adjacent stages") as error:
        bind(three, {"b": "memory://b"}, "redis://:secret@host")
    assert "secret" not in str(error.value)
