"""What a flow is: sources, steps, folds, and the hash of what they mean."""
