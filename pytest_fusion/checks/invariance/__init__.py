"""Check `invariance`: slices along a dim do not depend on each other."""
