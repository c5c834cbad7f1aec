"""Reads, redrives and discards the dead letters of a topic."""
