"""The fast path in plain numpy and polars: records to columns, columns to verdicts, verdicts to windows."""

from aggregations.columns.batch import Batch, Rejection
from aggregations.columns.decode import Decoder
from aggregations.columns.signature import Place, Signature

__all__ = ["Batch", "Decoder", "Place", "Rejection", "Signature"]
