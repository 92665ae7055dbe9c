"""Other libraries' training loops: `vgrad.integrations.transformers` has a `Trainer`.

Each module imports its library, so none is imported with `vgrad`.
"""
