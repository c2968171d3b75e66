"""The arguments of one call: copies, signatures, random generators."""
