"""Canaries for audits: samples of linear losses, in the steps of a plan.

The loss of a canary is the inner product of the parameters and a direction, its
gradient. It goes through all that a step does to gradients, and needs no data.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vgrad import batches, checks
from vgrad.dp.audit import FEW, Audit, check_numbers, epsilon_of, gaussian, one_run
from vgrad.dp.mechanisms import Mechanism
from vgrad.dp.noise import Streams
from vgrad.generators import block, fold_in, stream
from vgrad.optim.base import GradientTransformation
from vgrad.optim.private import unscaled, uses_of_noise
from vgrad.torch_private import shards
from vgrad.tree import map_tensors, map_values
from vgrad.typing import ChunkSize, LossFn, Params, Scales

_NORMS = 1.0, 10.0, 1e4
"""Norms of canaries' gradients before they are clipped, in bounds of the clip."""

_ROUND = 256
"""Canaries in the two steps of a round at least, where the data set has as many."""

_AT_A_TIME = 2**24
"""Numbers of the directions that are held at once."""

Release = Callable[[LossFn, Tensor, list[tuple], Any], list[tuple[Params, Any]]]
"""Takes a loss, a key, batches and a chunk size; releases the batches in the first
steps, and returns noisy gradients and bounds of the clip that adapt. The state is saved
and loaded before the last step."""


def audit(
    function: str,
    mechanism: Mechanism,
    release: Release,
    options: Any,
    params: Params,
    batch: tuple | None = None,
    *,
    scales: Scales,
    densities: Mapping[str, float],
    bound: float,
    delta: float,
    key: Tensor,
    canaries: int,
    guesses: tuple[int, int] | None,
    significance: float,
) -> Audit:
    """Audit the releases of a mechanism, whose clipped sum has options.

    `bound` is the bound of gradients that are multiplied by `scales`, where it does not
    adapt; the rest is as in `Plan.audit`.
    """
    if mechanism.noise_multiplier == 0 or mechanism.steps < 2:
        raise ValueError(
            f"{function}: expected a plan with noise and two steps at least, got a "
            f"noise_multiplier of {mechanism.noise_multiplier} and {mechanism.steps} "
            f"steps."
        )
    signs, weights, mu = signal(mechanism)
    if batch and abs(weights.sum()) > 1e-9:
        raise ValueError(
            f"{function}(batch): expected independent noise, with which samples that "
            f"are in all steps cancel, got {mechanism.noise.scheme!r}. Leave batch out."
        )
    [count] = checks.integers(function, minimum=4 * FEW, canaries=canaries)
    significance, _ = check_numbers(function, significance)
    samples = Canaries(params, count, key, scales, densities)
    loss = samples.loss(options.loss if batch else None, has_aux=options.has_aux)
    entries = sum(value.numel() for value in params.values())
    chunk: Any = options.chunk_size or mechanism.dataset_size
    if chunk != "auto":
        chunk = max(1, min(chunk, _AT_A_TIME // entries))
    real = batches.read(function, batch).size if batch else 0
    expected = mechanism.expected_batch_size
    size = max(2 * round(expected), _ROUND)
    size = min(size, mechanism.largest_batch or mechanism.dataset_size) - real
    # Directions of more than half as many are not orthogonal enough.
    size = max(1, min(size, entries // 2))
    score = torch.zeros(count, dtype=torch.float64)
    for rows in torch.arange(count).split(size):
        inside = rows[samples.coins[rows]]
        inputs = [
            samples.batch(inside if sign else rows[:0], sign * bound, batch)
            for sign in signs
        ]
        releases = release(loss, fold_in(key, "noise", int(rows[0])), inputs, chunk)
        for weight, (grads, adapted) in zip(weights, releases, strict=True):
            norm = bound if adapted is None else float(adapted)
            score[rows] += weight / norm * samples.scores(rows, grads)
    score *= expected
    sides = score[samples.coins], score[~samples.coins]
    bounds = {}
    for name, group in samples.groups.items():
        parts = score[group & samples.coins], score[group & ~samples.coins]
        if min(map(len, parts)) >= FEW:
            share = significance / (4 if name == "all" else 4 * len(samples.groups) - 4)
            bounds[name] = gaussian(*parts, significance=share)
    guesses = guesses or (count // 8, count // 8)
    delta = min(delta, 0.01 / count)
    half = {"delta": delta, "significance": significance / 2}
    return Audit(
        mu=max(bounds.values(), key=lambda bound: bound.value),
        epsilon=one_run(*sides, guesses=guesses, **half),
        claimed_mu=mu,
        claimed_epsilon=epsilon_of(mu, delta),
        groups=bounds,
        significance=significance,
        included=sides[0],
        excluded=sides[1],
        private=batch is not None,
    )


def signal(mechanism: Mechanism) -> tuple[np.ndarray, np.ndarray, float]:
    """Return signs of a canary in the steps of a round, their weights, and mu.

    Plus in the first step and minus in the last one, s, with steps in between through
    which the noise is correlated. Multiplied by C, the gradients are C s with a noise
    of one deviation, and their best test is the product with C s.
    """
    last = min(mechanism.noise.size, mechanism.steps - 1)
    column = mechanism.fitted.column(last + 1)
    unit = mechanism.noise_multiplier * mechanism.sensitivity
    rows = np.arange(last + 1)
    matrix = np.where(rows[:, None] < rows, 0.0, column[rows[:, None] - rows])
    signs = 1.0 * (rows == 0) - (rows == last)
    signal = matrix @ signs
    length = float(np.linalg.norm(signal))
    return signs, matrix.T @ signal / (length * unit), length / unit


def noisy_gradients(
    step: Any,
    state: Any,
    digest: Tensor,
    loss: LossFn,
    key: Tensor,
    batches: Sequence[tuple],
    chunk_size: ChunkSize,
) -> list[tuple[Params, Tensor | None]]:
    """Take the first steps of a private step's plan, on another loss and its key.

    Batches are of all ranks, and `digest` is of the plan at its start. Return noisy
    gradients, and bounds of the clip that adapt. The state is saved and loaded before
    the last step; the one passed stays as it is.
    """
    plan, transform = step.source.plan, step.source.transform
    # A canary stands for a unit. The streams of this step stay as they are.
    changes = {"samples_per_unit": None, "streams": Streams(), "counts": Streams()}
    changes["transform"] = transform.with_loss(loss, chunk_size)
    source = replace(step.source, has_aux=False, **changes)
    step = replace(step, source=source, tx=_RECORDER, has_aux=False)
    step = replace(step, reduce=step.reduce.of(step), execute=copy(step.execute))
    state = state._replace(
        key=key,
        step=torch.full_like(state.step, plan.earlier_steps),
        plan_digest=digest.to(state.plan_digest.device),
        route=torch.zeros_like(state.route),
        noise=(),
        max_norm=(),
    )
    # Gradients keep the scales that they have in this state.
    optimizer: Any = {"uses": uses_of_noise(state.optimizer)}
    optimizer["grads"] = map_values(torch.zeros_like, state.params)
    releases, parts = [], [step.reduce.share(batch) for batch in batches]
    for number, batch in enumerate(parts, start=1):
        if number == len(parts):
            state = step.reduce.reloaded(state)
        state = state._replace(optimizer=optimizer)
        place = state.max_norm, state.params, int(state.step), int(state.route)
        clipped = source.at(*place)
        if hasattr(step.execute, "reports"):  # a first call is captured, and not run
            step(state, *batch)
        state, _ = step(state, *batch)
        releases.append((state.optimizer["grads"], clipped.options.max_norm))
    return releases


_RECORDER = GradientTransformation(
    lambda params: {},
    lambda grads, state, params=None: (dict.fromkeys(grads), {**state, "grads": grads}),
)
"""Leaves parameters as they are, and keeps gradients in its state."""


class Block(NamedTuple):
    """Entries of a parameter that follow each other, in one shard."""

    name: str
    start: int
    size: int
    shard: int


class Canaries:
    """m canaries: samples of a linear loss, with a direction and a coin for each.

    A direction is a wave over the entries of each block that it is in; waves of two
    frequencies are orthogonal. Signs, drawn once for all entries, make noise of them.
    It is the direction of a gradient that a step has multiplied by its scales. Without
    `densities` by name, entries of all blocks have the same mean square.
    """

    def __init__(
        self,
        params: Params,
        count: int,
        key: Tensor,
        scales: Scales = MappingProxyType({}),
        densities: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self._blocks = [piece for item in params.items() for piece in _blocks(*item)]
        names, _, sizes, parts = map(np.array, zip(*self._blocks, strict=True))
        draw = block(stream(key, "directions"), 0)
        signs = {}
        for name, value in params.items():
            flips = torch.from_numpy(draw.integers(0, 2, tuple(value.shape)))
            signs[name] = 1 - 2 * flips.float().to(value.device)
        scales = {name: [*map(shards.whole, scale)] for name, scale in scales.items()}
        over_scales = unscaled(signs, scales).items()
        self._signs = {name: value.reshape(-1) for name, value in over_scales}
        # They repeat after all of a block.
        cycles = [draw.choice(n, min(n, count), replace=False) for n in sizes]
        frequencies = np.stack([np.resize(cycle, count) for cycle in cycles], 1)
        self._frequencies = torch.from_numpy(frequencies)  # int64 [m, blocks]
        numbers, ranks = np.arange(count), parts.max() + 1
        kind = numbers // len(_NORMS) % (3 if ranks > 1 else 2)
        owner = draw.choice(len(sizes), count, p=sizes / sizes.sum())
        within = True, names == names[owner, None], parts == parts[owner, None]
        density = np.array([densities.get(name, 1.0) for name in names])
        squares = np.choose(kind[:, None], within) * (sizes * density)
        weights = np.sqrt(squares / squares.sum(1, keepdims=True))
        # Where two canaries have one frequency, their products are zero on average.
        weights *= 1 - 2 * draw.integers(0, 2, weights.shape)
        self._weights = torch.from_numpy(weights)  # [m, blocks], of norm 1
        norms = np.resize(_NORMS, count)
        self.norms = torch.from_numpy(norms)  # of the gradient, in bounds of the clip
        flips = block(stream(key, "coins"), 0).integers(0, 2, count)
        self.coins = torch.from_numpy(flips == 1)  # whether it takes part
        groups = {"all": kind >= 0, "of all parameters": kind == 0}
        groups["of one parameter"] = kind == 1
        for shard in range(ranks if ranks > 1 else 0):
            groups[f"of shard {shard}"] = (kind == 2) & (parts[owner] == shard)
        for norm in _NORMS:
            groups[f"of norm {norm:g} max_norm"] = norms == norm
        self.groups = {name: torch.from_numpy(mask) for name, mask in groups.items()}

    def batch(self, rows: Tensor, norm: float, real: tuple | None) -> tuple:
        """Make canaries whose gradients have multiples of a norm, and real samples."""
        device = next(iter(self._signs.values())).device
        weights = self._weights[rows] * (self.norms[rows] * norm)[:, None]
        waves = self._frequencies[rows].to(device), weights.float().to(device)
        if real is None:
            return waves
        size = batches.read("Plan.audit", real).size

        def before(x: Tensor) -> Tensor:
            return torch.cat([x.new_zeros(size, *x.shape[1:]), x])

        def filled(x: Tensor) -> Tensor:
            return torch.cat([x, x[:1].expand(len(rows), *x.shape[1:])])

        counts = 1 - before(torch.ones(len(rows), device=device))
        return *map(before, waves), counts, *map_tensors(filled, real)

    def loss(self, real: LossFn | None, *, has_aux: bool) -> LossFn:
        """Return the loss of a canary, or of canaries and real samples."""
        blocks, signs = self._blocks, self._signs

        def loss(params, buffers, frequencies, weights, *sample):
            total: Any = 0.0
            if real is not None:
                counts, *sample = sample
                value: Any = real(params, buffers, *sample)
                total = counts * (value[0] if has_aux else value)
            for place, (name, start, size, _) in enumerate(blocks):
                turns = torch.arange(size, device=weights.device) * frequencies[place]
                angles = (turns % size).to(weights.dtype) * (math.tau / size)
                wave = (angles.sin() + angles.cos()) / math.sqrt(size)
                entries = slice(start, start + size)
                direction = wave * weights[place] * signs[name][entries]
                total = total + (direction * params[name].reshape(-1)[entries]).sum()
            return total

        return loss

    def scores(self, rows: Tensor, grads: Params) -> Tensor:
        """Return inner products of directions and gradients, float64 `[rows]`."""
        flat = {
            name: (shards.whole(grad).reshape(-1) / self._signs[name]).cpu().double()
            for name, grad in grads.items()
        }
        total = torch.zeros(len(rows), dtype=torch.float64)
        for place, (name, start, size, _) in enumerate(self._blocks):
            # The products with waves of all frequencies at once.
            waves = torch.fft.fft(flat[name][start : start + size])
            products = (waves.real - waves.imag) / math.sqrt(size)
            total += (
                self._weights[rows, place] * products[self._frequencies[rows, place]]
            )
        return total


def _blocks(name: str, value: Any) -> Iterator[Block]:
    """Cut a parameter as it is cut among ranks, along the first dimension."""
    parts, rows = 1, value.shape[:1].numel()
    if shards.is_distributed(value) and value.placements[0].is_shard():
        parts = value.device_mesh.size()
    width = value.numel() // max(rows, 1)
    for part, chunk in enumerate(torch.arange(rows).chunk(parts)):
        if size := len(chunk) * width:
            yield Block(name, int(chunk[0]) * width, size, part)
