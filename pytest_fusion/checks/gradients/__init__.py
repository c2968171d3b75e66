"""Check `gradients`: what backward returns, and what autograd promises besides."""
