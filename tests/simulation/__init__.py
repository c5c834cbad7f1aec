"""The engine's and the republisher's real code among simulated topics, crashes and zombies, driven by a seed.

`python -m tests.simulation --seed 17` runs one seed; `prove` runs many. What is real: envelopes, lineage, histories, flow,
folds, runner, commit, the store protocol and its rules, the start-up plan, and the republisher with its producer.
What is simulated: the broker and confluent-kafka's clients of it, Spark, processes and their deaths, time, and the order
of everything.
"""
