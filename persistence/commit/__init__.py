"""The commit of one batch: its order, its steps, and the points at which a test can make it fail."""
