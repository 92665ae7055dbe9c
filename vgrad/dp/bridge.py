"""Private gradients for a loop that has a module and an optimizer of torch."""

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from vgrad import batches, checks
from vgrad.dp.live import LiveModule
from vgrad.dp.loader import Piece, PoissonLoader, Progress, check_names, planned
from vgrad.dp.padding import Padded, check_padded
from vgrad.dp.plan import Plan, as_digest, check_spent, spent_under
from vgrad.dp.watching import Watch, check_alone
from vgrad.functional.losses import Criterion, check_criterion, sample_loss
from vgrad.functional.model import write_grads_
from vgrad.generators import (
    RNG_LOCK,
    check_key,
    kept_random_state,
    secret_key,
    set_seed,
    torch_seed,
)
from vgrad.persample.clipped import ClippedGradFn, clipped_grad
from vgrad.tree import map_values, widened
from vgrad.typing import ChunkSize, Params, Randomness, Strategy, Tree


class PrivateGradients:
    """DP-SGD for an ordinary loop: a module, an optimizer and a scheduler of torch.

    `.loader` takes the place of the `DataLoader`, `.backward(*batch)` that of the
    forward pass and `loss.backward()`; all else in a loop stays. The numbers are those
    of `private_step`: every sample's gradient is clipped to `max_norm`, their sum is
    divided by the expected batch size, and noise is added once for a logical batch.

    Say what the run may spend, with `epsilon`, `delta`, `epochs` and `batch_size` (the
    expected size of a batch), or pass a `plan`. A pass over `.loader` is an epoch of
    `plan.steps_per_epoch` logical batches. Options of a `DataLoader` that
    do not choose samples (`collate_fn`, `num_workers`, `pin_memory`, ...) are handed on
    to one.

    `physical_batch_size` cuts logical batches into loaded ones of at most so many
    samples, and `chunk_size` says how many of a loaded batch are computed at a time:
    neither changes what is released, up to rounding (and dropout). `criterion` is read
    as by `sample_loss`: `None` for a module that returns its loss. A sample of the data
    set holds the data of one person, and must not depend on the others.

    Each `backward` computes on the module itself, with its values, mode and attributes
    of that moment. Its buffers, and attributes that its forward pass writes, are put
    back; batch normalisation in training mode raises.

    What can be noticed raises: another number of samples than the loader gave, a batch
    that is skipped or used twice, steps past the plan, gradients that something else
    wrote, several processes. With `watch(optimizer)` its steps are checked too. Nothing
    notices samples that were exchanged for as many others.

    Reference: Abadi et al., Deep Learning with Differential Privacy, arXiv 1607.00133.

    Args:
        strategy: how gradients come about: `"recorded"` in one backward pass, `"vmap"`,
            `"loop"` sample by sample; `"auto"` takes the first of these that can.
        chunk_size: samples at a time; None for all, `"auto"` for what fits into memory.
        randomness: of random ops: `"error"`, `"different"` for each sample, `"same"`.
        check_collate: look once, with some of the first 64 samples, whether a loss
            changes where `collate_fn` pads a sample to the length of another one.

    Attributes:
        plan: what sampling, noise and accounting have in common.
        loader: the batches, see `PoissonLoader`.

    Raises:
        ValueError: there are both a plan and a budget, or the budget is not complete;
            the plan is for another number of samples; an option chooses samples.
        TypeError: the data set has no length, the module cannot be functional, or an
            option is none of a `DataLoader`.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> data = TensorDataset(torch.randn(100, 4), torch.randint(2, (100,)))
        >>> private = PrivateGradients(
        ...     model,
        ...     torch.nn.functional.cross_entropy,
        ...     data,
        ...     epsilon=3.0,
        ...     delta=1e-3,
        ...     epochs=2,
        ...     batch_size=20,
        ...     max_norm=1.0,
        ... )
        >>> _ = private.watch(optimizer)
        >>> for epoch in range(2):
        ...     for x, y in private.loader:
        ...         metrics = private.backward(x, y)
        ...         optimizer.step()
        >>> private.step, round(private.epsilon(), 2)
        (10, 3.0)
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: Criterion,
        dataset: Dataset[Any],
        *,
        plan: Plan | None = None,
        epsilon: float | None = None,
        delta: float | None = None,
        epochs: int | None = None,
        batch_size: int | None = None,
        max_norm: float | None = None,
        physical_batch_size: int | None = None,
        strategy: Strategy = "auto",
        chunk_size: ChunkSize = None,
        randomness: Randomness = "different",
        check_collate: bool = True,
        key: Tensor | None = None,
        **loading: Any,
    ) -> None:
        """Plan the run, with a new key from the operating system if there is none."""
        check_criterion("PrivateGradients", criterion)
        check_names(PrivateGradients, loading)
        budget = {"epsilon": epsilon, "delta": delta, "epochs": epochs}
        budget |= {"batch_size": batch_size, "max_norm": max_norm}
        self.plan = planned(plan, budget, dataset)
        key = secret_key() if key is None else key
        check_key("PrivateGradients", key)
        self._progress = Progress(key)
        self.loader = PoissonLoader(
            self.plan,
            self._progress,
            dataset,
            physical_batch_size=physical_batch_size,
            check_collate=check_collate,
            options=loading,
        )
        with RNG_LOCK:
            self._live = LiveModule(model)
        self._watch = Watch(self._live)
        self._criterion = criterion
        self._options: Any = {"strategy": strategy, "chunk_size": chunk_size}
        self._options |= {"randomness": randomness}
        self._clipped, self._function = self._clip(), self._live.function
        self._sums: Params = {}

    @property
    def model(self) -> nn.Module:
        """The module that is trained."""
        return self._live.model

    @property
    def key(self) -> Tensor:
        """The secret key, uint8 `[32]`."""
        return self._progress.key

    @property
    def step(self) -> int:
        """How many logical batches were released."""
        return self._progress.step

    @property
    def plan_digest(self) -> Tensor:
        """That of the plan under which steps were taken, zeros before the first one."""
        return as_digest(spent_under(self.plan, self.step))

    @property
    def ready(self) -> bool:
        """Whether `.grad` holds the gradients of a whole logical batch.

        Until then `.grad` is None, and a step of an optimizer of torch changes nothing.
        A scheduler that counts steps asks here first.
        """
        return self._watch.ready

    def backward(self, *batch: Tree) -> dict[str, Tensor]:
        """Clip and add up the gradients of a batch of `.loader`; release them if whole.

        With the last physical batch of a logical one (each is, unless there is a
        `physical_batch_size`) the sum gets its noise and is written into `.grad`, in
        the dtype of each parameter. Frozen parameters keep `.grad` None. The batch may
        have been changed sample by sample, or moved to the module's device.

        Only `.grad` is private. What is returned is for your own logs and must not be
        published: `loss` (mean over this batch, NaN where it is empty), `samples`,
        `clipped` and `nonfinite`, all computed without noise.

        A call that raises has released nothing and can be repeated.

        Raises:
            RuntimeError: the batch is not the loader's or was used before, `.grad`
                holds what was written elsewhere, the module is another one, its losses
                depend on the padding of a batch, or there are several processes.
            ValueError: the batch has another number of samples than the loader gave.
        """
        piece = self._expected(batch)
        check_alone(self._progress.process)
        place = (piece.number,) if piece.number else ()  # else as in private_step
        seed = torch_seed(self.key, "loss", self.step, *place)
        with RNG_LOCK:  # calls of one module from several threads take turns
            function = self._live.follow(within=piece.number > 0)
            if function is not self._function:
                self._clipped, self._function = self._clip(), function
            self._watch.check_written()
            if piece.number == 0:
                self._watch.check_used()
            if self.loader.padded is not None and piece.rows:
                self._check_padded(self.loader.padded, batch)
            params, buffers = self._live.values()
            with torch.no_grad(), kept_random_state(params.values()):
                set_seed(seed, params.values())
                result = self._live.run(self._clipped, params, buffers, *batch)
        sums = result.grads
        if piece.number:
            sums = map_values(torch.add, self._sums, sums)
        elif not piece.last:
            sums = map_values(Tensor.double, sums)
        noisy = self._noisy(sums, result.grads) if piece.last else None
        self._take(piece, sums, noisy)
        return {
            "loss": widened(result.losses).mean(),
            "samples": torch.tensor(len(result.losses)),
            "clipped": result.clipped,
            "nonfinite": result.nonfinite,
        }

    def watch(self, optimizer: Optimizer) -> Optimizer:
        """Check each step of an optimizer of torch, and return it.

        Its steps raise unless `.grad` is what `backward` wrote and has not been used:
        plain gradients, clipped or scaled ones, and second steps are noticed. So are
        gradients that were accumulated instead of used.

        Raises:
            TypeError: it is not an optimizer of torch.
            ValueError: it trains none of the module's parameters.
        """
        inside = optimizer
        while hasattr(inside, "optimizer"):  # as accelerate and Lightning wrap them
            inside = inside.optimizer  # pyright: ignore
        if not isinstance(inside, Optimizer):
            raise TypeError(
                f"PrivateGradients.watch(optimizer): expected a torch.optim.Optimizer, "
                f"got a {type(optimizer).__name__}."
            )
        self._watch.add(inside)
        return optimizer

    def epsilon(self) -> float:
        """Return the epsilon spent so far, at the plan's `delta`.

        Raises:
            ImportError: `dp-accounting` is not installed.
        """
        return self.plan.epsilon(self.step)

    def state_dict(self) -> dict[str, Any]:
        """Return the key, the step and the plan, all that a run goes on from.

        It is as secret as the data: whoever has the key can remove the noise. It holds
        a tensor and plain numbers, which `torch.load(weights_only=True)` reads. Save it
        between logical batches, together with the module and the optimizer.
        """
        plan = asdict(self.plan)
        return {"key": self.key.clone(), "step": self.step, "plan": plan}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned: the same batches and the same noise.

        The rest of the epoch is the next pass. Steps that the lost run took after it
        was saved are repeated bit by bit on machines of one type, and so are the same
        releases. If anything else differs (data, criterion, learning rate, what the
        data set draws at random), one of the two runs needs a key of its own:
        `state["key"] = vgrad.dp.secret_key()`.

        Raises:
            ValueError: the state is not complete, or of a run with another plan; one
                with more steps may go on, and one that accounts for both
                (`Plan.after`).
        """
        function = "PrivateGradients.load_state_dict(state)"
        if set(state) != {"key", "step", "plan"}:
            got = checks.listed(state) or "nothing"
            raise ValueError(
                f"{function}: expected 'key', 'step' and 'plan', as state_dict() "
                f"returns them, got {got}. The state of a module is for "
                f"model.load_state_dict."
            )
        check_key(function, state["key"])
        [step] = checks.whole(function, least=0, step=state["step"])
        checks.dictionaries(function, plan=state["plan"])
        try:
            saved = Plan(**state["plan"])
        except TypeError as error:
            raise ValueError(
                f"{function}: expected the plan of a run in 'plan', got another "
                f"dictionary ({error})."
            ) from error
        taken = as_digest(spent_under(saved, step))
        try:
            check_spent(function, self.plan, taken, step)
        except ValueError as error:
            raise ValueError(
                f"{error} The plan of the state, Plan(**state['plan']), is {saved}."
            ) from error
        if step > self.plan.steps:
            raise ValueError(
                f"{function}: expected at most the {self.plan.steps} steps of the "
                f"plan, got {step}."
            )
        self._progress.key = state["key"].cpu().clone()
        self._progress.step, self._progress.process = step, os.getpid()
        self.loader.restart()
        self._watch.forget()

    def _clip(self) -> ClippedGradFn:
        return clipped_grad(
            sample_loss(self._live.function, self._criterion),
            max_norm=self.plan.max_norm,
            normalize_by=self.plan.expected_batch_size,
            **self._options,
        )

    def _check_padded(self, padded: Padded, batch: Tree) -> None:
        """Look once whether padding changes losses."""
        model, shown = self._live.model, self.loader.shown
        check_padded(model, self._criterion, padded, shown, batch)
        self.loader.padded = self.loader.shown = None

    def _expected(self, batch: tuple) -> Piece:
        """Return the batch that the loader gave, if this may be it."""
        piece = self.loader.given
        if piece is None:
            raise RuntimeError(
                "PrivateGradients.backward(*batch): expected the batch that .loader "
                "has just given, got one that is not from it, or the same one again. "
                "Call it once for each batch of `for ... in private.loader`."
            )
        size = batches.read("PrivateGradients.backward", batch).size
        if size != len(piece.rows):
            raise ValueError(
                f"PrivateGradients.backward(*batch): expected the {len(piece.rows)} "
                f"samples that .loader has given, got {size}. The size of a batch is "
                f"part of the guarantee: neither drop samples nor add any."
            )
        return piece

    def _noisy(self, sums: Params, like: Params) -> Params:
        """Add the noise of the step."""
        sums = {name: total.to(like[name].dtype) for name, total in sums.items()}
        return self.plan.add_noise(
            sums, self._clipped.sensitivity, key=self.key, step=self.step
        )

    def _take(self, piece: Piece, sums: Params, noisy: Params | None) -> None:
        """Keep the sums of a batch, or write gradients: all or, on error, nothing."""
        params = [*self._live.parameters.values()]
        grads, watched = [each.grad for each in params], vars(self._watch).copy()
        before, step = self._sums, self.step
        try:
            self.loader.given, self._sums = None, sums  # the batch is not used twice
            if piece.number == 0:
                self._watch.begin()
            if noisy is not None:
                self._sums, self._progress.step = {}, step + 1
                write_grads_(self._live.model, noisy)
                self._watch.release()
        except BaseException:
            self.loader.given, self._sums = piece, before
            self._progress.step = step
            for parameter, grad in zip(params, grads, strict=True):
                parameter.grad = grad
            vars(self._watch).update(watched)
            raise
