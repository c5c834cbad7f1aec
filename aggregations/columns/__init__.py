"""The fast path in numpy, numba and polars: from records to columns, to verdicts and histories, to stored states."""

from aggregations.columns.batch import Batch, Rejection
from aggregations.columns.decode import Decoder
from aggregations.columns.judge import Judged, judge
from aggregations.columns.signature import Lane, Signature, lanes_of

__all__ = ["Batch", "Decoder", "Judged", "Lane", "Rejection", "Signature", "judge", "lanes_of"]
