"""A flow that the command line can load."""

from tests.support.pure import fleet

flow = fleet()
