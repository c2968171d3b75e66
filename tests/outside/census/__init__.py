"""Kernels that people ship, each judged against two natural references: how often a healthy one is called wrong.

``python -m tests.outside.census`` runs them. ``requirements.txt`` has the packages and how to install them.
"""
