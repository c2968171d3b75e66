"""Check `launches`: how many kernels a call launches."""
