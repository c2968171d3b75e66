"""NVIDIA's compute-sanitizer and Nsight Compute, each around one test in a process of its own."""
