"""Mixed precision: half the memory for activations, and the same accuracy.

A policy gives the dtypes of parameters, computation and outputs. Under
"mixed_bfloat16" the products of a network run in bfloat16 while parameters and
optimizer stay in float32: a small update would be lost in 8 bits of a significand. So
would a sum: losses, and the inside of norm layers, are float32 too. float16 has more
digits and a narrow range: gradients below 6e-8 become zero, so the loss is multiplied
by a scale first. bfloat16 has the range of float32 and needs no scale.
"""

# %% scikit-learn's digits, resized to small images and to large ones.
import time

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import vgrad
from vgrad.precision import DynamicLossScale, StaticLossScale, policy_for
from vgrad.training import TrainState, train_step

device = "cuda" if torch.cuda.is_available() else "cpu"
SEED, EPOCHS, IMAGES, LARGE = 0, 6, 600, 16  # of 28x28, and of 128x128
BATCH, TESTED = 32, 400
POLICIES = {"float32": "float32", "bfloat16": "mixed_bfloat16"}
SCALES = {"float16": DynamicLossScale()}
if device == "cuda":
    POLICIES["float16"] = "mixed_float16"

digits = load_digits()
order = torch.randperm(
    len(digits.target), generator=torch.Generator().manual_seed(SEED)
)
pixels = torch.tensor(digits.images, dtype=torch.float32)[order, None] / 16
labels = torch.tensor(digits.target)[order].to(device)


def images(side, start, stop):
    """Resize some of the digits."""
    return F.interpolate(pixels[start:stop], side, mode="bilinear").to(device)


def network(side):
    """Convolutions and two dense layers: nearly all of its memory is activations."""
    torch.manual_seed(SEED)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 16, 3, padding=1, stride=2), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(7), nn.Flatten()),
        *(nn.Linear(32 * 49, 64), nn.ReLU(), nn.Linear(64, 10)),
    ).to(device)


def saved_bytes(loss, params, buffers, x, y):
    """Count the bytes that autograd saves for backward, which precision can halve."""
    saved = {}

    def count(tensor):
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
    weights = {value.untyped_storage().data_ptr() for value in leaves.values()}
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        loss(leaves, buffers, x, y)
    return sum(size for key, (size, _) in saved.items() if key not in weights)


# %% The same training in every precision: same weights, same batches. A CPU without
# instructions for bfloat16 is slow at it.
def experiment(side, count, epochs):
    """Return seconds per epoch, memory, accuracy and losses, by precision."""
    x, y, runs, tx = images(side, 0, count), labels[:count], {}, vgrad.optim.adam(3e-3)
    for name, policy in POLICIES.items():
        fmodel, params, buffers = vgrad.make_functional_with_buffers(network(side))
        model = policy_for(fmodel, policy)
        loss = vgrad.batch_loss(model, F.cross_entropy)
        options = {"seed": SEED, "loss_scale": SCALES.get(name)}
        state = TrainState.create(tx, params, buffers, **options)
        memory = saved_bytes(loss, params, buffers, x[:BATCH], y[:BATCH])
        runs[name] = [train_step(loss, tx), state, memory, [], model, []]
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(epoch)
        batches = torch.randperm(count, generator=generator).split(BATCH)
        for run in runs.values():  # interleaved, so that times can be compared
            start = time.perf_counter()
            for rows in batches:
                run[1], metrics = run[0](run[1], x[rows], y[rows])
            run[5].append(float(metrics["loss"]))  # waits for the device
            run[3].append(time.perf_counter() - start)
    tests, results = images(side, len(pixels) - TESTED, len(pixels)), {}
    for name, (_, state, memory, seconds, model, losses) in runs.items():
        values = state.params, state.buffers
        right = [model(*values, part).argmax(1) for part in tests.split(50)]
        accuracy = (torch.cat(right) == labels[-TESTED:]).float().mean()
        results[name] = min(seconds), memory, float(accuracy), losses
    return results


small = experiment(28, IMAGES, EPOCHS)
large = experiment(128, LARGE, 1)
for side, results in ((28, small), (128, large)):
    for name, (seconds, memory, *_) in results.items():
        print(f"{side:3}, {name:8}: {seconds:.2f} s an epoch, {memory / 1e6:4.1f} MB")
for results in (small, large):
    assert results["bfloat16"][1] < 0.7 * results["float32"][1]
accuracies = [accuracy for _, _, accuracy, _ in small.values()]
print("accuracy:", ", ".join(f"{share:.1%}" for share in accuracies))
assert min(accuracies) > 0.85
assert max(accuracies) - min(accuracies) < 0.05

# %% Per-sample gradients under a policy have the dtype of the parameters. A loss scale
# leaves no trace: every sample is unscaled before its norm is computed.
fmodel, params, buffers = vgrad.make_functional_with_buffers(
    network(28), disable_autograd_tracking=True
)
loss = vgrad.sample_loss(policy_for(fmodel, "mixed_bfloat16"), F.cross_entropy)
batch = images(28, 0, 8), labels[:8]
for grad in vgrad.per_sample_grad(loss)(params, buffers, *batch).values():
    assert grad.dtype == torch.float32
sums = [
    vgrad.clipped_grad(loss, max_norm=1.0, loss_scale=StaticLossScale(scale))
    for scale in (2.0**8, 2.0**12)
]
one, other = (compute(params, buffers, *batch).grads for compute in sums)
for name, value in one.items():
    torch.testing.assert_close(value, other[name], rtol=1e-6, atol=1e-9)
print("clipped sums with scale 2^8 and 2^12 are equal")

plt.style.use(
    "tableau-colorblind10"
)  # colours that colour-blind readers can tell apart
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
figure.suptitle(f"Small CNN, batches of {BATCH} digits, seed {SEED}, {device}")
for number, name in enumerate(POLICIES):
    sizes = [results[name][1] / 1e6 for results in (small, large)]
    bars = left.bar([0.4 * number, 1 + 0.4 * number], sizes, 0.38, label=name)
    left.bar_label(bars, fmt="%.1f MB")
    right.plot(range(1, EPOCHS + 1), small[name][3], "os^"[number] + "-")
left.set_xticks([0.2, 1.2], ["28x28 pixels", "128x128 pixels"])
left.set_ylabel("saved for the backward pass, MB")
right.set(xlabel="epoch, images of 28x28", ylabel="loss of its last batch")
left.margins(y=0.1)
left.legend(loc="upper left")

plt.show()
