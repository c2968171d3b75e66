"""Check `repeat`: the same inputs give the same bits."""
