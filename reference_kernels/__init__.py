"""Fused Triton kernels, one folder per fusion pattern, each held to its own unfused reference.

Every folder has the same shape: ``reference`` (what is right, in plain torch), ``kernel`` (Triton and its launcher),
``spec`` (how the two are compared) and ``README.md`` (maths, casting convention, bytes, FLOPs, edge cases).
Importing a kernel needs torch and triton; only ``spec`` and the tests need pytest-fusion.
"""
