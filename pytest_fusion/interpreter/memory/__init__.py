"""Finds the memory that each access reaches, and what is wrong with it."""
