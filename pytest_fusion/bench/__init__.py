"""The cases that a spec is measured at, and the measurements: rows for reports and baselines."""
