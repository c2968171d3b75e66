"""The kernel that a candidate is compared with: its name, its files, and its process."""
