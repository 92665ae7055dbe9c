"""One file per family: the update rule, its state, and the optimizer made of them.

What holds for all of them is said in `vgrad.optim`. The optimizer names the reference.
"""
