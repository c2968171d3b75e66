"""The costs of a call: launches, resources, time, bytes, and NVIDIA's tools."""
