"""Scores the automatic tolerance against the rules in common use, on problems whose answer is known."""
