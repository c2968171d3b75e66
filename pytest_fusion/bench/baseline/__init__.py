"""Is it as it was: measured facts of a test, kept in files, compared with those of today."""
