"""Publishes the states of windows and sessions that have closed, once: `publish_states(topic, on="close")`.

A window is published when the closing watermark (`aggregations.run.closing`) has passed its end and its lateness. The log
of each partition has then closed it for all records that are still to be read, except those of a partition that was
idle, or was added. For these the stage judges by the closing watermark, too: by the one in the manifest before their
batch. So a window that is published does not change any more, and no window changes that is about to be published.

It happens strictly after the manifest with this watermark is in every store, and before states that are due leave the
stores. What is published is acknowledged before the manifest of the stage's store notes up to which due time. A crash in
between publishes some windows again: the same states, with the same versions. The note belongs to the store that keeps the
stage: if this store is set back, its windows are folded and published again.

A session has closed when no element can join it any more, nor connect it with another one. A key may have later sessions,
which its state is due after; so the states that are looked through are those of all keys with a session that had not
closed the last time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Final

from aggregations.definition.flow import Stage
from aggregations.definition.sessions import SessionWindow
from aggregations.definition.times import LATEST_US, MICROS
from aggregations.definition.windows import Window
from aggregations.per_message.publishing import OutputMessage
from aggregations.report import Report
from aggregations.run.run import Run
from aggregations.run.snapshots import final_snapshots_of
from aggregations.run.states import load_states

PAGE: Final = 1_000
"""States that are loaded, produced and acknowledged at once, about 300 KB."""
_EVER: Final = 2 * LATEST_US // MICROS
"""A due time that no state is due after."""


class FinalSnapshots:
    """Publishes the windows of a run that have closed.

    Args:
        run: The run, which holds the epoch.
        produce: Produces messages of a stage, at its fault point, and returns when all are acknowledged.
        largest: Largest record that can be produced to a topic, in bytes, by topic.
    """

    def __init__(
        self,
        run: Run,
        produce: Callable[[str, Sequence[OutputMessage]], object],
        largest: Mapping[str, int] = {},
    ) -> None:
        self._run = run
        self._produce = produce
        self._largest = largest
        self._stages = [stage for stage in run.flow.stages if stage.final_snapshots]
        self._acknowledged = dict(run.manifest.published) if run.manifest else {}

    def closed(self, removed: Mapping[str, int]) -> dict[str, int]:
        """Time up to which the elements of the next batch are too late, by stage, in seconds since 1970.

        That of windows is their due time, that of sessions and of states that expire is the event time of the element.

        Args:
            removed: Due time up to which states have left the stores, by stage.
        """
        found = dict(removed)
        for stage in self._stages:
            times = (self._acknowledged.get(stage.name), self._due_until(stage))
            if known := [time for time in times if time is not None]:
                shut = _windows_of(stage).shut_until(max(known))
                found[stage.name] = max(shut, removed.get(stage.name, shut))
        return found

    def publish(self) -> Report:
        """Publish the windows that have closed by the manifest of the run, which every store has.

        Returns:
            Counts of messages, and of states that cannot be published.

        Raises:
            BrokerError: A message was not acknowledged. Repeating it is safe, and publishes the windows of that stage again.
            StoreError: A store did not answer, or refused. The same holds.
        """
        counts = Report()
        for stage in self._stages:
            until, after = self._due_until(stage), self._acknowledged.get(stage.name)
            if until is not None and (after is None or after < until):
                self._publish(stage, after, until, counts)
                self._acknowledged[stage.name] = until
        manifest = self._run.manifest
        if manifest is not None and manifest.published != self._acknowledged:
            self._run.note(self._run.changed(published=dict(self._acknowledged)))
        return counts

    def _publish(self, stage: Stage, after: int | None, until: int, counts: Report) -> None:
        """Publish the windows of a stage that are due after a time and at or before another."""
        run = self._run
        sessions = stage.aggregate.sessions
        keys = run.stores[stage.name].due(run.stage_ref(stage), until if sessions is None else _EVER, after=after)
        while page := list(islice(keys, PAGE)):
            states = load_states(run, stage, page)
            if sessions is not None:
                states = {
                    key: replace(one, fold=closed)
                    for key, one in states.items()
                    if (closed := sessions.due_between(one.fold or [], after, until))
                }
            outputs = final_snapshots_of(
                *(stage, states),
                ref=run.ref,
                epoch=run.epoch,
                batch=run.batch - 1,
                largest=self._largest,
                counts=counts,
            )
            self._produce(stage.name, outputs)
            counts.outputs += len(outputs)

    def _due_until(self, stage: Stage) -> int | None:
        """The latest due time of a window of the stage that all partitions have closed."""
        manifest = self._run.manifest
        if manifest is None or manifest.closing_us is None:
            return None
        return _windows_of(stage).closed_until(manifest.closing_us)


def _windows_of(stage: Stage) -> Window | SessionWindow:
    """The windows of a stage that publishes them."""
    assert stage.aggregate.window is not None
    return stage.aggregate.window
