"""From and to torch.optim."""
