"""pytest and people: hooks, options, fixtures, decorator, command line. Loading it imports no torch."""
