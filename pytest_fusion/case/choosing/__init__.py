"""Which cases are tried: boundary combinations, random search, failures of earlier runs, large offsets."""
