"""What every Triton kernel takes of a GPU, told without one: registers, spills, shared memory, occupancy."""
