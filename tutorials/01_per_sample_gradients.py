"""From a model to the gradient of every sample.

Training sums gradients over a batch before anyone can look at them. Here we want them
one by one: by a loop, by `vmap`, and by one call of vgrad. Then we clip them and add
them up, which costs little more than plain training.
"""

# %% A model and a batch: the network of the torch.func tutorial at half its width.
import statistics
import time

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn import functional as F

import vgrad

SEED, BATCH, ROUNDS = 0, 8, 3
torch.set_num_threads(1)
torch.manual_seed(SEED)


class SimpleCNN(nn.Module):
    """Two convolutions and two linear layers on images of 28x28 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, 1)
        self.conv2 = nn.Conv2d(16, 32, 3, 1)
        self.fc1 = nn.Linear(4608, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities of ten classes."""
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = torch.flatten(F.max_pool2d(x, 2), 1)
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)


# In float64 the three ways below agree to the last digits, so the check is sharp.
model = SimpleCNN().double()
images = torch.randn(BATCH, 1, 28, 28, dtype=torch.float64)
targets = torch.randint(10, (BATCH,))


# %% The loop: one forward and one backward pass for every sample.
def by_loop(images, targets):
    """Yield the gradients of one sample after another, in the order of parameters."""
    for image, target in zip(images, targets, strict=True):
        loss = F.nll_loss(model(image[None]), target[None])
        yield torch.autograd.grad(loss, list(model.parameters()))


# %% Split: the model becomes a pure function, its parameters and its buffers.
fmodel, params, buffers = vgrad.make_functional_with_buffers(
    model, disable_autograd_tracking=True
)
for name, value in params.items():
    print(f"{name:12} {tuple(value.shape)}")


# %% Grad and vmap: differentiate the loss of one sample, and map that over the batch.
def loss_of_one(params, image, target):
    """Add the batch dimension of one that the model expects."""
    return F.nll_loss(fmodel(params, buffers, image[None]), target[None])


mapped = vgrad.vmap(vgrad.grad(loss_of_one), in_dims=(None, 0, 0))

# %% vgrad: make the loss of model and criterion; one call computes all gradients.
loss = vgrad.sample_loss(fmodel, F.nll_loss)
compute = vgrad.per_sample_grad(loss)

# %% They are equal.
stacked = (torch.stack(rows) for rows in zip(*by_loop(images, targets), strict=True))
reference = dict(zip(params, stacked, strict=True))
of_vmap = mapped(params, images, targets)
for name, grad in compute(params, buffers, images, targets).items():
    assert grad.shape == (BATCH, *params[name].shape)
    torch.testing.assert_close(grad, reference[name], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(of_vmap[name], grad, rtol=1e-9, atol=1e-12)

# %% Often nobody needs the gradients themselves. Private training wants the sum of
# gradients that were scaled down to a norm of at most 1, and no gradient is stored.
norms = vgrad.per_sample_norm(loss)(params, buffers, images, targets)
clipped = vgrad.clipped_grad(loss, max_norm=1.0)
result = clipped(params, buffers, images, targets)
print(f"norms from {norms.min():.2f} to {norms.max():.2f}, {result.clipped} clipped")


def clip_and_sum(grads):
    """Clip gradients that are there already, {name: [B, *shape]} -> {name: shape}."""
    squares = sum(grad.flatten(1).square().sum(1) for grad in grads.values())
    factors = (1 / squares.sqrt()).clamp(max=1)
    return {n: torch.tensordot(factors, grad, 1) for n, grad in grads.items()}


for name, value in clip_and_sum(reference).items():
    torch.testing.assert_close(result.grads[name], value, rtol=1e-9, atol=1e-12)

# %% What that costs, as one trains: in float32, with 128 samples. The loop adds up one
# gradient at a time, vmap stores them all. The ways take turns, and medians count.
model.float()
params = {name: value.float() for name, value in params.items()}
many = torch.randn(128, 1, 28, 28), torch.randint(10, (128,))


def plain():
    """Compute the gradient of plain training."""
    torch.autograd.grad(F.nll_loss(model(many[0]), many[1]), list(model.parameters()))


def loop():
    """Compute the clipped sum by one backward pass for each sample."""
    total = [torch.zeros_like(value) for value in model.parameters()]
    for grads in by_loop(*many):
        factor = (1 / torch.nn.utils.get_total_norm(grads)).clamp(max=1)
        for added, grad in zip(total, grads, strict=True):
            added += factor * grad


ways = {
    "plain training": plain,
    "vgrad.clipped_grad": lambda: clipped(params, buffers, *many),
    "vmap(grad), clip, sum": lambda: clip_and_sum(mapped(params, *many)),
    "loop, clip, sum": loop,
}
times = {name: [] for name in ways}
for _ in range(ROUNDS + 1):  # the first round warms up
    for name, way in ways.items():
        start = time.process_time()
        way()
        times[name].append(1e3 * (time.process_time() - start))
medians = {name: statistics.median(spent[1:]) for name, spent in times.items()}
for name, median in medians.items():
    print(f"{name:22} {median:5.0f} ms")

plt.style.use(
    "tableau-colorblind10"
)  # colours that colour-blind readers can tell apart
figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
bars = axes.barh(list(medians), list(medians.values()), color=["C2", "C0", "C1", "C1"])
axes.bar_label(bars, fmt="%.0f ms", padding=3)
axes.invert_yaxis()
axes.margins(x=0.15)
axes.set(xlabel=f"milliseconds of CPU time on one thread, median of {ROUNDS} rounds")
axes.set_title(f"Clipped sum of 128 random images, small CNN, float32, seed {SEED}")

plt.show()
