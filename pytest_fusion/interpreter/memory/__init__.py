"""Which memory each access reaches, and what is wrong with it."""
