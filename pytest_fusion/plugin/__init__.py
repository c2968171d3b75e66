"""The interface to pytest: hooks, options, fixtures, decorator, command line. Loading it imports no torch."""
