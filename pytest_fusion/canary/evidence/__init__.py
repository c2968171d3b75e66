"""Evidence about a candidate from many calls and processes, and the verdict on it."""
