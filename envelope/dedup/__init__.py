"""The rule: where a message stands (lineage, lanes), what a state holds (histories), and what that decides (verdict)."""
