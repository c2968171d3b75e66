"""Is the result right: one module or folder for each check."""
