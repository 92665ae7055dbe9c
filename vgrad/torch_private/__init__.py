"""The only door to the private names of torch.

Each has a test in `tests/test_torch_private.py`, which fails if torch removes it or
changes it. `vgrad/tree.py` borrows `torch.utils._pytree` in the same way.
"""
