"""The fast path in plain numpy and polars: records to columns, columns to verdicts, verdicts to windows."""

from aggregations.columns.batch import Batch, Rejection
from aggregations.columns.decode import Decoder
from aggregations.columns.judge import Judged, judge
from aggregations.columns.signature import Place, Signature, lanes_of
from aggregations.columns.windows import fold_windows

__all__ = ["Batch", "Decoder", "Judged", "Place", "Rejection", "Signature", "fold_windows", "judge", "lanes_of"]
