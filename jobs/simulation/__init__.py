"""The engine's real code among simulated topics, republishers, crashes and zombies, driven by a seed.

`python -m jobs.simulation --seed 17` runs one seed; `prove` runs many. What is real: envelopes,
lineage, windows, flow, folds, runner, commit, the store protocol and its rules, the start-up plan. What is
simulated: the broker, the services' main loop, processes and their deaths, and the order of everything.
"""
