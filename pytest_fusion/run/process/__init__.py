"""Child processes: forked for tests, spawned for compiling; files replaced whole."""
