"""Fused Triton kernels, one folder per fusion pattern, each compared with its own unfused reference.

``README.md`` maps the folders and says what shape they share. Importing a kernel needs torch and triton; only ``spec``
and the tests need pytest-fusion.
"""
