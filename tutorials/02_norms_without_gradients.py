"""Why the norm of every sample's gradient costs next to nothing.

The gradient of a weight is made of two small tensors that an ordinary backward pass has
at hand: the input of its layer, and the gradient at the layer's output. The norm
follows from these two, so the gradients themselves need not exist.
"""

# %% A layer that sees one vector a sample.
import matplotlib.pyplot as plt
import torch
from torch.nn import functional as F

import vgrad

SEED, BATCH, POSITIONS, INPUTS, OUTPUTS = 0, 16, 8, 256, 128
torch.manual_seed(SEED)

weight = {"weight": torch.randn(OUTPUTS, INPUTS) / 16}


# The loss multiplies the output by the second half of a sample, which therefore is the
# gradient at the output: we can read off both tensors.
def loss(params, buffers, x, g):
    """Loss of one sample whose gradient is the outer product of g and x."""
    return (F.linear(x, params["weight"]) * g).sum()


x = torch.randn(BATCH, INPUTS)
g = torch.randn(BATCH, OUTPUTS)
gradients = vgrad.per_sample_grad(loss)(weight, {}, x, g)["weight"]
torch.testing.assert_close(gradients, torch.einsum("bo,bi->boi", g, x))

# %% The norm of an outer product is the product of the norms: I + O numbers, not I x O.
by_hand = g.norm(dim=1) * x.norm(dim=1)
torch.testing.assert_close(by_hand, gradients.flatten(1).norm(dim=1))

norms = vgrad.per_sample_norm(loss)
torch.testing.assert_close(norms(weight, {}, x, g), by_hand)

# %% What that saves: explain says how a transform computes, and with how much memory.
stored = vgrad.explain(vgrad.per_sample_grad(loss))(weight, {}, x, g)
free = vgrad.explain(norms)(weight, {}, x, g)
print(free, "\n")
assert free.rows[0].form == "both sides"
assert free.rows[0].bytes < stored.rows[0].bytes / 50

# %% A layer that sees several positions: the gradient is a sum of outer products.
# Its square has a term for every pair of positions, <g_s, g_t> <x_s, x_t>. These are
# the entries of two T x T matrices of inner products (Gram matrices).
x = torch.randn(BATCH, POSITIONS, INPUTS)
g = torch.randn(BATCH, POSITIONS, OUTPUTS)
exact = torch.einsum("bto,bti->boi", g.double(), x.double()).flatten(1).norm(dim=1)


def gram_squares(x, g):
    """Return the squared norms [B] from the inner products of positions."""
    return ((g @ g.mT) * (x @ x.mT)).sum((1, 2))


torch.testing.assert_close(gram_squares(x, g).sqrt().double(), exact, rtol=1e-5, atol=0)
torch.testing.assert_close(norms(weight, {}, x, g).double(), exact, rtol=1e-6, atol=0)
explained = vgrad.explain(norms)(weight, {}, x, g)
print(explained, "\n")
assert explained.rows[0].form == "gram"

# %% With many positions and few channels, the gradients are smaller than the matrices.
# Nobody has to choose: vgrad compares operations and bytes for every layer.
narrow = {"weight": torch.randn(4, 3)}
batch = torch.randn(BATCH, 500, 3), torch.randn(BATCH, 500, 4)
assert vgrad.explain(norms)(narrow, {}, *batch).rows[0].form == "gradients"

# %% Where the terms cancel, the plain formula fails. Here the second position takes
# back all but a small rest of the first one. With a rest of a ten-thousandth the terms
# of the square are 10^8 times as large as their sum, and float32 has 7 digits.
first, other = torch.randn(2, BATCH, 1, OUTPUTS)
x = torch.randn(BATCH, 1, INPUTS).expand(-1, 2, -1).contiguous()


def cancelled(rest):
    """Return gradients at the output that leave a rest, and the exact norms."""
    g = 100 * torch.cat([first, rest * other - first], dim=1)
    exact = torch.einsum("bto,bti->boi", g.double(), x.double()).flatten(1).norm(dim=1)
    return g, exact


g, exact = cancelled(1e-4)
naive = gram_squares(x, g)
print(f"the norm of sample 0 is {exact[0]:.4f}; its square, naively, {naive[0]:.4f}")
naive = naive.clamp(min=0).sqrt().double()
assert ((naive - exact).abs() / exact).max() > 0.5

# vgrad sees how much was cancelled, and forms the gradients of just these samples.
torch.testing.assert_close(norms(weight, {}, x, g).double(), exact, rtol=1e-5, atol=0)

# %% For privacy a norm may be too large, but never too small. Clipping divides by it. A
# square that came out negative and was set to zero would switch clipping off for that
# sample, and the noise would no longer hide it.
BOUND = 1.0
naive_factors = (BOUND / naive).clamp(max=1)
assert (naive_factors * exact).max() > 1.5 * BOUND

clipped = vgrad.clipped_grad(loss, max_norm=BOUND)
singles = [
    clipped(weight, {}, x[[row]], g[[row]]).grads["weight"] for row in range(BATCH)
]
largest = max(grad.double().norm() for grad in singles)
print(f"largest clipped norm: naively {(naive_factors * exact).max():.3f}, ", end="")
print(f"here {largest:.7f}, where {BOUND} is allowed")
assert largest <= BOUND * (1 + 1e-6)

# %% The error of both, with less and less left. vgrad's error grows likewise at first,
# up to a thousandth at most. From there on it forms the gradients.
rests = torch.logspace(0, -5, 21).tolist()
errors = {"plain formula": [], "vgrad.per_sample_norm": []}
for rest in rests:
    g, exact = cancelled(rest)
    plain = gram_squares(x, g).clamp(min=0).sqrt()
    for label, result in zip(errors, (plain, norms(weight, {}, x, g)), strict=True):
        errors[label].append(float((result / exact - 1).abs().max()))
assert max(errors["plain formula"]) > 1
assert max(errors["vgrad.per_sample_norm"]) < 1e-3

plt.style.use(
    "tableau-colorblind10"
)  # colours that colour-blind readers can tell apart
figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
for (label, values), form in zip(errors.items(), ("C1s-", "C0o-"), strict=True):
    axes.plot(rests, values, form, markersize=4, label=label)
axes.set(xscale="log", yscale="log", ylim=(1e-8, 1e3))
axes.invert_xaxis()
axes.set(xlabel="what cancellation leaves, share of each term")
axes.set(ylabel="relative error of the norm")
axes.set_title(
    f"Norms in float32 where two positions cancel: the worst of {BATCH} samples of a\n"
    f"linear layer ({INPUTS} to {OUTPUTS}), random numbers, seed {SEED}"
)
axes.legend(loc="upper left")
axes.grid(alpha=0.3)

plt.show()
