"""What the kernels that a test launched are, beside their results: whether they compile, how their products round."""
