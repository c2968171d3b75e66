"""A canary in a serving process: which kernel serves a call, and who stops the candidate."""
