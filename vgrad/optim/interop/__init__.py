"""From and to torch.optim: `counterparts.py` reads its optimizers and their states."""
