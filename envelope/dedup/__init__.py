"""The rule: where a message stands (lineage, lanes), what a state holds (windows), and what that decides (verdict)."""
