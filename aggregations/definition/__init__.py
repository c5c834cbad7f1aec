"""The definition of a flow: source, steps, folds, and the hash that identifies it."""
