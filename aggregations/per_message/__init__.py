"""The per-message path: the reference for the vectorised path."""
