"""One file per family: the update rule, its state, and the optimizer made of both."""
