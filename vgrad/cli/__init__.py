"""The commands of `vgrad`: train, evaluate, bench and experiment.

* `load`: the model or the ensemble in the folder of a run, as `train` saved it

The options stand in `vgrad_command`, outside of the package; `commands.py` runs them. A
run of `train` has arguments (`settings.py`), data (`data.py`) and a model
(`models.py`), is prepared (`setup.py`), and takes its steps (`run.py`). It leaves a
state, a model and figures in a folder (`checkpoint.py`), and a report (`report.py`).
"""

from vgrad.cli.checkpoint import load

__all__ = ["load"]


def __dir__() -> list[str]:
    return __all__
