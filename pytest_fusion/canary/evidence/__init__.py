"""What many calls and processes showed of a candidate, and the verdict on it."""
