"""The commands of `vgrad`: train, evaluate, audit, bench and experiment.

* `load`: the model or the ensemble in the folder of a run, as `train` saved it

The options stand in `vgrad_command`, outside of the package; `commands.py` runs them.
`setup.py` prepares a run of `train`, and `run.py` takes its steps.
"""

from vgrad.cli.checkpoint import load

__all__ = ["load"]


def __dir__() -> list[str]:
    return __all__
