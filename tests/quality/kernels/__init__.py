"""Small Triton kernels: each module has the reference, a clean kernel and its planted bugs as one-line switches."""
