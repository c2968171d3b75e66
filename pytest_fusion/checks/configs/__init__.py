"""Check `configs`: every autotune config, at sizes past its blocks."""
