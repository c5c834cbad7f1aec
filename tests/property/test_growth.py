"""Random growth, lag, copies, restarts and clocks against a count of every event once."""

from hypothesis import given, settings
from hypothesis import strategies as st

from aggregations.run.binding import bind
from tests.support.growing import MAX_AGE, Legs, flow
from tests.support.pure import fresh_store

steps = st.one_of(
    st.tuples(st.just("write"), st.lists(st.integers(0, 5), min_size=1, max_size=12)),
    st.tuples(st.just("grow"), st.integers(1, 4)),
    st.tuples(st.just("learn"), st.none()),
    st.tuples(st.just("again"), st.integers(1, 6)),
    st.tuples(st.just("fold"), st.lists(st.integers(0, 9), min_size=16, max_size=16)),
    st.tuples(st.just("restart"), st.none()),
    st.tuples(st.just("wait"), st.floats(1, 2 * MAX_AGE)),
)


@settings(max_examples=3 * settings.default.max_examples)
@given(st.integers(1, 4), st.integers(1, 2), st.lists(steps, max_size=40))
def test_every_event_is_folded_once_however_the_topic_grows_and_the_flow_lags(partitions, history, course) -> None:
    legs, of = Legs.of(partitions), flow(history)
    at = bind(of, {}, fresh_store())
    runner = legs.start(of, at)
    legs.fold(runner)  # nothing records the partitions of a topic before it was first read
    grown_at = None
    for kind, number in course:
        match kind:
            case "write":
                legs.write(*number)
            case "grow" if len(legs.partitions) < 12:
                legs.grow(len(legs.partitions) + number, known=False)
                grown_at = legs.now if grown_at is None else grown_at
            case "learn":
                legs.placing, grown_at = len(legs.partitions), None
            case "again" if legs.written:
                legs.send_again(max(len(legs.written) - number, 0))
            case "fold":
                legs.fold(runner, **{f"p{i}": most for i, most in enumerate(number)})
            case "restart":
                runner = legs.start(of, at)
            case "wait":
                # A producer learns of new partitions within five minutes.
                legs.now += number
                if grown_at is not None and legs.now - grown_at >= MAX_AGE:
                    legs.placing, grown_at = len(legs.partitions), None
    for _ in range(3):
        legs.fold(runner)
    assert runner.results("s0") == legs.expected()
