"""Loads compiled code, or has it compiled, before it is needed."""

import numpy as np

from aggregations.columns.fold import fold_whole
from aggregations.columns.judge import HistoryLimits, judge
from aggregations.columns.lane_names import LaneNames
from aggregations.columns.record_text import WHOLE
from aggregations.columns.records import StoredStates, encoded, form_of
from aggregations.columns.signature import Lane
from envelope import Histories, History
from persistence.record import StateRecord, encode_record


def prepare() -> None:
    """Fold one message into one state. Starts no thread, so the process can be forked afterwards."""
    name, names, form = "legs:0", LaneNames(), form_of("definition", ["n"], [WHOLE])
    state = StateRecord("definition", {"n": 1}, Histories({name: History(((1,),), used=1)}))
    stored = StoredStates([encode_record(state)], form, names)
    one, no = np.zeros(1, np.int64), np.zeros(1, np.bool_)
    lane, limits = Lane(name, name), HistoryLimits.of()
    judged = judge(one, one, [one + 2], [lane], stored.lanes, names, limits, pure=no, exotic=no, refused=no)
    fold_whole(0, one, one, ~no, stored.values.whole[0], stored.values.known[0], no.copy())
    encoded(form, names, judged.lanes, one, stored.values.of_keys(judged.changed), b"")


def load_reading() -> None:
    """Load what reads messages, envelopes and payloads, which `prepare` does not need."""
    import aggregations.columns.envelope_reading
    import aggregations.columns.gather
    import aggregations.columns.header_kernels
    import aggregations.columns.message_kernels
    import aggregations.columns.payload_reading  # noqa: F401
