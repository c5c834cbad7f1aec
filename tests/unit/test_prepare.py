"""What is compiled before residents are forked is what they run: nothing is compiled again in each of them."""

import subprocess
import sys

PROGRAM = """
import threading
from aggregations.columns.prepare import prepare
from aggregations.columns import fold, lane_names, record_reading, record_writing
import importlib
judge = importlib.import_module("aggregations.columns.judge")
prepare()
assert threading.active_count() == 1
kernels = [fold.fold_whole, lane_names._fill, record_reading._read, record_writing._write, judge._judge, judge._hold]
before = [kernel.signatures for kernel in kernels]
assert all(before)
from aggregations.definition.aggregates import count, maximum, mean, total
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from tests.support.both import Both
from tests.support.pure import FLEET, bare, leg
FIELDS = Fields(n=count(), m=total("minutes"), late=count("late"), most=maximum("minutes"), mean=mean("delay"))
both = Both(Flow("f").source(bare()).aggregate("a", "tail", FIELDS).aggregate("b", "carrier", FLEET))
for first in (0, 3):
    legs = [leg(first + n, "AB"[n % 2], carrier="X", minutes=n or None, delay=1.5) for n in range(4)]
    both.process(legs)
assert [kernel.signatures for kernel in kernels] == before, [kernel.signatures for kernel in kernels]
"""


def test_a_batch_runs_with_the_code_that_was_prepared() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=300)
