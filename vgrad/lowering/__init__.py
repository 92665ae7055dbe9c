"""Forms of single operations that `torch.vmap` lacks or does slowly."""
