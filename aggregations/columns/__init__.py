"""The fast path in numpy, numba and polars: from records to columns, to verdicts and histories, to stored states."""
