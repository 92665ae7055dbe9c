"""Private gradients for a loop with a module and an optimizer of torch."""

import copy
import io
import os
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, cast, get_args
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, IterableDataset, default_collate

from vgrad import batches, checks, files, optim
from vgrad.dp.adaptive import QuantileClip, count_below
from vgrad.dp.audit import Audit
from vgrad.dp.discrete import DiscreteNoise
from vgrad.dp.group_clip import GroupClip, scaled
from vgrad.dp.grouped import Augment, Grouped, seeded
from vgrad.dp.loading import PhysicalBatch, PoissonLoader, Run, check_options
from vgrad.dp.noise import (
    ADD_NOISE,
    Noise,
    NoiseHistory,
    Privatizing,
    Streams,
    add_noise,
)
from vgrad.dp.plan import Plan, check_spent, units_of
from vgrad.dp.units import UnitLoss, Units, check_units, present
from vgrad.functional.live import LiveModel
from vgrad.functional.losses import Criterion, check_criterion, sample_loss
from vgrad.functional.model import write_grads_
from vgrad.generators import (
    RNG_LOCK,
    check_key,
    fold_in,
    kept_random_state,
    sample_keys,
    secret_key,
    set_seed,
    torch_seed,
)
from vgrad.loss.randomness import Unkeyed
from vgrad.optim.base import GradientTransformation
from vgrad.optim.private import stepped, with_deviation
from vgrad.persample.clipped import ClippedGrad, ClippedGradFn, clipped_grad
from vgrad.persample.engine import advanced
from vgrad.tree import map_values, tree_flatten, tree_leaves, tree_unflatten, widened
from vgrad.typing import (
    Buffers,
    ChunkSize,
    LossFn,
    Params,
    Randomness,
    Scales,
    Strategy,
    Tree,
)

_PADDING_SAMPLES = 64
"""Samples among which `check_collate` looks for two of different shapes."""


class Release(NamedTuple):
    """The clipped sum of a logical batch, and the noise in front of an optimizer."""

    sums: Params  # in the scales of the noise
    scales: Scales
    noise: Noise | DiscreteNoise  # not drawn yet
    max_norm: Tree  # of the next step

    def privatized(self) -> tuple[Params, Tree]:
        """Return the noisy sum, and the history for the noise of the next step."""
        return add_noise(self.sums, Privatizing(self.noise, self.scales))

    def step(
        self,
        execute: Callable,
        tx: GradientTransformation,
        sums: Params,
        optimizer: Tree,
        params: Params,
        *,
        donate: bool,
        deviates: bool = False,
    ) -> tuple[Params, Tree, dict[str, Tree]]:
        """Take a step of `chain(ADD_NOISE, tx)`; return the history of the noise too.

        A graph that compiles draws the noise in the same pass as it steps, unless the
        state is donated, into which no graph can write. With `deviates` the state of
        the optimizer gets the deviation of the noise.
        """
        noise = self.noise
        if deviates:
            optimizer = with_deviation(optimizer, noise.deviation)
        # Outside of a graph that compiles other code draws faster.
        compiles = getattr(execute, "compiles", False)
        graph = noise if compiles and isinstance(noise, Noise) else None
        drawn = None if graph is None else graph.drawn(sums)
        if graph is None or drawn is None:
            grads, history = self.privatized()
            arguments = tx, grads, optimizer, params
            params, optimizer, _ = stepped(execute, *arguments, donate=donate)
            return params, optimizer, {"noise": history}
        state = Privatizing(drawn, self.scales)
        if donate:
            grads, buffers = execute(add_noise, sums, state)
            params, optimizer = optim.step(tx, grads, optimizer, params, donate=True)
        else:
            arguments = tx, sums, (state, optimizer), params
            params, (buffers, optimizer) = execute(noisy_step, *arguments)
        return params, optimizer, {"noise": graph.after(sums, drawn.buffers, buffers)}


def noisy_step(
    tx: GradientTransformation, grads: Params, state: Tree, params: Params
) -> tuple[Params, Tree]:
    """Add noise to gradients, and take a step, as one function of tensors."""
    return optim.step(optim.chain(ADD_NOISE, tx), grads, state, params)


@dataclass(frozen=True, eq=False, kw_only=True)
class PrivateSource:
    """Clipped sums, by `transform`, and the noise of a plan for them."""

    plan: Plan
    transform: Any
    streams: Streams = field(default_factory=Streams)
    counts: Streams = field(default_factory=Streams)  # of norms

    def at(
        self, max_norm: Tree, params: Mapping[str, Tensor], step: int, route: int
    ) -> ClippedGradFn:
        """Return the clipped sum of a step, by the route and bound of a state."""
        options = self.transform.options
        chosen = options.strategy != "auto"
        options.fallbacks.route = "auto" if chosen else _ROUTES[route]
        if refused := [name for name, x in params.items() if x.is_complex()]:
            raise TypeError(
                f"{options.function}(params): expected real parameters, got complex "
                f"ones in {refused}. Train torch.view_as_real(w), and take its "
                f"view_as_complex in the model."
            )
        clip, clipped = self.plan.max_norm, self.transform
        if not isinstance(clip, QuantileClip):
            return clipped
        device, first = next(iter(params.values())).device, self.plan.earlier_steps
        return clipped.with_max_norm(clip.bound(max_norm, device, first=step == first))

    def computed(
        self, clipped: Any, places: range, key: Tensor, step: int, *arguments: Any
    ) -> tuple[Any, bool]:
        """Return the sum over samples at places of the logical batch.

        Also return whether all random numbers of the loss follow from these places.
        """
        seed, params = torch_seed(key, "loss", step), arguments[0].values()
        keys, result, before = None, None, _states_in_python()
        if (randomness := clipped.options.randomness) != "error":
            start = 0 if randomness == "same" else places.start
            keys = sample_keys(seed, start, len(places), next(iter(params)).device)
        try:
            result = clipped.keyed(keys)(*arguments)
            if before != _states_in_python():
                raise Unkeyed("some of Python's or numpy's generator")
        except Unkeyed:
            if clipped.reduce is not None or self.plan.noise.correlated:
                raise
            if result is None:  # parts of a batch draw their own numbers
                set_seed(torch_seed(key, "loss", step, places.start), params)
                result = clipped(*arguments)
            return result, False
        return result, True

    def released(
        self, clipped: Any, result: Any, params: Params, history: Tree, **place: Any
    ) -> Release:
        """Return the release of the result of `clipped` at a key and a step."""
        plan, following = self.plan, ()
        if not place.pop("keyed"):  # another attempt may have drawn another sum
            named = {str(number): x for number, x in enumerate(tree_leaves(result))}
            place["key"] = fold_in(place["key"], "sum", files.digest(named))
        if (bound := clipped.options.max_norm) is not None:
            options = {"streams": self.counts, **place}
            following = plan.next_max_norm(bound, count_below(result), **options)
        place |= {"max_norm": bound, "history": history}
        noise = plan.step_noise(clipped.sensitivity, self.streams, **place)
        scales = plan.scales(params)
        sums = scaled(result.grads, scales) if scales else result.grads
        return Release(sums, scales, noise, following)


_ROUTES = get_args(Strategy)


def route_of(clipped: ClippedGradFn) -> int:
    """Return the number of the strategy by which a private run computes sums."""
    return _ROUTES.index(clipped.options.fallbacks.route)


def _states_in_python() -> tuple[Any, ...]:
    """Return the states of the generators of Python and numpy."""
    _, words, *rest = np.random.get_state()
    return random.getstate(), words.tobytes(), rest  # pyright: ignore


def clipped_sums(function: str, loss: LossFn, plan: Plan, **options: Any) -> Any:
    """Return the clipped sum of a plan, under the name of another function."""
    clipped: Any = clipped_grad(loss, **options, **plan.clipping)
    private_options = replace(clipped.options, function=function, private=True)
    return replace(clipped, options=private_options)


def metrics_of(result: ClippedGrad) -> dict[str, Tensor]:
    """Return the mean loss of a batch and counts of its samples, without noise."""
    return {
        "loss": widened(result.losses).mean(),
        "samples": torch.tensor(len(result.losses)),
        "clipped": result.clipped,
        "nonfinite": result.nonfinite,
    }


class PrivateGradients:
    """DP-SGD for an ordinary loop: a module, an optimizer and a scheduler of torch.

    `.loader` replaces the `DataLoader`, and `.backward(*batch)` the forward pass and
    `loss.backward()`; the rest of a loop stays. The numbers are as in `private_step`.

    Pass a `plan` or the budget of the run: `epsilon`, `delta`, `max_norm`, `epochs` and
    the expected `batch_size`. A pass over `.loader` is an epoch of
    `plan.steps_per_epoch` logical batches. `physical_batch_size` splits them into
    loaded ones of at most so many samples, which changes no released number, except for
    rounding. Options of a `DataLoader` are passed on to one, `criterion`
    is as in `sample_loss`, and other options are as in `vgrad.persample.Options`. A
    sample of the data set holds the data of one person, and must not depend on the
    others.

    Each `backward` computes on the module itself, with its current values, mode and
    attributes. Attributes that its forward pass writes are restored. Power iterations
    advance once a step; buffers that depend on samples, as in batch norm, raise.

    Misuse raises where it can be detected: another number of samples than the loader
    yielded, a batch that is skipped or used twice, steps past the plan, gradients that
    other code wrote, several processes. With `watch(optimizer)` its steps are checked
    too. Samples that were exchanged for as many others are not detected.

    Args:
        units: the persons or groups that samples belong to, `dp.Units` or one id for
            each sample. Units are drawn then, and `samples_per_unit` samples of each:
            tensors of a batch are `[U, k, ...]`, filled up with copies that do not
            count. The epochs, sizes and the plan count units; `plan.neighbours` is
            about them.
        samples_per_unit: the most samples of a unit in a batch, whose mean is clipped.
        augmentations: K copies of a sample, whose mean loss is clipped, as in
            `sample_loss`: samples of the data set have them in front, or `augment`
            makes them.
        augment: returns a random version of an item of the data set, K of which the
            loader stacks: tensors of its batches are `[B, K, ...]`. Python's, numpy's
            and torch's generators are seeded from key, step and sample, so that a
            step that is repeated after `load_state_dict` is the same release.
        check_collate: check once, on some of the first 64 samples, whether a loss
            changes if `collate_fn` pads a sample to the length of another one.

    Attributes:
        plan: the numbers that sampling, noise and accounting share.
        loader: the batches, see `PoissonLoader`.

    Raises:
        ValueError: the plan or the budget does not fit; an option chooses samples.
        TypeError: the data set has no length, the module cannot be functional, or an
            option is none of a `DataLoader`.

    Reference: Abadi et al., arXiv 1607.00133.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> data = TensorDataset(torch.randn(100, 4), torch.randint(2, (100,)))
        >>> criterion = torch.nn.functional.cross_entropy
        >>> budget = {"epsilon": 3.0, "delta": 1e-3, "epochs": 2, "batch_size": 20}
        >>> private = PrivateGradients(model, criterion, data, **budget, max_norm=1.0)
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
        max_norm: float | QuantileClip | GroupClip | None = None,
        physical_batch_size: int | None = None,
        units: Any = None,
        samples_per_unit: int | None = None,
        augmentations: int | None = None,
        augment: Augment | None = None,
        strategy: Strategy = "auto",
        chunk_size: ChunkSize = None,
        randomness: Randomness = "different",
        verify: bool = True,
        check_collate: bool = True,
        key: Tensor | None = None,
        **loading: Any,
    ) -> None:
        check_criterion("PrivateGradients", criterion)
        check_options(loading)
        budget = {"epsilon": epsilon, "delta": delta, "epochs": epochs}
        budget |= {"batch_size": batch_size, "max_norm": max_norm}
        budget |= {"samples_per_unit": samples_per_unit}
        units = None if units is None else Units.of(units)
        self.plan = _planned(plan, budget, dataset, units)
        units_of("PrivateGradients(units)", self.plan, units)
        key = secret_key() if key is None else key
        check_key("PrivateGradients", key)
        if augmentations is not None:
            checks.integers("PrivateGradients", minimum=1, augmentations=augmentations)
        loader_copies = None if augment is None else augmentations or 1
        self._count = self.plan.samples_per_unit
        shape = tuple(filter(None, (self._count, loader_copies)))
        items = Grouped(dataset, augment, shape) if shape else dataset
        run = self.plan, key, physical_batch_size, units
        self._run = Run(*run, seeded=loader_copies is not None)
        self.loader = PoissonLoader(self._run, items, loading)
        collate_fn = loading.get("collate_fn")
        self._padding = _find_padding(items, collate_fn) if check_collate else None
        self._dataset_copies = augmentations if loader_copies is None else None
        with RNG_LOCK:
            self._live = LiveModule(model)
        self._guard = GradGuard(self._live, self._run)
        self._criterion, self._copies = criterion, loader_copies or augmentations
        self._options: Any = {"strategy": strategy, "chunk_size": chunk_size}
        self._options |= {"randomness": randomness, "verify": verify}
        self._function = self._live.function
        self._source = PrivateSource(plan=self.plan, transform=self._clip())
        self._sums: Any = None  # of a part of a logical batch
        self._keyed = True  # whether its random numbers follow from keys of samples
        self._history: Tree = ()  # of the noise
        self._max_norm: Tree = ()  # of the next step, where it adapts
        self._route = 0  # of all steps, once it is known

    def __repr__(self) -> str:
        kind, plan = type(self.model).__name__, self.plan
        return f"<PrivateGradients({kind}), step {self.step} of {plan.steps}, {plan!r}>"

    @property
    def model(self) -> nn.Module:
        """The module that is trained."""
        return self._live.model

    @property
    def key(self) -> Tensor:
        """The secret key, uint8 `[32]`."""
        return self._run.key

    @property
    def step(self) -> int:
        """The number of logical batches that were released."""
        return self._run.step

    @property
    def max_norm(self) -> Tensor | None:
        """The bound of the next step where the plan's adapts, float64 `[]`."""
        arguments = self._max_norm, self._live.parameters, self.step, self._route
        return self._source.at(*arguments).options.max_norm

    @property
    def plan_digest(self) -> Tensor:
        """The digest of the plan of the steps so far, zeros before the first one."""
        return self.plan.digest_at(self.step)

    @property
    def ready(self) -> bool:
        """Whether `.grad` holds the gradients of a whole logical batch.

        Until then it is None. Step a scheduler that counts steps only if `ready`.
        """
        return bool(self._guard.released)

    def backward(self, *batch: Tree) -> dict[str, Tensor]:
        """Add up clipped gradients of a batch; release the sum of a logical batch.

        With the last physical batch of a logical one the sum gets its noise and is
        written into `.grad`, in the dtype of each parameter. Frozen parameters keep
        `.grad` None. The batch may have been changed sample by sample, or moved to the
        module's device.

        Only `.grad` is private. The returned metrics are for your own logs: `loss`
        (mean over this batch, NaN if it is empty), `samples`, `clipped` and
        `nonfinite`, without noise.

        Raises:
            RuntimeError: the batch is not the loader's or was used before, `.grad` was
                written by other code, the module is another one, its losses depend on
                padding, or there are several processes. Such a call has released
                nothing and can be repeated.
            ValueError: the batch has another number of samples than the loader yielded.
        """
        pending = self._pending(batch)
        with RNG_LOCK:  # calls on one module from several threads take turns
            function = self._live.follow(within=pending.number > 0)
            if function is not self._function:
                self._source = replace(self._source, transform=self._clip())
                self._function = function
            self._guard.check(first=pending.number == 0)
            if self._padding is not None and pending.rows:
                loaded = pending.loaded
                collated = [_arguments(x, loaded, batch) for x in self._padding]
                options = self._criterion, self._dataset_copies
                _check_padding(self.model, *options, *collated)
                self._padding = None
            params, buffers = self._live.values()
            with torch.no_grad(), kept_random_state(params.values()):
                batch = self._with_mask(pending, batch)
                place = self._max_norm, params, self.step, self._route
                clipped = self._source.at(*place)
                start = len(self._sums.losses) if pending.number else 0
                places = range(start, start + len(pending.rows))
                arguments: Any = clipped, places, self.key, self.step
                run = partial(self._source.computed, *arguments)
                result, keyed = self._live.run(run, params, buffers, *batch)
                self._route = route_of(clipped)
                arguments = advanced, clipped.options, params, buffers, batch
                written = self._live.run(*arguments) if pending.last else {}
        self._keyed = keyed and (self._keyed or not pending.number)
        sums, noisy, next_state = result, None, ()
        if pending.number:
            sums = _joined(self._sums, result)
        elif not pending.last:
            sums = result._replace(grads=map_values(Tensor.double, result.grads))
        if pending.last:
            total = map_values(lambda x, y: x.to(y.dtype), sums.grads, result.grads)
            arguments = clipped, sums._replace(grads=total), params, self._history
            place: Any = {"key": self.key, "step": self.step, "keyed": self._keyed}
            release = self._source.released(*arguments, **place)
            noisy, history = release.privatized()
            next_state = history, release.max_norm
        self._commit(pending, sums, noisy, next_state)
        for name, value in written.items():
            if value is not buffers[name]:  # which has the memory of the module's own
                buffers[name].copy_(value)
        return metrics_of(result)

    def watch(self, optimizer: Optimizer, *, earlier_steps: int = 0) -> Optimizer:
        """Check each step of an optimizer of torch, and return it.

        Its steps raise unless `.grad` is as `backward` wrote it and has not been used:
        plain, accumulated, clipped or scaled gradients and second steps are detected.
        So are steps of a resumed optimizer that `epsilon()` does not count, by its own
        count or momentum (SGD may have neither); `earlier_steps` saw public data only.

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
        counts = {"earlier_steps": earlier_steps}
        [earlier] = checks.integers("PrivateGradients.watch", minimum=0, **counts)
        self._guard.watch(inside, earlier)
        return optimizer

    def epsilon(self) -> float:
        """Return the epsilon spent so far, at the plan's `delta`."""
        return self.plan.epsilon(self.step)

    def audit(
        self,
        *,
        canaries: int,
        guesses: tuple[int, int] | None = None,
        significance: float = 0.05,
        seed: int | None = None,
    ) -> Audit:
        """Bound from below how much a release spends, as `Plan.audit` does for a step.

        It calls `backward` on a copy of this object and of the module, without data,
        and goes through `state_dict` and `load_state_dict` before the second release.
        Nothing changes.

        Raises:
            ValueError: as `Plan.audit`.

        Example:
            >>> from torch.utils.data import TensorDataset
            >>> module = torch.nn.Linear(50, 10)
            >>> data = TensorDataset(torch.ones(200, 50))
            >>> run = {"epsilon": 3.0, "delta": 1e-3, "epochs": 2, "batch_size": 20}
            >>> private = PrivateGradients(
            ...     module, lambda output: output.sum(), data, max_norm=1.0, **run
            ... )
            >>> private.audit(canaries=200, significance=1e-6).exceeded
            False
        """
        settings: Any = {"canaries": canaries, "guesses": guesses}
        settings |= {"significance": significance, "key": secret_key(seed=seed)}
        options, (params, _) = self._source.transform.options, self._live.values()
        run = self._noisy_gradients, options, params
        return self.plan.audit_of("PrivateGradients.audit", *run, **settings)

    def _noisy_gradients(
        self, loss: LossFn, key: Tensor, batches: Sequence[tuple], chunk_size: Any
    ) -> list[tuple[Params, Tensor | None]]:
        """Release batches by a copy, as `canaries.noisy_gradients`."""
        private, plan = copy.copy(self), self.plan
        with RNG_LOCK:
            private._live = LiveModule(copy.deepcopy(self.model))
        private._guard = GradGuard(private._live, self._run)
        private._function = private._live.function
        clipped = self._source.transform.with_loss(loss, chunk_size)
        private._source = PrivateSource(plan=plan, transform=clipped)
        private._run, private._padding = copy.copy(self._run), None
        private._count = None  # a canary stands for a unit
        private.loader = cast(Any, SimpleNamespace(pending=None, restart=lambda: None))
        before = plan if plan.before is None else plan.before
        state = {"key": key, "step": plan.earlier_steps, "route": 0}
        private.load_state_dict({**state, "plan": asdict(before)})
        releases = []
        for number, batch in enumerate(batches, start=1):
            if number == len(batches):
                file = io.BytesIO()
                torch.save(private.state_dict(), file)
                file.seek(0)
                private.load_state_dict(torch.load(file, weights_only=True))
            bound, size = private.max_norm, len(batch[0])
            private._live.model.zero_grad()
            rows = torch.arange(size).split(self._run._size or max(1, size))
            for part, indices in enumerate(rows, start=1):
                last = part == len(rows)
                private.loader.pending = PhysicalBatch(part - 1, last, indices.tolist())
                private.backward(*(x[indices] for x in batch))
            live = private._live.parameters.items()
            grads = {n: x.grad for n, x in live if x.grad is not None}
            releases.append((grads, bound))
        return releases

    def state_dict(self) -> dict[str, Any]:
        """Return key, step, plan and route, from which a run can be resumed.

        Noise that is correlated over steps has its history too, and a bound that adapts
        is there. It is as secret as the data: noise can be removed with the key. Save
        it between logical batches, together with the module and the optimizer.
        """
        plan, noise = asdict(self.plan), dict[str, Any]()
        if self._history:
            buffers = [*map(dict, self._history.buffers)]  # a list of dictionaries
            noise["noise"] = {**self._history._asdict(), "buffers": buffers}
        if isinstance(self._max_norm, Tensor):
            noise["max_norm"] = self._max_norm.clone()
        place = {"key": self.key.clone(), "step": self.step, "route": self._route}
        return {**place, "plan": plan, **noise}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the result of `state_dict`: the same batches and the same noise.

        The rest of the epoch is the next pass. Steps that the lost run took after it
        was saved are the same releases on machines of one type. If anything else
        differs (data, criterion, learning rate, random augmentations), one of the two
        runs needs a new key: `state["key"] = vgrad.dp.secret_key()`. Where noise is
        correlated over steps, it needs a plan made by `Plan.after` as well.

        Raises:
            ValueError: the state is not complete, or of a run with another plan. Plans
                with more steps, or made by `Plan.after`, may continue it.
        """
        function = "PrivateGradients.load_state_dict(state)"
        if {"key", "step", "plan", "route"} != set(state) - {"noise", "max_norm"}:
            raise ValueError(
                f"{function}: expected 'key', 'step', 'plan' and 'route', as "
                f"state_dict() returns them, got {checks.listed(state) or 'nothing'}. "
                f"The state of a module is for model.load_state_dict."
            )
        check_key(function, state["key"])
        [step] = checks.integers(function, minimum=0, step=state["step"])
        checks.choice(function, range(len(_ROUTES)), route=state["route"])
        history: Tree = ()
        try:
            saved = Plan(**state["plan"])
            if "noise" in state and self.plan.noise.correlated:  # not of a plan before
                history = NoiseHistory(**state["noise"])
        except TypeError as error:
            raise ValueError(
                f"{function}: expected the plan of a run in 'plan', and its history "
                f"in 'noise', got others ({error})."
            ) from error
        try:
            check_spent(function, self.plan, saved.digest_at(step), step)
        except ValueError as error:
            raise ValueError(f"{error} state['plan'] is {saved}.") from error
        if step > self.plan.steps:
            raise ValueError(
                f"{function}: expected at most the {self.plan.steps} steps of the "
                f"plan, got {step}."
            )
        max_norm: Any = state.get("max_norm", ())
        if step < self.plan.steps:
            place: Any = max_norm, self._live.parameters, step, state["route"]
            clipped = self._source.at(*place)
            max_norm = clipped.options.max_norm
            place = {"key": state["key"], "step": step, "max_norm": max_norm}
            arguments = clipped.sensitivity, Streams()
            noise: Any = self.plan.step_noise(*arguments, **place, history=history)
            history = noise.history if self.plan.noise.correlated else ()
        self._run.key, self._history = state["key"].cpu().clone(), history
        self._max_norm = () if max_norm is None else max_norm
        self._route = state["route"]
        self._run.step, self._run.process = step, os.getpid()
        self.loader.restart()
        self._guard.reset()

    def _with_mask(self, pending: PhysicalBatch, batch: tuple) -> tuple:
        """Add the mask of the samples of units; refuse units that are not whole."""
        count = self._count
        if count is None:
            return batch
        mask = present([len(unit.rows) for unit in pending.rows], count)
        first, *_ = batches.read("PrivateGradients", batch).tensors
        batch = *batch, mask.to(first.device)
        check_units("PrivateGradients.backward", batch, count)
        return batch

    def _clip(self) -> ClippedGradFn:
        copies = {"augmentations": self._copies}
        loss = sample_loss(self._live.function, self._criterion, **copies)
        loss = loss if self._run.units is None else UnitLoss(loss)
        function = "PrivateGradients.backward"
        return clipped_sums(function, loss, self.plan, **self._options)

    def _pending(self, batch: tuple) -> PhysicalBatch:
        function, pending = "PrivateGradients.backward(*batch)", self.loader.pending
        if pending is None:
            raise RuntimeError(
                f"{function}: expected the batch that .loader has just given, got one "
                f"that is not from it, or the same one again. Call it once for each "
                f"batch of `for ... in private.loader`."
            )
        size = batches.read("PrivateGradients.backward", batch).size
        if size != len(pending.rows):
            raise ValueError(
                f"{function}: expected the {len(pending.rows)} samples of .loader, got "
                f"{size}. The guarantee needs all: neither drop samples nor add any."
            )
        if self._run.process != os.getpid():
            raise RuntimeError(
                f"{function}: expected the process that made it, got a fork of that, "
                f"whose equal noise would reveal the data. Make it after the fork."
            )
        grouped = distributed.is_available() and distributed.is_initialized()
        if grouped and (count := distributed.get_world_size()) > 1:
            raise RuntimeError(
                f"{function}: expected one process, got {count}, which would draw "
                f"their own batches and noise. Use vgrad.distributed with private_step."
            )
        return pending

    def _commit(
        self,
        batch: PhysicalBatch,
        sums: ClippedGrad,
        noisy: Params | None,
        next_state: tuple[Tree, ...],
    ) -> None:
        # All or, on error, nothing.
        grads = [(x, x.grad) for x in self._live.parameters.values()]
        changed = self, self._run, self.loader, self._guard
        before = [vars(part).copy() for part in changed]
        try:
            self.loader.pending = None  # the batch is not used twice
            self._sums = sums
            if batch.number == 0:
                self._guard.begin()
            if noisy is not None:
                self._sums, self._run.step = None, self.step + 1
                self._history, self._max_norm = next_state
                write_grads_(self._live.model, noisy)
                self._guard.release()
        except BaseException:
            for part, attributes in zip(changed, before, strict=True):
                vars(part).update(attributes)
            for parameter, grad in grads:
                parameter.grad = grad
            raise


def _joined(one: ClippedGrad, other: ClippedGrad) -> ClippedGrad:
    """Join the sums of two parts of a logical batch."""
    grads = map_values(torch.add, one.grads, other.grads)
    norms, losses = (torch.cat(pair) for pair in zip(one[1:3], other[1:3], strict=True))
    counts = one.clipped + other.clipped, one.nonfinite + other.nonfinite
    return ClippedGrad(grads, norms, losses, *counts)


def _planned(
    plan: Plan | None, budget: dict[str, Any], dataset: Any, units: Units | None
) -> Plan:
    sized = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if isinstance(dataset, IterableDataset) or not sized:
        raise TypeError(
            f"PrivateGradients(dataset): expected a data set with a length and a "
            f"sample for each index, got a {type(dataset).__name__}. Of a DataLoader "
            f"pass its `.dataset`; make a list of a stream."
        )
    if not isinstance(plan, Plan | None):
        kind = type(plan).__name__
        raise TypeError(f"PrivateGradients(plan): expected a Plan, got a {kind}.")
    if units is not None and units.size != len(dataset):
        raise ValueError(
            f"PrivateGradients(units): expected an id for each of the {len(dataset)} "
            f"samples of the data set, got {units.size}."
        )
    size = len(dataset) if units is None else len(units)
    needed = [name for name in budget if name != "samples_per_unit"]
    missing = [name for name in needed if budget[name] is None]
    if plan is None and not missing:
        if units is not None and units.several_owners:
            budget = {**budget, "neighbours": "fixed_graph"}
        return Plan.for_epsilon(dataset_size=size, **budget)
    if plan is None or any(value is not None for value in budget.values()):
        got = "both" if plan is not None else f"no {', '.join(missing)}"
        raise ValueError(
            f"PrivateGradients: expected {', '.join(needed)}, or a plan in their "
            f"place, got {got}."
        )
    if plan.samples_per_unit is None and units is None and size != plan.dataset_size:
        raise ValueError(
            f"PrivateGradients(plan): expected a plan for the {size} samples "
            f"of the data set, got one for {plan.dataset_size}."
        )
    return plan


class LiveModule:
    """A module that an optimizer changes in place, as a function of its values."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._read()
        self._identity = _identity(model)

    def follow(self, *, within: bool) -> LiveModel:
        """Return the module as a function; `within` a logical batch it is the same."""
        if self.function.is_current():
            return self.function
        if _identity(self.model) != self._identity:
            raise RuntimeError(
                f"PrivateGradients({type(self.model).__name__}): expected the modules "
                f"and parameters that it had at first, got others, which are in no "
                f"optimizer. Build the model before PrivateGradients."
            )
        if within and _settings(self.model) != self._settings:
            raise RuntimeError(
                "PrivateGradients.backward(*batch): expected one module for a logical "
                "batch, got one that was moved, switched or frozen in between. Do that "
                "between logical batches."
            )
        self._read()
        return self.function

    def values(self) -> tuple[Params, Buffers]:
        """Return trained tensors and other tensors, detached and not copied."""
        tensors = self.function.values.items()
        params = {name: x.detach() for name, x in tensors if x.requires_grad}
        buffers = {name: x.detach() for name, x in tensors if not x.requires_grad}
        return params, buffers

    def run(self, function: Callable, *args: Any) -> Any:
        """Call a function that runs the module, and restore the module."""
        try:
            return function(*args)
        finally:
            try:
                self.function.restore()
            except BaseException:  # an interrupt
                self.function.restore()
                raise

    def _read(self) -> None:
        function = LiveModel("PrivateGradients", self.model)
        self.parameters = dict(self.model.named_parameters())
        if not any(x.requires_grad for x in self.parameters.values()):
            raise ValueError(
                f"PrivateGradients({type(self.model).__name__}): expected a parameter "
                f"that requires grad, got none."
            )
        self.function = function
        self._settings = _settings(self.model)


def _identity(model: nn.Module) -> list[tuple[str, int]]:
    named = [*model.named_modules(), *model.named_parameters(remove_duplicate=False)]
    return [(name, id(value)) for name, value in named]


def _settings(model: nn.Module) -> list[Any]:
    modes = [module.training for module in model.modules()]
    return modes + [(x.dtype, x.device, x.requires_grad) for x in model.parameters()]


class GradGuard:
    """Keeps optimizers from steps on gradients that are not private, by checksums."""

    def __init__(self, live: LiveModule, run: Run) -> None:
        self._live, self._run = live, run
        self._earlier: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self.reset()

    def reset(self) -> None:
        """Start as before the first release."""
        self.released: dict[str, tuple[Any, Any]] = {}
        self._stepped: list[Optimizer] = []
        self._partial = False

    def check(self, *, first: bool) -> None:
        """Refuse gradients of other code, and unused ones before a logical batch."""
        for name, parameter in self._live.parameters.items():
            grad = parameter.grad
            if grad is not None and grad is not self.released.get(name, (None,))[0]:
                raise RuntimeError(
                    f"PrivateGradients.backward(*batch): expected no gradient that it "
                    f"did not write, got one in {name!r}. Remove loss.backward(), and "
                    f"clear its gradients with model.zero_grad()."
                )
        if first and self.released and self._earlier and not self._stepped:
            raise RuntimeError(
                "PrivateGradients.backward(*batch): expected optimizer.step() after "
                "the last logical batch, got another batch. Switch gradient "
                "accumulation off, and pass physical_batch_size or chunk_size."
            )

    def begin(self) -> None:
        """Clear the gradients of the last logical batch."""
        for parameter in self._live.parameters.values():
            parameter.grad = None
        self.reset()
        self._partial = True

    def release(self) -> None:
        """Record the gradients that have just been written."""
        grads = {name: x.grad for name, x in self._live.parameters.items()}
        written = {name: grad for name, grad in grads.items() if grad is not None}
        self.released = {name: (grad, _bits(grad)) for name, grad in written.items()}
        self._partial = False

    def watch(self, optimizer: Optimizer, earlier: int) -> None:
        """Check the gradients before each step of an optimizer."""
        if optimizer in self._earlier:
            self._earlier[optimizer] = earlier
            return
        if _trained(optimizer).isdisjoint(map(id, self._live.parameters.values())):
            raise ValueError(
                "PrivateGradients.watch(optimizer): expected one of the module's own "
                "parameters, got one of others, which it would train without privacy."
            )
        self._earlier[optimizer] = earlier

        def before(optimizer: Optimizer, args: tuple, kwargs: dict) -> Any:
            closure = kwargs.get("closure") or (args[1:] or (None,))[0]
            if closure is None:
                return self._check(optimizer)

            def checked() -> Any:
                value = closure()  # which may write gradients
                self._check(optimizer)
                return value

            return args[:1], {**kwargs, "closure": checked}

        def after(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
            if not self._partial:
                self._stepped.append(optimizer)

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

    def _check(self, optimizer: Optimizer) -> None:
        fresh = self.released and optimizer not in self._stepped
        if not fresh and not self._partial:
            raise RuntimeError(
                "optimizer.step(): expected PrivateGradients.backward(*batch) before "
                "each step, got a step without."
            )
        # Here and not in `watch`, after which trainers restore an optimizer.
        counted = self._run.step - bool(self.released)
        entries = [*optimizer.state.values()]
        counts = [x.get("step") for x in (*entries, *optimizer.param_groups)]
        counts = [float(count) for count in counts if count is not None]
        moved = any(
            bool(x.any()) for x in tree_leaves(entries) if isinstance(x, Tensor)
        )
        steps = int(max(counts, default=moved))
        if steps > (limit := counted + self._earlier[optimizer]):
            raise RuntimeError(
                f"optimizer.step(): expected an optimizer of at most {limit} steps, as "
                f"PrivateGradients counts, got one of at least {steps}, which "
                f"epsilon() would leave out. Resume with load_state_dict(state) of "
                f"PrivateGradients, too. For steps on public data alone pass "
                f"watch(optimizer, earlier_steps={steps - counted})."
            )
        trained = _trained(optimizer)
        # A scaler leaves here the divisor of a fused optimizer.
        scaled = getattr(optimizer, "grad_scale", None) is not None
        for name, parameter in self._live.parameters.items():
            if id(parameter) not in trained:
                continue
            grad = parameter.grad
            released, bits = self.released.get(name, (None, None))
            # Version counters are no help: trainers that log norms multiply by one,
            # and torch does not count the writes of a loss scaler.
            same = grad is released and (grad is None or _bits(grad).equal(bits))
            if scaled or not same:
                raise RuntimeError(
                    f"optimizer.step(): expected the gradients as PrivateGradients "
                    f"wrote them, got another one for {name!r}. Remove "
                    f"loss.backward(), call zero_grad() before backward(*batch) and "
                    f"not after it, and switch off gradient clipping and loss scaling."
                )


def _trained(optimizer: Optimizer) -> set[int]:
    return {id(x) for group in optimizer.param_groups for x in group["params"]}


def _bits(grad: Tensor) -> Tensor:
    # The sum of all bits, 64 at a time: almost any change shows.
    raw = grad.contiguous().view(-1).view(torch.uint8)
    words = len(raw) // 8 * 8
    return raw[:words].view(torch.int64).sum() + raw[words:].sum()


def _find_padding(dataset: Any, collate_fn: Any) -> tuple[Tree, Tree, Tree] | None:
    """Collate a short sample, a long one, and both; None if that changes no shape."""
    if collate_fn in (None, default_collate):
        return None

    def collated(*rows: int) -> Tree:
        return collate_fn([copy.deepcopy(samples[row]) for row in rows])

    def shapes(batch: Tree) -> list[torch.Size]:
        return [leaf.shape[1:] for leaf in tree_leaves(batch)]

    def size(row: int) -> tuple[int, list[torch.Size]]:
        single = shapes(collated(row))
        return sum(map(torch.Size.numel, single)), single

    with seeded(0):
        samples = [dataset[row] for row in range(min(_PADDING_SAMPLES, len(dataset)))]
        short, *_, long = sorted([0, *range(len(samples))], key=size)
        examples = collated(short), collated(long), collated(short, long)
        redrawn = collated(short, long)  # with other random numbers
    if shapes(examples[0]) == shapes(examples[2]):
        return None
    if not all(map(checks.same_values, tree_leaves(redrawn), tree_leaves(examples[2]))):
        _warn_of_padding("collate_fn draws random numbers")
        return None
    return examples


def _check_padding(
    model, criterion, copies: int | None, short: Tree, long: Tree, pair: Tree
) -> None:
    # Clipping bounds the gradient of one sample. If the model sees the padding to the
    # longest sample, one sample changes the gradients of the others.
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        live = LiveModule(model)
        loss = sample_loss(live.function, criterion, augmentations=copies)
        params, buffers = live.values()

        def losses(*collated: Tree) -> Tensor:
            read = [batches.read("PrivateGradients(collate_fn)", x) for x in collated]
            samples = [x.sample(x.one(row)) for x in read for row in range(x.size)]
            values = [live.run(loss, params, buffers, *sample) for sample in samples]
            # In order of size: a collate function may sort its samples.
            return torch.stack(values).sort().values

        with torch.no_grad(), seeded(0, params.values()):
            separate, paired, repeated = losses(short, long), losses(pair), losses(pair)
        if not checks.same_values(paired, repeated):
            _warn_of_padding("the loss draws random numbers in evaluation mode")
            return
    finally:
        for module, training in modes:
            module.training = training
    dtypes = [separate.dtype, *(x.dtype for x in params.values())]
    if torch.is_autocast_enabled(separate.device.type):
        dtypes.append(torch.get_autocast_dtype(separate.device.type))
    rounding = max(torch.finfo(dtype).eps for dtype in dtypes) ** 0.5
    options = {"rtol": rounding, "atol": rounding, "equal_nan": True}
    if not torch.allclose(separate, paired, **options):
        raise RuntimeError(
            "PrivateGradients(collate_fn): expected a loss of each sample that does "
            "not depend on the other samples, got one that changes with the padding to "
            "a longer sample. Pad to a fixed length, or use a mask of the padding in "
            "the model. check_collate=False skips this comparison."
        )


def _arguments(collated: Tree, loaded: Tree, batch: Tree) -> Tree:
    """Make arguments of a collated batch as the loop made its own of the loader's."""
    leaves, spec = tree_flatten(batch)
    sources, tensors = tree_leaves(loaded), tree_leaves(collated)
    places = [*range(len(sources))]
    for number, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            continue
        place = next((n for n in places if _is_moved(leaf, sources[n])), None)
        if place is None or len(tensors) != len(sources):
            raise RuntimeError(
                "PrivateGradients.backward(*batch): expected the tensors of the "
                "loader's batch, got others made of them, whose padding cannot be "
                "checked. If the model masks it, pass check_collate=False."
            )
        places.sort(key=place.__eq__)  # one tensor may be passed twice
        leaves[number] = tensors[place].to(leaf)
    return tree_unflatten(leaves, spec)


def _is_moved(tensor: Tensor, other: Any) -> bool:
    # On some device and in some dtype.
    same = isinstance(other, Tensor) and tensor.shape == other.shape
    return tensor is other or (same and torch.equal(tensor, other.to(tensor)))


def _warn_of_padding(reason: str) -> None:
    warnings.warn(
        f"PrivateGradients(collate_fn): expected losses that do not depend on padding, "
        f"which could not be checked, since {reason}. Mask the padding in the model, "
        f"then pass check_collate=False.",
        stacklevel=4,
    )
