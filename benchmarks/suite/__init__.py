"""How fast the reference kernels are beside eager torch, torch.compile, Liger and the libraries, on one GPU."""
