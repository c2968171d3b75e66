"""What a spec is measured at, and what is measured there: rows for reports and baselines."""
