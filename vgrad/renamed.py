"""Public names of the release before this one: each raises, with the new name."""

import sys
from collections.abc import Callable
from typing import Any

RENAMED = {
    "vgrad.Explanation": "vgrad.Report",
    "vgrad.hessian": "torch.func.hessian",
    "vgrad.jacfwd": "torch.func.jacfwd",
    "vgrad.jacrev": "torch.func.jacrev",
    "vgrad.jvp": "torch.func.jvp",
    "vgrad.linearize": "torch.func.linearize",
    "vgrad.load": "vgrad.cli.load",
    "vgrad.rules": "vgrad.ops",
    "vgrad.vjp": "torch.func.vjp",
    "vgrad.compiled.CompiledExplanation": "vgrad.Report",
    "vgrad.compiled.Report": "vgrad.Report",
    "vgrad.ensemble.EnsembleExplanation": "vgrad.Report",
    "vgrad.precision.AlignmentReport": "vgrad.Report",
    "vgrad.optim.ApplyIfFiniteState": "vgrad.optim.transforms.ApplyIfFiniteState",
    "vgrad.optim.HyperparamsState": "vgrad.optim.transforms.HyperparamsState",
    "vgrad.optim.LookaheadState": "vgrad.optim.transforms.LookaheadState",
    "vgrad.optim.MultiStepsState": "vgrad.optim.transforms.MultiStepsState",
    "vgrad.optim.PlateauState": "vgrad.optim.transforms.PlateauState",
    "vgrad.optim.ScheduleFreeState": "vgrad.optim.transforms.ScheduleFreeState",
    "vgrad.optim.keep": "vgrad.optim.set_to_zero",
    "vgrad.optim.scale_by_adadelta": "vgrad.optim.adadelta",
    "vgrad.optim.scale_by_adamax": "vgrad.optim.adamax",
    "vgrad.optim.scale_by_amsgrad": "vgrad.optim.adam",
    "vgrad.optim.scale_by_factored_rms": "vgrad.optim.adafactor",
    "vgrad.optim.scale_by_lion": "vgrad.optim.lion",
    "vgrad.optim.scale_by_nadam": "vgrad.optim.nadam",
    "vgrad.optim.scale_by_radam": "vgrad.optim.radam",
    "vgrad.optim.scale_by_rms": "vgrad.optim.rmsprop",
    "vgrad.optim.scale_by_rprop": "vgrad.optim.rprop",
    "vgrad.optim.scale_by_rss": "vgrad.optim.adagrad",
    "vgrad.optim.scale_by_schedule": "vgrad.optim.scale",
    "vgrad.optim.scale_by_stddev": "vgrad.optim.rmsprop",
    "vgrad.optim.states": "vgrad.optim.State",
    "vgrad.precision.cast_floating": "vgrad.precision.Policy.cast",
    "vgrad.precision.cast_to_full": "vgrad.precision.Policy.cast",
    "vgrad.precision.cast_to_half": "vgrad.precision.Policy.cast",
    "vgrad.training.save_state": "vgrad.training.save",
    "vgrad.training.load_state": "vgrad.training.load",
    "vgrad.distributed.save_checkpoint": "vgrad.training.save",
    "vgrad.distributed.load_checkpoint": "vgrad.training.load",
    "vgrad.ensemble.save_ensemble": "vgrad.training.save",
    "vgrad.ensemble.load_ensemble": "vgrad.training.load",
    "vgrad.ensemble.load_member": "vgrad.ensemble.member",
    "vgrad.init_ensemble": "vgrad.stack",
    "vgrad.ensemble.init_ensemble": "vgrad.stack",
    "vgrad.ensemble.predict_values": "vgrad.ensemble.predict",
    "vgrad.ensemble.class_prediction": "vgrad.ensemble.EnsemblePrediction.from_logits",
    "vgrad.ensemble.value_prediction": "vgrad.ensemble.ValuePrediction.from_outputs",
    "vgrad.distributed.alone": "vgrad.distributed.single_process_mesh",
    "vgrad.distributed.own_members": "vgrad.distributed.shard_members",
    "vgrad.distributed.all_members": "vgrad.distributed.gather_members",
    "vgrad.distributed.predict": "vgrad.ensemble.predict",
    "vgrad.distributed.predict_values": "vgrad.ensemble.predict",
    "vgrad.distributed.LocalBatches": "vgrad.distributed.loading.LocalBatches",
    "vgrad.dp.Accountant": "vgrad.dp.accounting.Accountant",
    "vgrad.dp.poisson_sample": "vgrad.dp.sampling.poisson_sample",
    "vgrad.ensemble.Calibration": "vgrad.ensemble.calibration.Calibration",
    "vgrad.ensemble.MembersState": "vgrad.ensemble.optimizer.MembersState",
    "vgrad.ensemble.ModelGroups": "vgrad.ensemble.stacking.ModelGroups",
    "vgrad.ensemble.Reliability": "vgrad.ensemble.calibration.Reliability",
    "vgrad.precision.AutocastMode": "vgrad.precision.autocasting.AutocastMode",
    "vgrad.precision.Kind": "vgrad.ops.Kind",
    "vgrad.precision.PolicyModel": "vgrad.precision.modules.PolicyModel",
    "vgrad.training.CrossValidation": "vgrad.training.validation.CrossValidation",
    "vgrad.training.Step": "vgrad.training.state.Step",
}
"""Old name to new name, as in the last table of docs/migration.md."""


def attributes(module: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` of a module, whose old names raise, and its `__dir__`."""

    def __getattr__(name: str) -> Any:
        old = f"{module}.{name}"
        if new := RENAMED.get(old):
            raise AttributeError(f"{old}: expected a name of this release. Use {new}.")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return __getattr__, lambda: sys.modules[module].__all__
