"""What ``rng=`` and ``distribution=`` declare: random numbers, dropout masks, sampled outputs."""
