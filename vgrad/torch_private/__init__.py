"""The only door to what torch does not promise to keep.

Each file says what it expects of each name that it borrows, in which file of torch that
name lives, and what would end the need. Each name has a test in
`tests/test_torch_private.py`, which fails if torch removes it or changes it.
`vgrad/tree.py` borrows `torch.utils._pytree` in the same way.
"""
