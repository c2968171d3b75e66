"""A failing case to run again: replay file and stand-alone script."""
