"""A run of a flow against its stores: where it starts, what it loads and saves, and what it reports."""
