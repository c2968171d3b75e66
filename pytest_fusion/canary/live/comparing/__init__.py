"""Both kernels on one call of production traffic: results, latency, accuracy."""
