"""The arguments of one call: tensors, copies, random generators, CUDA graph captures."""
