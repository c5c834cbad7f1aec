"""Bugs of what runs: the driver and republish services."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from aggregations.reconcile import Plan, plan
from aggregations.simulation import driver, service
from aggregations.simulation.bugs.patch import Patch, original
from persistence.errors import Transient
from persistence.faults import effect
from persistence.steps import Step

_Driver = driver.Driver
_init = original(_Driver, "__init__")
_batch = original(_Driver, "batch")


def _from_the_end(*arguments: Any) -> Plan:
    made = plan(*arguments)
    return replace(
        made, partitions=[replace(one, start=one.high) if one.start is None else one for one in made.partitions]
    )


def _from_the_group(self: Any, *arguments: Any, **options: Any) -> None:
    _init(self, *arguments, **options)
    self.next = {number: self.committed(number) for number in range(len(self.log.partitions))}


def _offsets_first(self: Any, limit: int, slow: int = -1) -> None:
    records = self.records(limit, slow)
    self.advance(records)
    effect(Step.OFFSETS, self.commit)
    self.runner.process(records)
    effect(Step.RETURN, lambda: None)


def _skips_a_failed_batch(self: Any, limit: int, slow: int = -1) -> None:
    records = self.records(limit, slow)
    try:
        _batch(self, limit, slow)
    except Transient:
        self.advance(records)


_Service = service.Service


def _commits_first(self: Any, source: int, partition: int, limit: int) -> None:
    topic, number = self.place(source, partition)
    records = self.read(topic, number, limit)
    if records:
        effect("republish:commit", lambda: self.commit(topic, number, records[-1].offset + 1))
    self.produce(self.transform(records))


_hop = original(service, "_hop")
_numbers = count()


def _hop_never_rekeyed(*arguments: Any, **options: Any) -> Any:
    return _hop(*arguments, **{**options, "rekeyed": False})


def _hop_counted(*arguments: Any, index: int | None = None, **options: Any) -> Any:
    return _hop(*arguments, index=None if index is None else next(_numbers), **options)


BUGS: Mapping[str, tuple[str, Sequence[Patch]]] = {
    "starts-at-the-end": (
        "partitions that no manifest knows start at their end",
        [(driver, "plan", _from_the_end)],
    ),
    "group-trusted": (
        "a run starts from the group's offsets, committed before the states are written",
        [(_Driver, "__init__", _from_the_group), (_Driver, "batch", _offsets_first)],
    ),
    "failed-batch-skipped": (
        "the engine goes on behind a batch that failed",
        [(_Driver, "batch", _skips_a_failed_batch)],
    ),
    "service-commits-first": ("a republisher commits before it produces", [(_Service, "step", _commits_first)]),
    "service-hides-rekeying": (
        "a republisher does not say that it changed the key",
        [(service, "_hop", _hop_never_rekeyed)],
    ),
    "service-counts-on": ("a republisher numbers its outputs on and on", [(service, "_hop", _hop_counted)]),
}
