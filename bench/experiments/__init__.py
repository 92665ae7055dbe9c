"""The experiments of four articles, repeated: `python -m vgrad experiment NAME`.

A file of its own for each; `study.py` says what an experiment is and runs its pieces.
"""
