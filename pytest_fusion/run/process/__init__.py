"""Child processes: `fork` runs a closure, `worker` spawns a process, `supervisor` limits and ends both."""
