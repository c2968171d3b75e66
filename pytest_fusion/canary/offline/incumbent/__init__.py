"""The incumbent, with which a candidate is compared: its name, its files, and its process."""
