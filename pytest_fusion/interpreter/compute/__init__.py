"""The arithmetic of a GPU in numpy, without Triton."""
