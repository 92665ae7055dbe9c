"""The commands of `vgrad`: train, evaluate, bench and experiment.

* `load`: the model or the ensemble in the folder of a run, as `train` saved it

Their options stand in `vgrad_command`, which lies outside of the package, and
`commands.py` runs them. `settings.py` has the arguments of a run of `train`. The run
reads its data (`data.py`), builds its model (`models.py`), prepares its trainers
(`setup.py`), and takes its steps (`run.py`). It leaves a state, a model
(`checkpoint.py`) and figures (`metrics.py`) in a folder, and a report of them
(`report.py`).
"""

from vgrad.cli.checkpoint import load

__all__ = ["load"]


def __dir__() -> list[str]:
    return __all__
