"""The experiments of four articles, repeated: `python -m bench.experiments NAME`.

A file of its own for each; `study.py` says what an experiment is and runs its pieces.
"""
