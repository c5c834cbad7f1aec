"""Rebuilds a generation of a flow beside the live one, and swaps them."""
