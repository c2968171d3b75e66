"""The parts of a failure's message: the text, where errors are, the stack."""
