"""Canaries for audits: samples of linear losses, in the steps of a plan.

The loss of a canary is the inner product of the parameters and a direction, its
gradient. It goes through all that a step does to gradients, and needs no data.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from vgrad import batches, checks
from vgrad.dp.audit import FEW, Audit, check_numbers, epsilon_of, gaussian, one_run
from vgrad.dp.plan import Plan, as_digest, spent_under
from vgrad.generators import block, fold_in, secret_key, stream
from vgrad.torch_private import shards
from vgrad.tree import map_tensors
from vgrad.typing import LossFn, Params

_NORMS = 1.0, 10.0, 1e4
"""Norms of canaries' gradients before they are clipped, in bounds of the clip."""

_ROUND = 256
"""Canaries in the two steps of a round at least, where the data set has as many."""

_AT_A_TIME = 2**24
"""Numbers of the directions that are held at once."""


class Audited(Protocol):
    """Releases of a plan that can be had with a loss of one's own."""

    options: Any  # of the clipped sum, its loss among them
    params: Params

    def agreed(self, key: Tensor) -> Tensor:
        """Return one key for all processes."""
        ...

    def noisy_gradients(
        self, loss: LossFn, key: Tensor, batches: Sequence[tuple], chunk_size: Any
    ) -> list[tuple[Params, float]]:
        """Release batches, of all processes; return gradients and bounds of the clip.

        The steps are the plan's first ones; the state is saved and loaded before the
        last one.
        """
        ...


class OfStep:
    """The releases of a private step, from a state that stays as it is."""

    def __init__(self, step: Any, state: Any) -> None:
        self._step, self._state = step, state
        self.options, self.params = step.source.transform.options, state.params
        self.agreed = step.reduce.agreed

    def noisy_gradients(
        self, loss: LossFn, key: Tensor, batches: Sequence[tuple], chunk_size: Any
    ) -> list[tuple[Params, float]]:
        """Release batches, under another key."""
        plan, state = self._step.source.plan, self._state
        digest = as_digest(spent_under(plan, plan.earlier_steps))
        start = {
            "key": key,
            "step": torch.full_like(state.step, plan.earlier_steps),
            "plan_digest": digest.to(state.plan_digest.device),
            "noise": (),
            "max_norm": (),
        }
        fresh = state._replace(**start)
        return self._step.noisy_gradients(loss, fresh, batches, chunk_size=chunk_size)


def audit(
    function: str,
    plan: Plan,
    audited: Audited,
    batch: tuple | None = None,
    *,
    canaries: int,
    guesses: tuple[int, int] | None,
    significance: float,
    seed: int | None,
) -> Audit:
    """Audit the releases of a plan, as `Plan.audit` says."""
    steps = plan.steps - plan.earlier_steps
    if plan.noise_multiplier == 0 or steps < 2:
        raise ValueError(
            f"{function}: expected a plan with noise and two steps at least, got a "
            f"noise_multiplier of {plan.noise_multiplier} and {steps} steps."
        )
    signs, weights, mu = _signal(plan)
    if batch and abs(weights.sum()) > 1e-9:
        raise ValueError(
            f"{function}(batch): expected independent noise, with which samples that "
            f"are in all steps cancel, got {plan.noise.scheme!r}. Leave batch out."
        )
    [count] = checks.whole(function, least=4 * FEW, canaries=canaries)
    significance, _ = check_numbers(function, significance)
    key, options = audited.agreed(secret_key(seed=seed)), audited.options
    made = Canaries.drawn(audited.params, count, key)
    loss = made.loss(options.loss if batch else None, has_aux=options.has_aux)
    chunk: Any = options.chunk_size or plan.dataset_size
    if chunk != "auto":
        entries = sum(value.numel() for value in audited.params.values())
        chunk = max(1, min(chunk, _AT_A_TIME // entries))
    real = batches.read(function, batch).size if batch else 0
    most = max(2 * round(plan.expected_batch_size), _ROUND)
    most = min(most, plan.largest_batch or plan.dataset_size)
    score = torch.zeros(count, dtype=torch.float64)
    for rows in torch.arange(count).split(max(1, most - real)):
        inside = rows[made.coins[rows]]
        given = [
            made.batch(inside if sign else rows[:0], sign * plan.first_max_norm, batch)
            for sign in signs
        ]
        own = fold_in(key, "noise", int(rows[0]))
        found = audited.noisy_gradients(loss, own, given, chunk)
        for weight, (grads, bound) in zip(weights, found, strict=True):
            score[rows] += weight / bound * made.scores(rows, grads)
    score *= plan.expected_batch_size
    sides = score[made.coins], score[~made.coins]
    bounds = {}
    for name, some in made.groups.items():
        parts = score[some & made.coins], score[some & ~made.coins]
        if min(map(len, parts)) >= FEW:
            share = significance / (4 if name == "all" else 4 * len(made.groups) - 4)
            bounds[name] = gaussian(*parts, significance=share)
    guesses = guesses or (count // 8, count // 8)
    delta = min(plan.delta, 0.01 / count)
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


def _signal(plan: Plan) -> tuple[np.ndarray, np.ndarray, float]:
    """Return signs of a canary in the steps of a round, their weights, and mu.

    Plus in the first step and minus in the last one, s, with steps in between through
    which the noise is correlated. Multiplied by C, the gradients are C s with a noise
    of one deviation, and their best test is the product with C s.
    """
    last = min(plan.noise.size, plan.steps - plan.earlier_steps - 1)
    column, unit = np.eye(1, last + 1)[0], plan.noise_multiplier
    if plan.noise.correlated:
        column = plan.fitted.column(last + 1)
        unit *= plan.fitted.sensitivity()
    rows = np.arange(last + 1)
    matrix = np.where(rows[:, None] < rows, 0.0, column[rows[:, None] - rows])
    signs = 1.0 * (rows == 0) - (rows == last)
    signal = matrix @ signs
    length = float(np.linalg.norm(signal))
    return signs, matrix.T @ signal / (length * unit), length / unit


class Block(NamedTuple):
    """Entries of a parameter that follow each other, in one shard."""

    name: str
    size: int
    shard: int


@dataclass(frozen=True)
class Canaries:
    """m canaries: samples of a linear loss, with a direction and a coin for each.

    A direction is a wave over the entries of each block that it is in; waves of two
    frequencies are orthogonal. Signs, drawn once for all entries, make noise of them.
    """

    blocks: list[Block]
    signs: Params
    frequencies: Tensor  # in each block, int64 [m, blocks]
    weights: Tensor  # the norm in each block, [m, blocks]; in all of them 1
    norms: Tensor  # of the gradient, in bounds of the clip, [m]
    coins: Tensor  # whether it takes part, bool [m]
    groups: dict[str, Tensor]  # bool [m]

    def __repr__(self) -> str:
        return f"Canaries of {len(self.coins)} directions"  # coins are secret

    @classmethod
    def drawn(cls, params: Params, count: int, key: Tensor) -> "Canaries":
        """Draw directions, and coins from a key of their own."""
        blocks = [each for item in params.items() for each in _blocks(*item)]
        sizes = np.array([each.size for each in blocks])
        names = np.array([each.name for each in blocks])
        parts = np.array([each.shard for each in blocks])
        draw = block(stream(key, "directions"), 0)
        flips = (draw.integers(0, 2, value.numel()) for value in params.values())
        numbers = np.arange(count)
        # With a stride that has no divisor in common with the size, frequencies repeat
        # after all of them.
        strides = draw.integers(1, sizes + 1, (100, len(blocks)))
        best = np.gcd(strides, sizes).argmin(0)
        strides = strides[best, np.arange(len(blocks))]
        frequencies = draw.integers(sizes) + numbers[:, None] * strides
        kinds = 2 + (parts.max() > 0)  # one shard is all parameters
        kind, norms = numbers // len(_NORMS) % kinds, np.resize(_NORMS, count)
        owner = draw.choice(len(blocks), count, p=sizes / sizes.sum())
        name, part = names[owner][:, None], parts[owner][:, None]
        inside = np.where(kind[:, None] == 1, names == name, parts == part)
        squares = np.where((kind[:, None] == 0) | inside, sizes, 0)
        groups = {"all": kind >= 0, "of all parameters": kind == 0}
        groups["of one parameter"] = kind == 1
        for shard in range(parts.max() + 1 if kinds == 3 else 0):
            groups[f"of shard {shard}"] = (kind == 2) & (parts[owner] == shard)
        for norm in _NORMS:
            groups[f"of norm {norm:g} max_norm"] = norms == norm
        made = {
            "frequencies": frequencies % sizes,
            "weights": np.sqrt(squares / squares.sum(1, keepdims=True)),
            "norms": norms,
            "coins": block(stream(key, "coins"), 0).integers(0, 2, count) == 1,
        }
        return cls(
            blocks=blocks,
            signs={
                name: torch.from_numpy(1 - 2 * each).float().to(value.device)
                for (name, value), each in zip(params.items(), flips, strict=True)
            },
            groups={name: torch.from_numpy(each) for name, each in groups.items()},
            **{name: torch.from_numpy(each) for name, each in made.items()},
        )

    def batch(self, rows: Tensor, norm: float, real: tuple | None) -> tuple:
        """Make canaries whose gradients have multiples of a norm, and real samples."""
        device = next(iter(self.signs.values())).device
        weights = self.weights[rows] * (self.norms[rows] * norm)[:, None]
        made = self.frequencies[rows].to(device), weights.float().to(device)
        if real is None:
            return made
        size = batches.read("Plan.audit", real).size

        def before(x: Tensor) -> Tensor:
            return torch.cat([x.new_zeros(size, *x.shape[1:]), x])

        def filled(x: Tensor) -> Tensor:
            return torch.cat([x, x[:1].expand(len(rows), *x.shape[1:])])

        counts = 1 - before(torch.ones(len(rows), device=device))
        return counts, *map(before, made), *map_tensors(filled, real)

    def loss(self, real: LossFn | None, *, has_aux: bool) -> LossFn:
        """Return the loss of a canary, or of canaries and real samples."""
        blocks, signs = self.blocks, self.signs

        def of_canary(params, buffers, frequencies, weights):
            waves: dict[str, list[Tensor]] = {name: [] for name in params}
            for place, (name, size, _) in enumerate(blocks):
                turns = torch.arange(size, device=weights.device) * frequencies[place]
                angles = (turns % size).to(weights.dtype) * (math.tau / size)
                wave = (angles.sin() + angles.cos()) / math.sqrt(size)
                waves[name].append(wave * weights[place])
            value = 0.0
            for name, param in params.items():
                if not waves[name]:  # it has no entries
                    continue
                direction = torch.cat(waves[name]) * signs[name]
                value = value + (direction.view(param.shape) * param).sum()
            return value

        if real is None:
            return of_canary

        def of_both(params, buffers, counts, frequencies, weights, *sample):
            value: Any = real(params, buffers, *sample)
            value = value[0] if has_aux else value
            return counts * value + of_canary(params, buffers, frequencies, weights)

        return of_both

    def scores(self, rows: Tensor, grads: Params) -> Tensor:
        """Return inner products of directions and gradients, float64 `[rows]`."""
        flat = {}
        for name, value in grads.items():
            whole: Any = value
            whole = whole.full_tensor() if shards.is_distributed(value) else whole
            flat[name] = (whole.reshape(-1) * self.signs[name]).cpu().double()
        total = torch.zeros(len(rows), dtype=torch.float64)
        for place, (name, size, _) in enumerate(self.blocks):
            entries, flat[name] = flat[name][:size], flat[name][size:]
            # The products with waves of all frequencies at once.
            waves = torch.fft.fft(entries)
            products = (waves.real - waves.imag) / math.sqrt(size)
            total += self.weights[rows, place] * products[self.frequencies[rows, place]]
        return total


def _blocks(name: str, value: Tensor) -> list[Block]:
    """Cut a parameter as it is cut among ranks, along the first dimension."""
    parts = 1
    if shards.is_distributed(value):
        cut: Any = value
        parts = cut.device_mesh.size() if cut.placements[0].is_shard() else 1
    rows = len(value) if value.ndim else 1
    lengths = [len(part) for part in torch.empty(rows, device="meta").chunk(parts)]
    sizes = [value.numel() // rows * length for length in lengths] if rows else []
    return [Block(name, size, part) for part, size in enumerate(sizes) if size]
