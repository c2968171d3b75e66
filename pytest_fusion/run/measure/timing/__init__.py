"""Latency on a GPU: replayed graphs over rotating inputs, warm-up by stationarity, interleaved pairs."""
