"""Teach vgrad the gradient of an op of your own: write a rule, register it, check it.

vgrad has rules for torch's own ops. An op without one still has exact gradients, but
all of them are stored. A rule says which two small tensors stand for them.
"""

# %% An op with a backward pass of its own: a product with a matrix of low rank.
import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import wrap_torch_function

import vgrad
from vgrad import ops

SEED, BATCH, POSITIONS, WIDTH, RANK = 0, 16, 4, 96, 16
torch.manual_seed(SEED)


class LowRank(torch.autograd.Function):
    """`scale * x @ down.T @ up.T`; keeps x, and computes what is between again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, down, up, scale):
        return scale * F.linear(F.linear(x, down), up)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:3])
        ctx.scale = inputs[3]

    @staticmethod
    def backward(ctx, g):
        x, down, up = ctx.saved_tensors
        g = ctx.scale * g
        flat_x, flat_g = x.flatten(0, -2), g.flatten(0, -2)
        for_down = (flat_g @ up).T @ flat_x
        for_up = flat_g.T @ F.linear(flat_x, down)
        return g @ up @ down, for_down, for_up, None


# %% Make it visible: torch shows the functions that go through this decorator, as it
# shows its own, to everyone who watches. The lambda says which arguments are tensors.
@wrap_torch_function(lambda x, down, up, scale=1.0: (x, down, up))
def low_rank(x, down, up, scale=1.0):
    """Multiply by a matrix of low rank, [..., I] -> [..., O]."""
    return LowRank.apply(x, down, up, scale)


# %% A model that uses it, and what vgrad does without a rule.
class Adapted(nn.Module):
    """A linear layer, then one of low rank."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Parameter(torch.randn(RANK, WIDTH) / WIDTH**0.5)
        self.up = nn.Parameter(torch.randn(WIDTH, RANK) / RANK**0.5)

    def forward(self, x):
        return low_rank(torch.tanh(self.first(x)), self.down, self.up, scale=2.0)


fmodel, params, buffers = vgrad.make_functional_with_buffers(
    Adapted(), disable_autograd_tracking=True
)
loss = vgrad.sample_loss(fmodel, F.mse_loss)
batch = torch.randn(2, BATCH, POSITIONS, WIDTH)
norms = vgrad.per_sample_norm(loss)
before = vgrad.explain(norms)(params, buffers, *batch)
print(before, "\n")
expected = norms(params, buffers, *batch)


# %% The rule: the arguments of the op, with the samples in front of the loss's own.
# It returns a function for each weight, which gets the gradient g at the op's output.
# Both gradients are sums over positions of outer products, which is what `Outer` holds;
# `positions` views [B, ..., C] as [B, groups = 1, positions, C], as it wants them.
def outer(x, g, shape):
    """Hold the gradient sum_t g_t x_t of a matrix."""
    return ops.Outer(ops.positions(x), ops.positions(g), shape)


@ops.rule(low_rank, weights=("down", "up"))
def without_scale(x, down, up, scale=1.0):
    """Forget what is easily forgotten."""
    return {
        "down": lambda g: outer(x, g @ up, down.shape),
        "up": lambda g: outer(F.linear(x, down), g, up.shape),
    }


# %% Check it: every quantity, in float64, against a loop of plain autograd.
try:
    vgrad.testing.check_rule(loss, params, buffers, *batch)
except AssertionError as error:
    print("found:", error, "\n")
else:
    raise SystemExit("a wrong rule passed")


# %% Mend it. A second rule for an op takes the place of the first only if told so.
@ops.rule(low_rank, weights=("down", "up"), replace=True)
def right(x, down, up, scale=1.0):
    """Scale the gradient at the output first."""
    return {
        "down": lambda g: outer(x, scale * g @ up, down.shape),
        "up": lambda g: outer(F.linear(x, down), scale * g, up.shape),
    }


vgrad.testing.check_rule(loss, params, buffers, *batch)

# %% The same numbers, for less memory.
after = vgrad.explain(norms)(params, buffers, *batch)
print(after)
torch.testing.assert_close(norms(params, buffers, *batch), expected)


def kilobytes(explanation):
    """Return the kilobytes for each weight of the op."""
    rows = [row for row in explanation.rows if row.op == "low_rank"]
    return {row.names[0]: row.bytes / 1000 for row in rows}


without, with_rule = kilobytes(before), kilobytes(after)
assert sum(with_rule.values()) < sum(without.values()) / 3

plt.style.use(
    "tableau-colorblind10"
)  # colours that colour-blind readers can tell apart
figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
for place, (sizes, label) in enumerate(((without, "no rule"), (with_rule, "a rule"))):
    at = [number + 0.4 * place for number in range(len(sizes))]
    bars = axes.barh(at, list(sizes.values()), 0.38, color=f"C{1 - place}", label=label)
    axes.bar_label(bars, fmt="%.0f kB", padding=3)
axes.set_yticks([0.2, 1.2], list(without))
axes.invert_yaxis()
axes.margins(x=0.12)
axes.set(xlabel="kept for the norms of a batch, kB")
axes.set_title(
    f"Two weights of rank {RANK}, width {WIDTH}: {BATCH} random samples of {POSITIONS} "
    f"positions, seed {SEED}"
)
axes.legend(loc="lower right", ncols=2)

plt.show()
