"""What a call costs: launches, resources, time, bytes, and NVIDIA's tools."""
