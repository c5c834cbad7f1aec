"""Folds recorded history again and compares the states: with another definition, or with those that are live."""
