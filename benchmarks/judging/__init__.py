"""How often the verdicts on latency are right, by simulation."""
