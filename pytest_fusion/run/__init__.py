"""What happened in one call of a kernel: its memory guarded, its launches observed."""
