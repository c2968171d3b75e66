"""What launchers and kernels do beside their results: refusals, compiling, products in TF32, undefined lanes."""
