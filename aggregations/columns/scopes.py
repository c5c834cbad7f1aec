"""The states that judge the rows of a filter whose ids are spread over a number of states."""

from typing import Any, Final

import polars as pl

from aggregations.columns import schema
from aggregations.definition.headers import last_value
from aggregations.definition.judging import PLACE, Scopes, is_built_in
from envelope.filters.arrival import FromEnvelope, FromHeader, FromValue
from envelope.filters.event_ids import EventIdFilter
from envelope.filters.interval import IntervalFilter

_TEXTS: Final = (pl.String(), pl.Binary())
_NUMBERS: Final = (pl.Int8(), pl.Int16(), pl.Int32(), pl.Int64(), pl.UInt8(), pl.UInt16(), pl.UInt32())


def scopes_of(of: Scopes, frame: pl.DataFrame) -> pl.Series | None:
    """The keys of the states, Binary: `Scopes` for all rows; None unless ids are spread over states and are in a column.

    Args:
        of: The filter, and the topics that it does not judge.
        frame: The payload's columns and the system columns.
    """
    rule = of.rule
    if not isinstance(rule, EventIdFilter | IntervalFilter) or not (is_built_in(rule) and rule.partitions):
        return None
    changed = rule.key if isinstance(rule, IntervalFilter) and rule.keyed else None
    ids = _column(changed or rule.id, frame)
    if ids is None or ids.dtype not in (_TEXTS if changed else (*_TEXTS, *_NUMBERS)):
        return None  # an id may be invalid, and its record is rejected
    from aggregations.columns.shards import shards_of  # its compiled code is for these filters only

    scopes = shards_of(ids.cast(pl.Binary) if changed else ids, rule.partitions)
    if of.unjudged:
        scopes = frame.select(pl.when(~pl.col(schema.TOPIC).is_in(of.unjudged)).then(scopes)).to_series()
    if scopes.null_count():
        scopes = frame.select(pl.coalesce(scopes, PLACE.cast(pl.Binary))).to_series()
    return scopes


def _column(extractor: Any, frame: pl.DataFrame) -> pl.Series | None:
    """The column that an extractor of ids reads; None if it is not known."""
    if isinstance(extractor, FromValue) and extractor.name in frame.columns:
        return frame.get_column(extractor.name)
    if isinstance(extractor, FromHeader) and schema.HEADERS in frame.columns:
        return frame.select(last_value(extractor.name)).to_series()
    return frame.get_column(schema.EVENT_ID).replace("", None) if extractor == FromEnvelope("event_id") else None
