"""Stage of the data path; see ARCHITECTURE.md."""
