"""From a model to the gradient of every sample.

Training sums gradients over a batch before anyone can look at them. Here we want them
one by one: first by a loop, then all at once with `vmap`, then by one call of vgrad.
"""

# %% A model and a batch: the small network of the torch.func tutorial.
import time

import torch
from torch import nn
from torch.nn import functional as F

import vgrad

torch.manual_seed(0)
BATCH = 8


class SimpleCNN(nn.Module):
    """Two convolutions and two linear layers on images of 28x28 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

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
def by_loop() -> dict[str, torch.Tensor]:
    """Return {name: [B, *shape]} from B backward passes."""
    names = dict(model.named_parameters())
    found = []
    for image, target in zip(images, targets, strict=True):
        loss = F.nll_loss(model(image[None]), target[None])
        found.append(torch.autograd.grad(loss, list(names.values())))
    stacked = (torch.stack(each) for each in zip(*found, strict=True))
    return dict(zip(names, stacked, strict=True))


# %% Split: the model becomes a pure function, its parameters and its buffers.
fmodel, params, buffers = vgrad.make_functional_with_buffers(
    model, disable_autograd_tracking=True
)
print(
    "parameters:", ", ".join(f"{name} {tuple(p.shape)}" for name, p in params.items())
)


# %% Grad: the loss of one sample as a function of the parameters, differentiated.
def loss_of_one(
    params: vgrad.typing.Params, image: torch.Tensor, target: torch.Tensor
) -> torch.Tensor:
    """Add the batch dimension of one that the model expects."""
    output = fmodel(params, buffers, image[None])
    return F.nll_loss(output, target[None])


one = vgrad.grad(loss_of_one)(params, images[0], targets[0])
assert one["fc2.bias"].shape == (10,)

# %% Vmap: the same function over the batch, with the parameters held fixed.
mapped = vgrad.vmap(vgrad.grad(loss_of_one), in_dims=(None, 0, 0))

# %% vgrad: make the loss of model and criterion; one call computes all gradients.
loss = vgrad.sample_loss(fmodel, F.nll_loss)
compute = vgrad.per_sample_grad(loss)

# %% They are equal.
reference = by_loop()
for name, grad in compute(params, buffers, images, targets).items():
    assert grad.shape == (BATCH, *params[name].shape)
    torch.testing.assert_close(grad, reference[name], rtol=1e-9, atol=1e-12)
for name, grad in mapped(params, images, targets).items():
    torch.testing.assert_close(grad, reference[name], rtol=1e-9, atol=1e-12)


# %% Their times differ. The first call of each warms up, so run each more than once.
def milliseconds(function, *args) -> float:
    """Return the best of two calls."""
    best = float("inf")
    for _ in range(2):
        start = time.perf_counter()
        function(*args)
        best = min(best, time.perf_counter() - start)
    return 1e3 * best


print(f"loop  {milliseconds(by_loop):7.1f} ms")
print(f"vmap  {milliseconds(mapped, params, images, targets):7.1f} ms")
print(f"vgrad {milliseconds(compute, params, buffers, images, targets):7.1f} ms")

# %% Often nobody needs the gradients themselves, only what follows from them.
norms = vgrad.per_sample_norm(loss)(params, buffers, images, targets)
clipped = vgrad.clipped_grad(loss, max_norm=1.0)
result = clipped(params, buffers, images, targets)
print(f"norms from {norms.min():.2f} to {norms.max():.2f}, {result.clipped} clipped")
assert clipped.sensitivity.value == 1.0
alone = clipped(params, buffers, images[:1], targets[:1]).grads
assert sum(g.square().sum() for g in alone.values()).sqrt() <= 1 + 1e-6


# %% Randomness: dropout has to be told whether samples share one mask.
def drops(params, buffers, image):
    """Drop half of the pixels."""
    return (F.dropout(image, 0.5) * params["scale"]).sum()


batch, scale = torch.ones(BATCH, 28 * 28), {"scale": torch.ones(28 * 28)}
try:
    vgrad.per_sample_grad(drops)(scale, {}, batch)
except RuntimeError as error:
    print("refused:", str(error).splitlines()[0])
own = vgrad.per_sample_grad(drops, randomness="different")(scale, {}, batch)["scale"]
shared = vgrad.per_sample_grad(drops, randomness="same")(scale, {}, batch)["scale"]
assert not torch.equal(own[0], own[1])
assert torch.equal(shared[0], shared[1])
print("every sample has its own mask, or all share one")
