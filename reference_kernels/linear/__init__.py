"""Matrix product with bias and activation in its epilogue."""

from reference_kernels.linear.kernel import linear
from reference_kernels.linear.reference import linear_reference

__all__ = ["linear", "linear_reference"]
