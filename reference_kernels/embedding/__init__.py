"""Bags of embeddings from many tables in one launch, and the dot interaction of DLRM; with gradients."""

from reference_kernels.embedding.interaction import dot_interaction
from reference_kernels.embedding.kernel import embedding_bag
from reference_kernels.embedding.reference import dot_interaction_reference, embedding_bag_reference

__all__ = ["dot_interaction", "dot_interaction_reference", "embedding_bag", "embedding_bag_reference"]
