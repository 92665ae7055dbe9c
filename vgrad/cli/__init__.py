"""The commands of `vgrad`: train, evaluate, bench, experiment and rules.

* `load`: the model or the ensemble in the folder of a run, as `train` saved it

Their options stand in `vgrad_command`, which lies outside of the package, and
`commands.py` runs them. `settings.py` has the arguments of a run of `train`. The run
reads its data (`data.py`), builds its model (`models.py`), prepares its trainers
(`setup.py`, and `ensembles.py` for an ensemble), and takes its steps (`run.py`). It
leaves a state, a model (`checkpoint.py`) and figures (`metrics.py`) in a folder, and
shows them (`report/`). `descriptions.py` checks what such files say about themselves.
"""

from vgrad.cli.checkpoint import load

__all__ = ["load"]


def __dir__() -> list[str]:
    return __all__
