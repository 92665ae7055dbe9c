"""Private training by the `Trainer` of transformers, which also needs accelerate."""

import copy
import inspect
import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vgrad import checks, files
from vgrad.dp import Plan, PrivateGradients
from vgrad.dp.grouped import seeded
from vgrad.generators import torch_seed
from vgrad.tree import tree_leaves
from vgrad.typing import Tree

transformers: Any = checks.package("transformers", "transformers")
checks.package("accelerate", "transformers")

STATE = "private.safetensors"
"""The file of a checkpoint that holds the state of `PrivateGradients`, a secret."""

_KIND = "state of private gradients"


class PrivateTrainer(transformers.Trainer):
    """DP-SGD by transformers' `Trainer`, with the steps of `PrivateGradients`.

    It takes the arguments of `Trainer` and of `PrivateGradients`, by keyword, and
    trains, evaluates, calls back, saves and resumes as `Trainer` does. One step of the
    trainer is one Poisson batch with noise. The expected batch size is
    `per_device_train_batch_size * gradient_accumulation_steps`; as many samples as the
    first are on the device at once. Pass a budget, whose epochs or steps are
    `num_train_epochs` or `max_steps` of the arguments, or a `plan`, which decides over
    steps and batch size. Training ends with the last step of the plan.

    Each checkpoint holds the state of the private run, in a file that only its owner
    can read, since it contains the secret key: keep checkpoints as secret as the data,
    and release what `save_model` writes into a new folder.
    `train(resume_from_checkpoint=...)` goes on with the same batches, noise and
    epsilon, also in the middle of an epoch, and refuses a checkpoint without that
    state. Data, collator and rates have to be as in the lost run, or its later
    steps and the new ones have one noise on two sums.

    The loss is the one that the model returns for a sample, a mean over its labels that
    are not -100; samples without labels add nothing. The logged training loss is not
    private. `args` is copied: gradient clipping is off in the copy, since each sample's
    gradient is clipped before there is noise.

    Attributes:
        private: the `PrivateGradients`, with `.epsilon()`, `.plan` and `.step`.

    Raises:
        ValueError: an argument that private training cannot keep, such as `fp16` (loss
            scaling), `group_by_length` or `label_smoothing_factor`; several processes
            or devices; the budget does not fit.
        TypeError: there is no model or no data set, or the loss is computed outside of
            the model.

    Example:
        >>> from vgrad.integrations.transformers import (  # doctest: +SKIP
        ...     PrivateTrainer,
        ... )
        >>> trainer = PrivateTrainer(  # doctest: +SKIP
        ...     model=model,
        ...     args=TrainingArguments("run", num_train_epochs=3, bf16=True),
        ...     train_dataset=dataset,
        ...     epsilon=8.0,
        ...     delta=1e-5,
        ...     max_norm=1.0,
        ... )
        >>> trainer.train()  # doctest: +SKIP
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: Any = None,
        *,
        plan: Plan | None = None,
        epsilon: float | None = None,
        delta: float | None = None,
        max_norm: Any = None,
        **options: Any,
    ) -> None:
        args = copy.copy(args or transformers.TrainingArguments("tmp_trainer"))
        dataset = options.get("train_dataset")
        if not isinstance(model, nn.Module) or dataset is None:
            raise TypeError(
                "PrivateTrainer: expected model=, a module, and train_dataset=, got "
                "none of one. A module that model_init makes has other parameters than "
                "the private run."
            )
        _check(type(self), args, options)
        size = args.per_device_train_batch_size
        budget = {"epsilon": epsilon, "delta": delta, "max_norm": max_norm}
        plan = _planned(args, dataset, plan, budget)
        args.max_grad_norm = 0.0
        args.ignore_data_skip = True  # the loader resumes by itself
        names = inspect.signature(PrivateGradients).parameters.keys() & options.keys()
        names -= {"physical_batch_size"}  # is of `args`
        private = {name: options.pop(name) for name in names}
        super().__init__(model=model, args=args, **options)
        self.args.gradient_accumulation_steps = 1  # which accelerator_config may set
        self.add_callback(_CountsEpochs(self))
        private |= _loading(self, dataset) | {"physical_batch_size": size}
        self.private = PrivateGradients(model, None, plan=plan, **private)
        self._state: Any = None  # from which the next call of `train` goes on
        self._flops = 0.0  # of the step that ended last

    def train(self, resume_from_checkpoint: Any = None, **options: Any) -> Any:
        """Train until the plan's last step, with the arguments of `Trainer.train`.

        Raises:
            ValueError: the checkpoint has no state of the private run, of an optimizer
                or of a schedule.
            RuntimeError: no step of the plan is left.
        """
        folder, taken, before = resume_from_checkpoint, 0, self.private.state_dict()
        self._state = before
        if folder is True:
            find = transformers.trainer_utils.get_last_checkpoint
            folder = find(self.args.output_dir) or True  # which Trainer refuses
        if isinstance(folder, str | os.PathLike):
            folder = os.fspath(folder)
            self._state, taken = _read(Path(folder))
        plan = self.private.plan
        try:
            self.private.load_state_dict(self._state)
            left = plan.steps - max(self.private.step, plan.earlier_steps)
        finally:  # until the weights are loaded, which may fail
            self.private.load_state_dict(before)
        if not left:
            raise RuntimeError(
                f"PrivateTrainer.train: expected steps left, got a run that has taken "
                f"the {plan.steps} steps of its plan. Plan more steps."
            )
        self.args.max_steps = taken + left
        return super().train(resume_from_checkpoint=folder, **options)

    def get_train_dataloader(self) -> Any:
        """Return the logical batches, each an iterable of its physical ones."""
        return _LogicalBatches(self.private)

    def get_batch_samples(self, epoch_iterator: Any, *_: Any) -> tuple[list, None]:
        """Return the next logical batch, without a count of its labels."""
        return [*itertools.islice(epoch_iterator, 1)], None

    def _prepare_for_training(self, *args: Any, **options: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **options)
        # A release that no step has used is dropped, and stays counted.
        self.private.load_state_dict(self._state)
        self.private.watch(self.optimizer)
        return prepared

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        name = f"checkpoint-{self.state.global_step}"
        folder = Path(self._get_output_dir(trial=trial)) / name
        (folder / STATE).unlink(missing_ok=True)  # of another model
        super()._save_checkpoint(model, trial)
        if folder.is_dir():  # and was not among too many
            _write(folder / STATE, self.private.state_dict())

    def training_step(self, model: nn.Module, inputs: Any, *_: Any, **__: Any) -> Any:
        """Write the noisy sum of a logical batch to `.grad`; return the mean loss."""
        model.train()
        if callable(train := getattr(self.optimizer, "train", None)):
            train()  # of optimizers without a schedule
        total = count = torch.zeros(())
        self._flops = 0.0
        for part in inputs:
            part = self._prepare_inputs(part)
            with self.compute_loss_context_manager():
                metrics = self.private.backward(part)
            losses, count = metrics["loss"], count + metrics["samples"]
            total = total + (losses * metrics["samples"]).nan_to_num()
            self._flops += super().floating_point_ops(part)
        return (total / count.clamp(min=1)).to(self.args.device)

    def floating_point_ops(self, inputs: Any) -> float:
        """Return the operations of the step that ended last."""
        return self._flops


class _LogicalBatches:
    """The batches of an epoch, each an iterator over parts that are loaded in turn."""

    def __init__(self, private: PrivateGradients) -> None:
        self._private, self.dataset = private, private.loader.dataset

    def __len__(self) -> int:
        return self._private.plan.steps_per_epoch

    def __iter__(self) -> Iterator[Iterator[Tree]]:
        parts = iter(self._private.loader)
        while (first := self._next(parts, 0)) is not _END:
            yield self._of_step(first, parts)

    def _of_step(self, part: Tree, parts: Iterator[Tree]) -> Iterator[Tree]:
        yield part
        for number in itertools.takewhile(self._goes_on, itertools.count(1)):
            yield self._next(parts, number)

    def _goes_on(self, _: int) -> bool:
        return not self._private.ready

    def _next(self, parts: Iterator[Tree], number: int) -> Any:
        # A step that is repeated has the same batch, also where samples are made by
        # chance: otherwise two sums would have one noise.
        place = self._private.key, "collate", self._private.step, number
        with seeded(torch_seed(*place)):
            return next(parts, _END)


_END = object()


class _CountsEpochs(transformers.TrainerCallback):
    """Counts epochs by steps, of which a resumed epoch has fewer."""

    def __init__(self, trainer: PrivateTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        state.epoch = state.global_step / self._trainer.private.plan.steps_per_epoch


_OFF = (False, None, "", [])
_ALLOWED: dict[str, tuple[tuple, str, str]] = {
    "fp16": (_OFF, "a dtype without loss scaling", "bf16=True"),
    "label_smoothing_factor": (_OFF, "losses of the model", "a model that smooths"),
    "torch_compile": (_OFF, "a model as it is written", "vgrad.compile in a loop"),
    "auto_find_batch_size": (_OFF, "batches that run once", "a smaller batch"),
    "dataloader_drop_last": (_OFF, "all samples of a batch", "False"),
    "group_by_length": (_OFF, "batches that the plan draws", "False"),
    "train_sampling_strategy": (("random",), "batches that the plan draws", "'random'"),
    "include_num_input_tokens_seen": (("no", *_OFF), "steps of one batch", "'no'"),
    "push_to_hub": (_OFF, "no upload of checkpoints and losses", "save_model(folder)"),
    "enable_jit_checkpoint": (_OFF, "checkpoints between steps", "save_steps"),
    **dict.fromkeys(
        ("deepspeed", "fsdp"),
        (_OFF, "one process", "vgrad.distributed with private_step"),
    ),
    "world_size": ((1,), "one process", "vgrad.distributed with private_step"),
    "n_gpu": ((0, 1), "one device", "CUDA_VISIBLE_DEVICES with one"),
}
"""Values of arguments that private steps keep, in words, and another way."""


def _check(kind: type, args: Any, options: Mapping[str, Any]) -> None:
    """Refuse arguments that private steps cannot keep."""
    for name, (allowed, expected, instead) in _ALLOWED.items():
        if (value := getattr(args, name, allowed[0])) not in allowed:
            raise ValueError(
                f"PrivateTrainer({name}={value!r}): expected {expected}. Use {instead}."
            )
    own = kind.compute_loss is not transformers.Trainer.compute_loss
    if own or options.get("compute_loss_func") is not None:
        raise TypeError(
            "PrivateTrainer: expected the loss that the model returns, got a "
            "compute_loss of its own. Return that loss from a module around the model."
        )


def _planned(
    args: Any, dataset: Any, plan: Plan | None, budget: dict[str, Any]
) -> Plan:
    """Return the plan, or make one of a budget, with the batches of the arguments."""
    missing = [name for name, value in budget.items() if value is None]
    if plan is not None and len(missing) == len(budget):
        return plan
    if plan is not None or missing:
        got = "both" if plan is not None else f"no {', '.join(missing)}"
        raise ValueError(
            f"PrivateTrainer: expected {', '.join(budget)}, or a plan in their place, "
            f"got {got}."
        )
    if not hasattr(dataset, "__len__"):
        raise TypeError(
            f"PrivateTrainer(train_dataset): expected a data set with a length, got a "
            f"{type(dataset).__name__}. Make a list of a stream."
        )
    count = len(dataset)
    expected = args.per_device_train_batch_size * args.gradient_accumulation_steps
    if expected > count:
        raise ValueError(
            f"PrivateTrainer(args): expected at most the {count} samples of the data "
            f"set in a batch, got per_device_train_batch_size * "
            f"gradient_accumulation_steps = {expected}."
        )
    steps = args.max_steps
    if steps <= 0:
        steps = math.ceil(args.num_train_epochs * round(count / expected))
    budget |= {"dataset_size": count, "sampling_rate": expected / count}
    return Plan.for_epsilon(**budget, steps=steps)


def _loading(trainer: Any, dataset: Any) -> dict[str, Any]:
    """Return the data set and the options of its loader, as `Trainer` makes them."""
    args, collate_fn, kind = trainer.args, trainer.data_collator, "Training"
    if hasattr(dataset, "remove_columns"):  # of the library `datasets`
        dataset = trainer._remove_unused_columns(dataset, description=kind)
    else:
        collate_fn = trainer._get_collator_with_removed_columns(collate_fn, kind)
    options = {"dataset": dataset, "collate_fn": collate_fn}
    # A pass draws a number from it first, which is not to be one of a collator's.
    options |= {"generator": torch.Generator()}
    options |= {"num_workers": args.dataloader_num_workers}
    if args.dataloader_num_workers and hasattr(dataset, "__getitem__"):
        drawn = []
        for seed in (0, 1):
            with seeded(seed):
                rows = [dataset[row] for row in range(min(2, len(dataset)))]
                drawn.append(tree_leaves(collate_fn(copy.deepcopy(rows))))
        if not all(map(checks.same_values, *drawn)):
            raise ValueError(
                f"PrivateTrainer(dataloader_num_workers={args.dataloader_num_workers}"
                f"): expected samples that do not depend on chance, since a resumed "
                f"run repeats no random numbers of workers. Pass 0."
            )
    return options | {"pin_memory": args.dataloader_pin_memory}


def _write(path: Path, state: dict[str, Any]) -> None:
    """Write a state: tensors, and JSON with their names in their places."""
    tensors: dict[str, Tensor] = {}

    def named(tensor: Tensor) -> dict[str, str]:
        tensors[name := str(len(tensors))] = tensor
        return {_TENSOR: name}

    plain = json.loads(json.dumps(state, default=named))
    files.write_tensors(path, tensors, {"kind": _KIND, "state": plain}, private=True)


_TENSOR = "<tensor>"


def _read(folder: Path) -> tuple[dict[str, Any], int]:
    """Read the state in a checkpoint, and how many steps its trainer has taken."""
    for name in (STATE, "optimizer.pt", "scheduler.pt"):
        if not (folder / name).is_file():
            raise ValueError(
                f"PrivateTrainer.train(resume_from_checkpoint={str(folder)!r}): "
                f"expected a whole checkpoint of PrivateTrainer, got one without "
                f"{name}. Epsilon would leave steps out, or noise would come twice."
            )
    tensors, about = files.read_tensors(folder / STATE, _KIND)

    def valued(entries: dict[str, Any]) -> Any:
        return tensors[entries[_TENSOR]] if _TENSOR in entries else entries

    state = json.loads(json.dumps(about["state"]), object_hook=valued)
    trainer = transformers.TrainerState.load_from_json(folder / "trainer_state.json")
    return state, trainer.global_step
