"""States as a table: their columns, conditions on them, and files and Spark as readers."""
