"""A filter as the fold of a stage: its state is that of a scope, and it decides which elements are passed on."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import timedelta
from enum import Enum
from typing import Any, Final, TypeAlias

import polars as pl

from aggregations.definition.element import Element
from aggregations.definition.expressions import Expression, name_of
from aggregations.definition.fields import Fields
from aggregations.definition.fingerprint import describe_callable, describe_object
from aggregations.definition.headers import header_column, last_value
from aggregations.definition.system import KEY, PARTITION, TOPIC
from envelope.filters.arrival import STAMPED, Extractor, Filter, FromEnvelope, FromHeader, FromValue, Scope, place_of
from envelope.filters.distinct import DistinctSession, DistinctTumbling
from envelope.filters.event_ids import EventIdFilter
from envelope.filters.interval import IntervalFilter
from envelope.filters.producers import ProducerFilter, envelope_stamp
from envelope.filters.sequence import SequenceFilter
from envelope.filters.turns import time_extractor

BUILT_IN: Final = (
    DistinctSession,
    DistinctTumbling,
    EventIdFilter,
    IntervalFilter,
    ProducerFilter,
    SequenceFilter,
)
"""Filters whose parameters are known: what they read, and which records share a state."""

_READ: Final = (FromEnvelope, FromHeader, FromValue)
_FIELDS: Final = frozenset({"event_id", "event_time_us", "key", *STAMPED})
"""Fields of an envelope that elements have."""
PLACE: Final = pl.concat_str(pl.col(TOPIC), pl.col(PARTITION), separator=":")
"""`place_of` of a row."""
_APART: Final = "/"
"""Between partition and key in the state of a key that a filter by key does not judge."""

Scoped: TypeAlias = Expression | Callable[[Element[Any]], bytes]


@dataclass(frozen=True, slots=True)
class Judging:
    """A filter as a fold. Its states are JSON values, as `dump` of the filter returns them.

    Attributes:
        rule: The filter.
        unjudged: Topics whose elements are passed on as they are, ascending.
        definition: Canonical text of the filter and its parameters, without its name.
    """

    rule: Filter[Any]
    unjudged: tuple[str, ...] = ()
    definition: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Once, where the flow is written: a worker that gets it pickled may not have the source.
        apart = f" but {', '.join(self.unjudged)}" if self.unjudged else ""
        object.__setattr__(self, "definition", f"deduplicate {_text_of(self.rule)}{apart}")

    def zero(self) -> Any:
        """The state of a scope before its first element."""
        return self.rule.dump(self.rule.zero())

    def fold(self, state: Any, element: Element[Any]) -> Any:
        """The state after one more element."""
        return self.rule.dump(self.rule.judge(self.rule.load(state), element)[1])

    @property
    def extractors(self) -> Iterator[Any]:
        """What the filter extracts values with."""
        rule: object = self.rule
        if is_dataclass(rule):
            found = (getattr(rule, one.name) for one in fields(rule))
            yield from (one for one in found if callable(one) and not isinstance(one, type))

    @property
    def is_known(self) -> bool:
        """Whether the columns that the filter reads are known: it calls no function of the user."""
        return is_built_in(self.rule) and all(
            isinstance(one, _READ) or one is envelope_stamp for one in self.extractors
        )

    @property
    def reads_envelope(self) -> bool:
        """Whether the filter reads fields of envelopes."""
        return any(isinstance(one, FromEnvelope) or one is envelope_stamp for one in self.extractors)

    @property
    def foreign(self) -> list[str]:
        """Fields of envelopes that the filter reads, and elements do not have."""
        return [one.name for one in self.extractors if isinstance(one, FromEnvelope) and one.name not in _FIELDS]

    @property
    def reads_stamps(self) -> bool:
        """Whether the filter may read `Element.stamp`."""
        named = (one.name for one in self.extractors if isinstance(one, FromEnvelope))
        return not self.is_known or envelope_stamp in self.extractors or not STAMPED.keys().isdisjoint(named)

    @property
    def by_key(self) -> bool:
        """Whether its states are those of keys: the records of a key must stay in order when partitions are added."""
        return not is_built_in(self.rule) or getattr(self.rule, "scope_by", Scope.PARTITION) is Scope.KEY

    @property
    def spans(self) -> bool:
        """Whether records of several partitions have one state: ids are spread over a number of states."""
        return bool(getattr(self.rule, "partitions", 0))

    @property
    def time(self) -> Extractor | None:
        """What extracts the time by which the filter judges; None for the record's timestamp."""
        return time_extractor(self.rule)

    @property
    def shares_topics(self) -> bool:
        """Whether records of several topics have one state; that of a filter of the user names its topic if it must."""
        return self.spans or (self.by_key and is_built_in(self.rule))

    @property
    def columns(self) -> list[str]:
        """Columns of the payload that the filter reads, if they are known."""
        return sorted({one.name for one in self.extractors if isinstance(one, FromValue)}) if self.is_known else []

    def inputs(self) -> dict[str, pl.Expr]:
        """Columns that the filter reads, if they are known."""
        headers = sorted({one.name for one in self.extractors if isinstance(one, FromHeader)}) if self.is_known else []
        return {name: pl.col(name) for name in self.columns} | {header_column(one): last_value(one) for one in headers}

    def scope(self) -> Scoped:
        """The key of the state that judges an element, as the key of a stage.

        Elements without a scope have the key of their partition. They are passed on, and their positions are remembered
        there. If a filter judges by key, a state remembers the disorder of one key only, so elements that it does not judge
        have states by key, too; by partition as well, because their topic need not be partitioned by key.
        """
        if self.spans or not is_built_in(self.rule):
            return Scopes(self.rule, self.unjudged, by_key=self.by_key)
        if not self.by_key:
            return PLACE
        key = pl.col(KEY)
        if self.unjudged:
            apart = pl.concat_str(PLACE, pl.lit(_APART)).cast(pl.Binary) + key
            key = pl.when(pl.col(TOPIC).is_in(self.unjudged)).then(apart).otherwise(key)
        return pl.coalesce(key, PLACE.cast(pl.Binary))

    def describe(self) -> str:
        """The filter in a few words."""
        name, apart = name_of(type(self.rule)), f", not of {', '.join(self.unjudged)}" if self.unjudged else ""
        if not is_built_in(self.rule):
            return name + apart
        return f"{name} by {'id' if self.spans else (Scope.KEY if self.by_key else Scope.PARTITION).value}{apart}"


@dataclass(frozen=True, slots=True)
class Scopes:
    """Returns the key of the state that judges an element; `aggregations.columns.scopes` does so for columns."""

    rule: Filter[Any]
    unjudged: tuple[str, ...] = ()
    by_key: bool = False

    def __call__(self, element: Element[Any]) -> bytes:
        if element.topic not in self.unjudged:
            scope = self.rule.scope(element)
        elif self.by_key and element.key is not None:
            scope = f"{place_of(element)}{_APART}".encode() + element.key
        else:
            scope = None
        return place_of(element).encode() if scope is None else scope


def describe_fold(fold: Any) -> str:
    """Canonical text of the fold of a stage."""
    if isinstance(fold, Judging):
        return fold.definition
    return fold.describe() if isinstance(fold, Fields) else describe_object(fold)


def is_built_in(rule: object) -> bool:
    """Whether a filter is one of headwater's own; a subclass may decide otherwise."""
    return type(rule) in BUILT_IN


def _text_of(rule: object) -> str:
    """Canonical text of a filter. That of a filter of the user contains its code."""
    if not is_dataclass(rule) or not is_built_in(rule):
        return describe_object(rule)
    given = [(one.name, getattr(rule, one.name)) for one in fields(rule) if one.name != "name"]
    return f"{type(rule).__name__}({', '.join(f'{name}={_value_of(value)}' for name, value in given)})"


def _value_of(value: Any) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    if value is None or isinstance(value, (timedelta, int, str, *_READ)):
        return repr(value)
    return envelope_stamp.__name__ if value is envelope_stamp else describe_callable(value)
