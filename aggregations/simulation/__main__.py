"""`python -m aggregations.simulation`."""
