"""Explains what a flow made of a record, and which hop sent records again. It reads, and writes nothing."""
