"""Check `malformed`: calls that the spec rules out are refused, or right."""
