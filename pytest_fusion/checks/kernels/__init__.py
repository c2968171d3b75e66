"""What launchers and kernels do beside their results: cases refused, kernels that do not compile, products in TF32."""
