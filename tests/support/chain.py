"""A flow, and a second flow that reads what it publishes."""

from typing import Any

from aggregations.definition.aggregates import count
from aggregations.definition.element import Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from tests.support.letters import runner

NEXT = Topic("out", Json({"k": str, "c": str, "v": int}))


class Chain:
    """A flow, and one that reads what it publishes."""

    def __init__(self, flow: Flow[Any]) -> None:
        self.flow = flow
        self.first = runner(flow)
        self.second = runner(Flow("next").source(NEXT).aggregate("all", "k", Fields(n=count())))
        self._read = 0

    def process(self, *records: Record) -> None:
        self.first.process(records)
        self.read()

    def read(self, again: int = 0) -> None:
        """Let the second flow read what is published; the last outputs `again`."""
        new = self.first.outputs[self._read - again :]
        at = self._read
        self._read += len(new)
        if new:
            self.second.process(
                [Record("out", 0, at + n, one.key, one.value, topic_id="O") for n, one in enumerate(new)]
            )

    def folded(self) -> int:
        """How many events the second flow has folded."""
        return int(self.second.results("all")[b"K"]["n"])
