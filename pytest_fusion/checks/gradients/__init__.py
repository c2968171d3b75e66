"""Check `gradients`: what backward returns, and autograd's other promises."""
