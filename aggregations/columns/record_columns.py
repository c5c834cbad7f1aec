"""What steps may read of a record beside its payload and the system columns: its headers and its chain."""

from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from aggregations.columns import schema
from aggregations.columns.batch import Batch
from aggregations.columns.elements import chain_of
from aggregations.definition.flow import Flow
from aggregations.definition.source import Topic
from aggregations.definition.system import SYSTEM_COLUMNS, hop_values


def with_record_columns(batch: Batch, table: pa.Table, flow: Flow[Any], topic: Topic) -> pl.DataFrame:
    """The rows of a batch with `_headers` and `_chain`, if expressions read them, and with what functions and tables may read.

    Args:
        batch: The batch.
        table: The records from which it was read, with column `headers` if `flow.reads_headers`.
        flow: The flow.
        topic: The topic of the records.
    """
    lists, frame = flow.system_lists, batch.frame
    if not (lists or flow.reads_chains):
        return frame
    rows, found = frame.get_column(schema.ROW), []
    values = _series(table.column("value")).gather(rows).alias(schema.VALUE)
    if flow.reads_chains and any(one.chained for one in batch.signatures):
        found.append(values)
    if schema.CHAIN in lists:
        found.append(_chains(batch, values, topic))
    if schema.HEADERS in lists:
        dtype = SYSTEM_COLUMNS[schema.HEADERS]
        headers = _of_rows(table.column("headers"), rows).cast(dtype).to_frame(schema.HEADERS)
        found.append(headers.select(pl.col(schema.HEADERS).fill_null(pl.lit([], dtype))).to_series())
    elif "headers" in table.schema.names and _any_items(table.column("headers")):
        found.append(_of_rows(table.column("headers"), rows).alias(schema.HEADERS))
    return frame.with_columns(found)


def _chains(batch: Batch, values: pl.Series, topic: Topic) -> pl.Series:
    """The column `_chain`, given the values of the records."""
    chained = [one.chained for one in batch.signatures]
    codes, owns = (batch.frame.get_column(name).to_list() for name in (schema.SIGNATURE, schema.TOPIC))
    chains = [
        hop_values(chain_of(value, topic, own)) if chained[code] else []
        for code, own, value in zip(codes, owns, values, strict=True)
    ]
    return pl.Series(schema.CHAIN, chains, SYSTEM_COLUMNS[schema.CHAIN])


def _any_items(lists: pa.ChunkedArray) -> bool:
    return bool(pc.any(pc.greater(pc.list_value_length(lists), 0)).as_py())


def _of_rows(column: pa.Array | pa.ChunkedArray, rows: pl.Series) -> pl.Series:
    """The values of some rows, whose numbers ascend. Measured: polars filters lists in a tenth of the time of `gather`."""
    whole = _series(column)
    if len(rows) == len(whole):
        return whole
    kept = np.zeros(len(whole), np.bool_)
    kept[rows.to_numpy()] = True
    return whole.filter(pl.Series(kept))


def _series(column: pa.Array | pa.ChunkedArray) -> pl.Series:
    found = pl.from_arrow(column)
    assert isinstance(found, pl.Series)
    return found
