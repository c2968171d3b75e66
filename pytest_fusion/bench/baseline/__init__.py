"""Baselines: measured facts of a test, stored in files and compared with those of the current run."""
