"""State storage: the store contract, state records, stores and the order of the commit."""
