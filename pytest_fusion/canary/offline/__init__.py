"""Comparing two versions of a kernel on the same cases and with the reference, before the new one gets traffic."""
