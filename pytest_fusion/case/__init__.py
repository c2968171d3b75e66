"""One input in full, as plain data, and the tensors made from it."""
