"""Samples of a function's calls in production: written, read back, and made into cases."""
