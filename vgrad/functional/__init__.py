"""A module as a pure function of its parameters and buffers, and losses on it.

Its public names are names of `vgrad` itself.
"""
