"""The only door to what torch does not promise to keep.

Each file borrows what one part of vgrad needs and says what it expects of it; each name
has a test in `tests/test_torch_private.py`, which fails where torch takes it away or
changes it. `torch.utils._pytree` is borrowed in `vgrad/tree.py` in the same way.
"""
