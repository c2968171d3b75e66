"""Likely causes, each shown by experiments on the smallest case."""
