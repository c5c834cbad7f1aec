"""Dead letters that the generation before a rebuild has folded, redriven again from those of the rebuild."""

from contextlib import closing

import pytest

from aggregations.definition.aggregates import count
from aggregations.definition.element import Element, Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.report import DeadLetter
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from jobs.replaying.generations import begin_rebuild, close_live, end_swap, generations_of
from tests.support.both import redriven_record
from tests.support.pure import COLUMNS, FLEET, TOPIC, TOPIC_ID, chained, fresh_store, hop, wrapped
from tests.support.replays import author_of


def repaired(element: Element) -> object:
    """Rejects a record unless it is redriven."""
    if element["minutes"] == 1 and not element.chain[-1].pass_through:
        raise ValueError
    return element.value


FLOW = Flow("fleet").source(wrapped()).aggregate("aircraft", "tail", FLEET).map(repaired)
FLOW = FLOW.aggregate("carrier", "carrier", FLEET).publish("out", key="tail")


def leg(offset: int) -> Record:
    return chained(offset, hop("raw", 0, offset), key="N1", carrier="AA", minutes=offset, event_id=f"e{offset}")


class Reader:
    """A flow that reads the outputs, with states of few positions."""

    def __init__(self, history: int) -> None:
        source = Topic("out", Json(COLUMNS))
        self._flow = Flow("reader").source(source).aggregate("seen", "tail", Fields(n=count()), history=history)
        self._urls = bind(self._flow, {}, fresh_store())
        self._read = 0

    def read(self, run: MemoryRunner) -> int:
        """Read what a run has published; return the number of events folded so far."""
        with closing(MemoryRunner(self._flow, self._urls, ends={})) as reader:
            for one in run.outputs:
                reader.process([Record("out", 0, self._read, one.key, one.value, topic_id="out-id")])
                self._read += 1
            events: int = reader.results("seen")[b"N1"]["n"]
            return events


def folded(reader: Reader, *, proven: bool) -> tuple[int, int]:
    """Redrive a letter in each of two generations; return how many events the reader has folded after each.

    Args:
        reader: The reader of the outputs.
        proven: The first generation knows that no run before it has folded the event.
    """
    urls, log = bind(FLOW, {}, fresh_store()), [leg(at) for at in range(4)]
    first = MemoryRunner(FLOW, urls, ends={}, topic_ids={TOPIC: TOPIC_ID})
    first.process(log[:1])
    if proven:
        first.close()
    else:
        first.run.close()  # it may have died after it had folded more
    with closing(MemoryRunner(FLOW, urls, topic_ids={TOPIC: TOPIC_ID})) as old:
        old.process(log[1:])
        log.append(redriven_record(FLOW, the_letter(old), 4))
        old.process(log[4:])
        log += [leg(at) for at in range(5, 10)]
        old.process(log[5:])
        before = reader.read(old)
    author = author_of("a test")
    with generations_of(FLOW, urls) as found:
        pointer, note = begin_rebuild(found, author, live=1, redefined=False)
        with closing(
            MemoryRunner(FLOW, urls, ends={}, generation=2, rebuilt=note, topic_ids={TOPIC: TOPIC_ID})
        ) as rebuild:
            rebuild.process(log)
            letter = the_letter(rebuild)
        close_live(found, pointer)
        assert end_swap(found, author).live == 2
    with closing(MemoryRunner(FLOW, urls, ends={}, topic_ids={TOPIC: TOPIC_ID})) as new:
        new.process([redriven_record(FLOW, letter, 10, generation=2)])
        assert new.results("carrier") == {b"AA": {"n": 9, "m": sum(range(1, 10)) - 4}}
        assert len(new.outputs) == 1
        return before, reader.read(new)


def the_letter(run: MemoryRunner) -> DeadLetter:
    [letter] = run.dead_letters
    assert (letter.record.offset, letter.stage) == (1, "carrier")
    return letter


@pytest.mark.parametrize("proven", [True, False])
def test_a_reader_that_holds_the_position_drops_the_second_output(proven: bool) -> None:
    assert folded(Reader(history=32), proven=proven) == (8, 8)


def test_a_reader_drops_it_below_its_floor_too_if_the_first_output_was_marked_as_missing() -> None:
    assert folded(Reader(history=2), proven=True) == (8, 8)


def test_a_reader_folds_it_again_if_the_first_output_was_not_marked_and_has_left_its_history() -> None:
    assert folded(Reader(history=2), proven=False) == (8, 9)
