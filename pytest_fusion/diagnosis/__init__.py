"""Why a check failed: the smallest case, experiments on it, the likely cause, the message."""
