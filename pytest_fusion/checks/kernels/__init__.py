"""Refusals, compiling, products in TF32 and undefined lanes: what launchers and kernels do beside their results."""
