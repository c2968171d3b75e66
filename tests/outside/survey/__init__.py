"""Operators of PyTorch that FlagGems replaces, on the CPU lane: which of them run, and which of those are right.

``python -m tests.outside.survey`` measures and prints the tables of ``docs/cpu-lane-packages.md``.
"""
