"""Recording a sample of a function's calls in production, and reading it back as cases."""
