"""The commands of `python -m vgrad`: train, evaluate, bench, experiment and rules.

`options.py` declares what they can be told, and `settings.py` what a run of `train`
is. The run reads its data (`data.py`), builds its model (`models.py`), prepares its
trainers (`setup.py`, and `ensembles.py` for an ensemble), and takes its steps
(`run.py`). It leaves a state, a model (`checkpoint.py`) and figures (`metrics.py`) in a
folder, and shows them (`report/`). `descriptions.py` checks what such files say about
themselves.
"""
