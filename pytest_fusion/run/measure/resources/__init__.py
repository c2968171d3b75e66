"""Resources of a GPU that Triton kernels take, found without one: registers, spills, shared memory, occupancy."""
