"""Mixed precision: half the memory for activations, and the same accuracy.

A policy gives the dtypes of parameters, computation and outputs. Under
"mixed_bfloat16" the products of a network run in bfloat16 while parameters, and the
optimizer, stay in float32: a small update would be lost in 8 bits of a significand. So
would a sum, which is why losses, and the inside of norm layers, are float32 too.
float16 has more digits and a narrow range: gradients below 6e-8 become zero, so the
loss is multiplied by a scale first. bfloat16 has the range of float32 and needs none.
"""

# %% scikit-learn's digits, resized to small images and to large ones.
import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import vgrad
from vgrad.precision import DynamicLossScale, StaticLossScale, policy_for
from vgrad.training import TrainState, train_step

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--images", type=int, default=600, help="of 28x28")
parser.add_argument("--large", type=int, default=16, help="of 128x128")
given = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, TESTED = 32, 400
POLICIES = {"float32": "float32", "bfloat16": "mixed_bfloat16"}
SCALES = {"float16": DynamicLossScale()}
if device == "cuda":
    POLICIES["float16"] = "mixed_float16"
elif not torch.ops.mkldnn._is_mkldnn_bf16_supported():
    print("This CPU has no instructions for bfloat16 and is slow at it.\n")

digits = load_digits()
order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
pixels = torch.tensor(digits.images, dtype=torch.float32)[order, None] / 16
labels = torch.tensor(digits.target)[order].to(device)


def images(side, start, stop):
    """Resize some of the digits."""
    return F.interpolate(pixels[start:stop], side, mode="bilinear").to(device)


def network(side):
    """Convolutions and two dense layers: nearly all of its memory is activations."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 16, 3, padding=1, stride=2), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(7), nn.Flatten()),
        *(nn.Linear(32 * 49, 64), nn.ReLU(), nn.Linear(64, 10)),
    ).to(device)


def saved_bytes(loss, params, buffers, x, y):
    """Count what autograd keeps for the backward pass: what precision can halve."""
    kept = {}

    def count(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
    own = {value.untyped_storage().data_ptr() for value in leaves.values()}
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        loss(leaves, buffers, x, y)
    return sum(size for key, (size, _) in kept.items() if key not in own)


# %% The same training in every precision: same weights, same batches.
def experiment(side, count, epochs):
    """Return for each precision the seconds an epoch, the memory and the accuracy."""
    x, y = images(side, 0, count), labels[:count]
    runs, tx = {}, vgrad.optim.adam(3e-3)
    for name, policy in POLICIES.items():
        fmodel, params, buffers = vgrad.make_functional_with_buffers(network(side))
        model = policy_for(fmodel, policy)
        loss = vgrad.batch_loss(model, F.cross_entropy)
        scale = SCALES.get(name)
        state = TrainState.create(tx, params, buffers, seed=0, loss_scale=scale)
        memory = saved_bytes(loss, params, buffers, x[:BATCH], y[:BATCH])
        runs[name] = [train_step(loss, tx), state, memory, [], model]
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(epoch)
        batches = torch.randperm(count, generator=generator).split(BATCH)
        for run in runs.values():  # interleaved, so that times can be compared
            start = time.perf_counter()
            for rows in batches:
                run[1], metrics = run[0](run[1], x[rows], y[rows])
            float(metrics["loss"])  # waits for the device
            run[3].append(time.perf_counter() - start)
    tests = images(side, len(pixels) - TESTED, len(pixels))
    results = {}
    for name, (_, state, memory, seconds, model) in runs.items():
        right = [
            model(state.params, state.buffers, part).argmax(1)
            for part in tests.split(50)
        ]
        accuracy = (torch.cat(right) == labels[-TESTED:]).float().mean()
        results[name] = min(seconds), memory, float(accuracy)
    return results


small = experiment(28, given.images, given.epochs)
large = experiment(128, given.large, 1)
print("images    precision  s / epoch  MB kept for backward  accuracy")
for side, results in ((28, small), (128, large)):
    for name, (seconds, memory, accuracy) in results.items():
        shown = f"{accuracy:9.1%}" if side == 28 else "        -"
        print(
            f"{side:3}x{side:<5} {name:9} {seconds:10.2f} {memory / 1e6:21.1f} {shown}"
        )

for results in (small, large):
    assert results["bfloat16"][1] < 0.7 * results["float32"][1]
accuracies = [accuracy for _, _, accuracy in small.values()]
assert min(accuracies) > 0.85
assert max(accuracies) - min(accuracies) < 0.05

# %% Per-sample gradients under a policy have the dtype of the parameters. A loss scale
# leaves no trace: every sample is unscaled before its norm is taken.
fmodel, params, buffers = vgrad.make_functional_with_buffers(
    network(28), disable_autograd_tracking=True
)
loss = vgrad.sample_loss(policy_for(fmodel, "mixed_bfloat16"), F.cross_entropy)
batch = images(28, 0, 8), labels[:8]
grads = vgrad.per_sample_grad(loss)(params, buffers, *batch)
assert all(grad.dtype == torch.float32 for grad in grads.values())
sums = [
    vgrad.clipped_grad(loss, max_norm=1.0, loss_scale=StaticLossScale(scale))
    for scale in (2.0**8, 2.0**12)
]
one, other = (compute(params, buffers, *batch).grads for compute in sums)
for name, value in one.items():
    torch.testing.assert_close(value, other[name], rtol=1e-6, atol=1e-9)
print("\nclipped sums with scale 2^8 and 2^12 are equal")
