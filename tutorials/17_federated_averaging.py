"""Federated averaging of twenty clients, with differential privacy for each of them.

In a round some clients train the current model on their own digits, for three steps.
The server clips the change that each client sends, adds noise to the sum, and moves the
model by it. A client is a sample of `vgrad.clipped_sum`: its value is the change that a
function of the client's data returns, and all clients train at once.
"""

# %% Twenty clients, each with 72 digits of scikit-learn, and 357 digits held out.
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import vgrad
from vgrad import dp

SEED, CLIENTS, OWN, ROUNDS, RATE, STEPS = 0, 20, 72, 40, 0.5, 3
torch.set_num_threads(1)  # with a model this small, more threads only wait
torch.manual_seed(SEED)
digits = load_digits()
order = torch.randperm(len(digits.target))
images = torch.tensor(digits.images, dtype=torch.float32)[order] / 16
labels = torch.tensor(digits.target)[order]
x, y = images[: CLIENTS * OWN], labels[: CLIENTS * OWN]
x, y = x.view(CLIENTS, OWN, 8, 8), y.view(CLIENTS, OWN)
held_x, held_y = images[CLIENTS * OWN :], labels[CLIENTS * OWN :]

# %% The function of a client: three steps of SGD on its own digits. It returns the
# change of the parameters, and changes nothing that it is given.
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
start = {name: value.detach() for name, value in params.items()}
loss = vgrad.batch_loss(fmodel, F.cross_entropy)


def trained(params: dict, buffers: dict, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Return the change of the parameters that a client's digits make."""
    local = params
    for _ in range(STEPS):
        grads = torch.func.grad(loss)(local, buffers, x, y)
        local = {name: value - RATE * grads[name] for name, value in local.items()}
    return {name: local[name] - params[name] for name in params}


def accuracy(params: dict) -> float:
    """Return the share of held-out digits that are right."""
    return float((fmodel(params, buffers, held_x).argmax(1) == held_y).float().mean())


# %% All clients run in one call. The sum is the one of a loop over clients, each with
# the norm of its change clipped to the bound.
BOUND = 0.5
compute = vgrad.clipped_sum(trained, max_norm=BOUND)
result = compute(start, buffers, x, y)
changes = [trained(start, buffers, *client) for client in zip(x, y, strict=True)]
norms = [torch.cat([v.flatten() for v in c.values()]).norm() for c in changes]
for name, total in result.sum.items():
    by_hand = sum(
        change[name] * min(1, BOUND / norm)
        for change, norm in zip(changes, norms, strict=True)
    )
    assert torch.allclose(total, by_hand, atol=1e-5)
print(f"{result.clipped} of {CLIENTS} changes are clipped; ", end="")
print(f"norms {result.norms.min():.2f} to {result.norms.max():.2f}")


# %% The plan counts clients: each is in a round with probability 1/2, and epsilon is
# about adding or removing one of them with all of its digits.
def run(noise_multiplier: float) -> tuple[list[float], dp.Plan]:
    """Return the accuracy after each round, and the plan."""
    plan = dp.Plan(
        dataset_size=CLIENTS,
        sampling_rate=0.5,
        noise_multiplier=noise_multiplier,
        max_norm=BOUND,
        steps=ROUNDS,
        delta=1e-2,
    )
    average = vgrad.clipped_sum(trained, **plan.clipping)  # the sum / 10 clients
    key, params, curve = dp.secret_key(seed=SEED), start, []
    for number in range(ROUNDS):
        clients = plan.sample(key=key, step=number)
        mean = average(params, buffers, x[clients], y[clients])
        noisy = plan.add_noise(mean.sum, average.sensitivity, key=key, step=number)
        params = {name: value + noisy[name] for name, value in params.items()}
        curve.append(accuracy(params))
    return curve, plan


curves = {}
for noise_multiplier in (0.0, 1.0, 2.0):
    curve, plan = run(noise_multiplier)
    epsilon = plan.epsilon()
    curves[f"noise {noise_multiplier:g}, epsilon {epsilon:.3g}"] = curve
    print(
        f"noise {noise_multiplier:g}: epsilon {epsilon:.3g}, accuracy {curve[-1]:.1%}"
    )

# %% Twenty clients are few: the noise of the mean has the deviation `noise_multiplier *
# bound / expected clients`, so a hundred times as many have a hundredth of it. Epsilon
# is larger there only because its delta is smaller.
many = dp.Plan(100 * CLIENTS, 0.5, noise_multiplier, BOUND, ROUNDS, 1e-4)
for each in (plan, many):
    print(f"{each.dataset_size} clients: deviation {each.deviation(0):.1e}, ", end="")
    print(f"epsilon {each.epsilon():.1f} at delta {each.delta:g}")

plt.style.use(
    "tableau-colorblind10"
)  # colours that colour-blind readers can tell apart
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
figure.suptitle(f"Federated averaging of {CLIENTS} clients with {OWN} digits each")
left.hist(result.norms, bins=12, color="C0")
left.axvline(BOUND, color="black", linestyle=":", label="bound")
left.set(xlabel="norm of a client's first change", ylabel="clients")
left.legend()
for name, style in zip(curves, ("C0-", "C1--", "C2:"), strict=True):
    right.plot(range(1, ROUNDS + 1), [100 * a for a in curves[name]], style, label=name)
right.set(xlabel="round", ylabel="held-out accuracy, %")
right.legend(loc="lower right")
for axes in (left, right):
    axes.grid(alpha=0.3)

plt.show()
