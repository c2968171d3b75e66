"""One call of a kernel: guarded memory, observed launches, facts as the result."""
