"""Removes states from the stores: of windows once no record can reach them any more, and those that have expired.

A window leaves when the closing watermark (`aggregations.run.closing`) has passed its end, its lateness and its
retention: its state and the positions that it holds, together. The stores find such states by their due time, which each
state is given when it is created. The due time of a state with sessions is that of its last session, or of a later hole:
each write puts it off. Older sessions leave the state when it is next written.

It happens strictly after the manifest with this watermark is in every store, so whatever a crash leaves half-removed is
removed by the next run. Each bucket of a store keeps the time up to which its states were removed, in the same atomic
step. A copy of an event of such a window, which can come back when a store is set back or from a partition that was
idle, finds no state that could recognise it: the window is closed for it by this time, of which the highest of all
buckets counts.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from aggregations.definition.flow import Flow, Stage
from aggregations.definition.windows import Window
from aggregations.errors import FlowError
from aggregations.run.run import Run
from persistence.commit.faults import effect, removal_of
from persistence.marks import Bucket
from persistence.protocol import StateStore, Write


def with_dues(stage: Stage, writes: Sequence[Write]) -> Sequence[Write]:
    """The writes of a stage, with the due time of each state that they create."""
    window = stage.aggregate.window
    if not isinstance(window, Window):
        return writes
    return [one if one.expected else Write(one.key, 0, one.value, window.due(one.key)) for one in writes]


def check_can_expire(flow: Flow[Any], stores: Mapping[str, StateStore]) -> None:
    """Refuse a store that may lose a state which is created again after it has expired.

    Raises:
        FlowError: A stage whose states expire has such a store.
    """
    for stage in flow.stages:
        if stage.aggregate.expiry is not None and not stores[stage.name].capabilities.conditional:
            raise FlowError(
                f"stage {stage.name!r}: expire_after= needs a store with conditional writes; a state that begins anew could "
                "be lost. Use the default mode of Cassandra, or another store"
            )


class Retirement:
    """What has left the stores of a run.

    Args:
        run: The run, which holds the epoch.

    Attributes:
        removed: Due time up to which states have left, by stage, in seconds since 1970; for `MessageLoop.removed`.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._everywhere: dict[str, int] = {}
        """The same, of the bucket that is furthest behind."""
        self.removed: dict[str, int] = {}
        self.learn(run.buckets())

    def learn(self, buckets: Mapping[str, Mapping[str, Bucket]]) -> None:
        """Note the times up to which states were removed, from the buckets of each stage."""
        for stage, held in buckets.items():
            times = [one.removed for one in held.values()]
            if known := [time for time in times if time is not None]:
                self.removed[stage] = max(known)
                if len(known) == len(times):
                    self._everywhere[stage] = min(known)

    def remove(self) -> Counter[str]:
        """Remove what is due by the manifest of the run, which every store has.

        Returns:
            Number of removed states by stage.

        Raises:
            StoreError: A store did not answer, or refused. Repeating it is safe.
        """
        run, counts = self._run, Counter[str]()
        if run.manifest is None or (closing_us := run.manifest.closing_us) is None:
            return counts
        batch = run.manifest.batch
        for stage in run.flow.stages:
            times, store = stage.aggregate.times, run.stores[stage.name]
            if times is None or not store.capabilities.marked:
                continue
            if stage.aggregate.renewed is not None and not store.capabilities.conditional:
                continue  # a state that begins anew could be lost
            until = times.due_until(closing_us)
            until = max(until, self.removed.get(stage.name, until))
            if stage.name in self._everywhere and self._everywhere[stage.name] >= until:
                continue
            found = effect(
                removal_of(stage.name),
                lambda store=store, stage=stage, until=until: store.remove(  # type: ignore[misc]
                    run.stage_ref(stage), until, epoch=run.epoch, batch=batch, known=run.known.of(stage.name)
                ),
            )
            run.known.note(stage.name, found.marks)
            self.removed[stage.name] = self._everywhere[stage.name] = until
            if found.states:
                counts[stage.name] = found.states
        return counts
