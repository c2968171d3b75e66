"""What a failure's message is made of: the text, where errors sit, the stack."""
