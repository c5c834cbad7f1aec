"""The whole chain as real processes on real servers, disturbed for hours: `python -m tests.soak`.

    orders -> by_customer -> customers -> by_item -> items -> sales: customer (Redis), article (Cassandra)

A producer sends orders that follow from a seed, so that the right sums are known without asking the engine. Rounds of
disturbances, drawn from the same seed, kill, freeze, cut, fill up and mislead everything on the way. After each round
every state of both stages must be exactly the plain fold of what was produced.
"""
