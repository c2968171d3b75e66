"""The quality corpus: planted bugs that must be caught, honest kernels that must not be accused."""
