"""What random flows of both paths are fed with: batches of records with chains, and rejected records that come back."""

import json
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

from hypothesis import strategies as st

from aggregations.definition.element import Record
from aggregations.report import DeadLetter
from envelope import Envelope, Hop, encode
from tests.support.both import TOPIC_ID, Both

Headers = tuple[tuple[str, bytes | None], ...]


@st.composite
def chained_batches(
    draw: st.DrawFn,
    topic: str,
    payloads: st.SearchStrategy[dict[str, Any]],
    keys: Sequence[bytes | None],
    headers: st.SearchStrategy[Headers] = st.just(()),  # noqa: B008 - a strategy does not change
) -> list[list[Record]]:
    """Records with chains of different lengths, some sent again in their batch or later."""
    found, sent, offset = [], list[tuple[bytes | None, bytes]](), 0
    for _ in range(draw(st.integers(1, 3))):
        batch = []
        for payload in draw(st.lists(payloads, min_size=1, max_size=6)):
            if sent and draw(st.integers(0, 4)) == 0:
                key, value = draw(st.sampled_from(sent))
            else:
                key = draw(st.sampled_from(keys))
                index = draw(st.sampled_from([0, 0, 1, None]))
                chain = [
                    Hop("raw", 0, offset, via="a", index=index, topic_id="R"),
                    Hop("mid", 0, offset, via="b", index=2),
                ]
                used = tuple(chain[: draw(st.integers(0, 2))])
                value = encode(Envelope(json.dumps(payload).encode(), used, event_id=draw(st.sampled_from(["", "e1"]))))
                sent.append((key, value))
            batch.append(Record(topic, 0, offset, key, value, 1_000 + offset, draw(headers), TOPIC_ID))
            offset += 1
        found.append(batch)
    return found


def bring_back(
    both: Both,
    found: list[list[Record]],
    ways: list[list[str]],
    back: Callable[[DeadLetter, int, str], Record],
) -> None:
    """Process what was rejected again and again, each time in other ways.

    Args:
        both: The two runs.
        found: The batches that were processed.
        ways: The ways of each batch, in turn.
        back: Makes the record of a dead letter at an offset that comes back in a way.
    """
    offset = 1 + max(one.offset for batch in found for one in batch)
    for hows in ways:
        again = [back(dead, offset + n, how) for n, (dead, how) in enumerate(zip(both.dead_letters, cycle(hows)))]
        offset += len(again)
        if again:
            both.process(again)
