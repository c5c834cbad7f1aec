"""Duplicate detection: the position of a message (lineage, lanes), the histories of a state, and the verdict."""
