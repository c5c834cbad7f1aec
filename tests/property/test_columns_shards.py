"""Ids are spread over states in compiled code as the pure code spreads them."""

from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregations.columns.shards import shards_of
from envelope.filters.arrival import shard_of

IDS = {
    pl.String: st.text() | st.text("ab01-_ \"'\\\x7f\né"),
    pl.Binary: st.binary() | st.text("ab01-_ \"'\\\x7f\n").map(str.encode),
    pl.Int8: st.integers(-(2**7), 2**7 - 1),
    pl.Int64: st.integers(-(2**63), 2**63 - 1),
    pl.UInt64: st.integers(0, 2**64 - 1),
}


@pytest.mark.parametrize("dtype", IDS)
def test_ids_are_spread_as_by_the_pure_code(dtype: Any) -> None:
    @given(st.lists(st.none() | IDS[dtype]), st.integers(1, 300))
    def check(ids: list[Any], shards: int) -> None:
        found = shards_of(pl.Series(ids, dtype=dtype), shards)
        assert found.dtype == pl.Binary
        assert found.to_list() == [None if one is None else shard_of(one, shards) for one in ids]

    check()
