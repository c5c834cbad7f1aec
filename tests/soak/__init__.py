"""Runs the whole chain as real processes on real servers, and disturbs it for hours: `python -m tests.soak`.

    orders -> by_customer -> customers -> by_item -> items -> sales: customer (Redis), article (Cassandra)

A producer sends orders that follow from a seed, so the correct sums are known without the engine. Rounds of
disturbances, drawn from the same seed, kill, freeze and disconnect processes and servers, fill disks and change clocks.
After each round every state of both stages must equal the plain fold of the orders produced.
"""
