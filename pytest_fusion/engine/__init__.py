"""One test, from the request for it to its record: choosing the mode, running the cases, shrinking, how a test ends."""
