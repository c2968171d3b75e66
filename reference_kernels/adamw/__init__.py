"""AdamW over any number of tensors in one launch, in place."""

from reference_kernels.adamw.kernel import adamw
from reference_kernels.adamw.reference import adamw_reference

__all__ = ["adamw", "adamw_reference"]
