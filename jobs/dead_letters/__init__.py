"""What is in a dead-letter topic, and how it is redriven or discarded."""
