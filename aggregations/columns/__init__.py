"""The fast path in numpy and polars: from records to columns, to verdicts, to histories."""

from aggregations.columns.batch import Batch, Rejection
from aggregations.columns.decode import Decoder
from aggregations.columns.history import fold_histories
from aggregations.columns.judge import Judged, judge
from aggregations.columns.signature import Lane, Signature, lanes_of

__all__ = ["Batch", "Decoder", "Judged", "Lane", "Rejection", "Signature", "fold_histories", "judge", "lanes_of"]
