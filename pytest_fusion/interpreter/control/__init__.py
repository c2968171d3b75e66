"""How programs run: rewritten control flow, batches, replayed launches."""
