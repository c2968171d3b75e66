"""Other conditions for the same call: competing kernels, few multiprocessors, slow streams, other addresses."""
