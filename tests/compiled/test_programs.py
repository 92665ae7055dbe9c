"""Programs whose samples answer differently, with checkpoints and distributions.

Each runs on batches of other answers, and has the gradients of plain autograd in
float64. The table says which are captured, and why the others are not.
"""

import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, distributions
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as with_checkpoints

import vgrad
from tests import losses, oracle
from tests.losses import randn

pytestmark = pytest.mark.compiled
checkpoint = partial(with_checkpoints, use_reentrant=False)

PARAMS = {"w": randn(4, 4), "v": randn(4, 4, seed=1), "s": randn(4, seed=2)}
SIZE = 8


def batch(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return positions [B, 3, 4], a mask [B, 3] and a number [B]."""
    x = randn(SIZE, 3, 4, seed=seed)
    number = torch.arange(SIZE).remainder(3).roll(seed) if seed < 3 else None
    number = torch.randint(3, (SIZE,)) if number is None else number
    return x, torch.arange(3) <= number.unsqueeze(1), number


# Samples that answer differently.


def branch(p: Any, b: Any, x: Tensor, mask: Tensor, number: Tensor) -> Tensor:
    y = x @ p["w"]
    y = y.tanh() if y.sum() > 0 else y @ p["v"]
    return (y * p["s"]).square().sum()


def full_mask(p: Any, b: Any, x: Tensor, mask: Tensor, number: Tensor) -> Tensor:
    scores = (x @ p["w"]) @ (x @ p["v"]).mT
    if not mask.all():
        scores = scores.masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ x * p["s"]).sum().square()


def expert(p: Any, b: Any, x: Tensor, mask: Tensor, number: Tensor) -> Tensor:
    weight = [p["w"], p["v"], p["w"] @ p["v"]][number.item()]
    return ((x @ weight).tanh() * p["s"]).sum()


def early_exit(p: Any, b: Any, x: Tensor, mask: Tensor, number: Tensor) -> Tensor:
    for weight in (p["w"], p["v"], p["w"] + 1):
        x = (x @ weight).tanh()
        if x.mean() > 0.05:
            break
    return (x * p["s"]).sum()


def length(p: Any, b: Any, x: Tensor, mask: Tensor, number: Tensor) -> Tensor:
    return ((x[: int(mask.sum())] @ p["w"]).relu() @ p["s"]).logsumexp(0)


def two_questions(p: Any, b: Any, x: Tensor, mask: Tensor, number: Tensor) -> Tensor:
    y = x @ p["w"]
    if number > 0:
        y = y * (2 if y[0, 0] > 0 else p["s"])
    return (y @ p["v"]).square().sum() + p["s"].sum()


def until(p: Any, b: Any, x: Tensor, mask: Tensor, number: Tensor) -> Tensor:
    y, steps = x, 0
    while bool(y.norm() > 2.0) and steps < 4:
        y, steps = y * 0.5 + (y @ p["w"]).tanh() * 0.1, steps + 1
    return (y * p["s"]).sum() * (steps + 1)


def float_item(p: Any, b: Any, x: Tensor, mask: Tensor, number: Tensor) -> Tensor:
    return (x @ p["w"] * float(number)).sum() + p["s"].sum()


def selection(p: Any, b: Any, x: Tensor, mask: Tensor, number: Tensor) -> Tensor:
    return ((x[mask] @ p["w"]).tanh() * p["s"]).mean()


def in_a_list(p: Any, b: Any, x: Tensor, mask: Tensor, number: Tensor) -> Tensor:
    kept = [x[i] for i, each in enumerate(mask.tolist()) if each]
    return (torch.stack(kept) @ p["w"] * p["s"]).sum()


def drawn_branch(p: Any, b: Any, x: Tensor, mask: Tensor, number: Tensor) -> Tensor:
    return (F.dropout(x @ p["w"] if number > 0 else x, 0.5) * p["s"]).sum()


# Checkpoints.


def block(p: Any, x: Tensor) -> Tensor:
    return (x @ p["w"]).tanh() @ p["v"]


def one_checkpoint(p: Any, b: Any, x: Tensor, mask: Tensor, number: Tensor) -> Tensor:
    return (checkpoint(lambda x: block(p, x), x) * p["s"]).sum().square()


def chain(p: Any, b: Any, x: Tensor, mask: Tensor, number: Tensor) -> Tensor:
    for _ in range(3):
        x = x + checkpoint(lambda x: block(p, x), x).sin()
    return (x * p["s"]).sum()


def no_state(p: Any, b: Any, x: Tensor, mask: Tensor, number: Tensor) -> Tensor:
    y = checkpoint(lambda x: block(p, x), x, preserve_rng_state=False)
    return (y * p["s"]).sum().square()


def nested(p: Any, b: Any, x: Tensor, mask: Tensor, number: Tensor) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        return checkpoint(lambda x: block(p, x), x).tanh() @ p["w"]

    return (checkpoint(inner, x) * p["s"]).sum()


def dropped(p: Any, b: Any, x: Tensor, mask: Tensor, number: Tensor) -> Tensor:
    x = F.dropout(x, 0.2)
    for _ in range(2):
        x = x + checkpoint(lambda x: F.dropout(block(p, x), 0.5), x)
    return (F.dropout(x, 0.2) * p["s"]).sum().square()


def noisy(p: Any, b: Any, x: Tensor, mask: Tensor, number: Tensor) -> Tensor:
    def run(x: Tensor) -> Tensor:
        return (x + torch.randn_like(x)) @ p["w"] * torch.rand(4, dtype=x.dtype)

    return (checkpoint(run, x).tanh() * p["s"]).sum()


def checkpointed_branch(
    p: Any, b: Any, x: Tensor, mask: Tensor, number: Tensor
) -> Tensor:
    def run(x: Tensor) -> Tensor:
        return block(p, x) if number > 0 else (x @ p["v"]).exp()

    return (checkpoint(run, x) * p["s"]).sum()


def new_numbers(p: Any, b: Any, x: Tensor, mask: Tensor, number: Tensor) -> Tensor:
    def run(x: Tensor) -> Tensor:
        return F.dropout(block(p, x), 0.5)

    return (checkpoint(run, x, preserve_rng_state=False) * p["s"]).sum()


# Distributions.


def normal(p: Any, b: Any, x: Tensor, mask: Tensor, number: Tensor) -> Tensor:
    found = distributions.Normal(x @ p["s"], p["v"][0, 0].exp())
    return -found.log_prob(x[:, 0]).sum()


def categorical(p: Any, b: Any, x: Tensor, mask: Tensor, number: Tensor) -> Tensor:
    return -distributions.Categorical(logits=x[0] @ p["w"]).log_prob(number)


def bernoulli(p: Any, b: Any, x: Tensor, mask: Tensor, number: Tensor) -> Tensor:
    found = distributions.Bernoulli((x @ p["s"]).sigmoid())
    return -found.log_prob(mask.to(x.dtype)).sum() - found.entropy().sum()


def beta(p: Any, b: Any, x: Tensor, mask: Tensor, number: Tensor) -> Tensor:
    found = distributions.Beta((x @ p["s"]).exp(), (x @ p["w"][0]).exp())
    return -found.log_prob(x[:, 0].sigmoid()).sum()


def divergence(p: Any, b: Any, x: Tensor, mask: Tensor, number: Tensor) -> Tensor:
    one = distributions.Normal(x @ p["w"], (x @ p["v"]).exp())
    other = distributions.Normal(torch.zeros_like(x), p["s"].exp())
    return distributions.kl_divergence(one, other).sum()


def gaussian(p: Any, b: Any, x: Tensor, mask: Tensor, number: Tensor) -> Tensor:
    scale = p["w"].tril(-1) + p["s"].exp().diag()
    found = distributions.MultivariateNormal(p["v"][0], scale_tril=scale)
    return -found.log_prob(x[0])


def mixture(p: Any, b: Any, x: Tensor, mask: Tensor, number: Tensor) -> Tensor:
    parts = distributions.Independent(distributions.Normal(p["w"], p["v"].exp()), 1)
    weights = distributions.Categorical(logits=p["s"])
    return -distributions.MixtureSameFamily(weights, parts).log_prob(x).sum()


def reparametrised(p: Any, b: Any, x: Tensor, mask: Tensor, number: Tensor) -> Tensor:
    found = distributions.Normal(x @ p["w"], p["s"].exp())
    return (found.rsample() @ p["v"]).square().sum()


def policy(p: Any, b: Any, x: Tensor, mask: Tensor, number: Tensor) -> Tensor:
    found = distributions.Categorical(logits=x @ p["w"])
    with torch.no_grad():
        action = found.sample()
    return -(found.log_prob(action) * x[:, 0]).sum()


class Program(NamedTuple):
    kind: str
    loss: Callable[..., Tensor]
    refused: str = ""  # the reason, or a part of it
    draws: bool = False


PROGRAMS = [
    Program("answers", branch),
    Program("answers", full_mask),
    Program("answers", expert),
    Program("answers", early_exit),
    Program("answers", length),
    Program("answers", two_questions),
    Program("answers", until),
    Program("answers", float_item),
    Program("answers", selection),
    Program("answers", in_a_list),
    Program("answers", drawn_branch, draws=True),
    Program("checkpoints", one_checkpoint),
    Program("checkpoints", chain),
    Program("checkpoints", no_state),
    Program("checkpoints", nested),
    Program("checkpoints", dropped, draws=True),
    Program("checkpoints", noisy, draws=True),
    Program("checkpoints", checkpointed_branch),
    Program("checkpoints", new_numbers, draws=True),
    Program("distributions", normal),
    Program("distributions", categorical),
    Program("distributions", bernoulli),
    Program("distributions", beta),
    Program("distributions", divergence),
    Program("distributions", gaussian),
    Program("distributions", mixture),
    Program("distributions", reparametrised, draws=True),
    Program("distributions", policy, draws=True),
]
