"""Noise that takes itself back: correlated over steps, for large budgets.

A private step adds noise to the sum of clipped gradients. Each step is protected by its
own noise, but a model is the sum of many steps, and so is the noise in it. With noise
that is correlated over steps a part of it cancels in that sum. The price: a sample must
not come back too soon, so sampling hides less. Which of both wins depends on epsilon,
and `plan.plot_noise` predicts it without training.
"""

# %% Digits, of which each is the data of one person, for a linear model.
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import vgrad
from vgrad.dp import Plan, noising

SEEDS, SAMPLES, BATCH, EPOCHS, DELTA = range(5), 1200, 120, 30, 1e-4
MAX_NORM = 8.0  # above all norms: runs differ in batches and noise alone
torch.set_num_threads(1)  # with a model this small, more threads only wait
torch.manual_seed(0)
digits = load_digits()
order = torch.randperm(len(digits.target))
x = torch.tensor(digits.data, dtype=torch.float32)[order] / 16
y = torch.tensor(digits.target)[order]
held_x, held_y = x[SAMPLES:], y[SAMPLES:]


def plan_for(epsilon, noise):
    """Return the plan with the least noise for a budget."""
    run = {"dataset_size": SAMPLES, "batch_size": BATCH, "epochs": EPOCHS}
    return Plan.for_epsilon(epsilon, noise=noise, max_norm=MAX_NORM, delta=DELTA, **run)


# %% Two schemes. Independent noise goes with Poisson batches. With four bands each
# sample belongs to one of four groups, drawn from the key; step t samples from group
# t mod 4, with four times the probability. The noise of a step depends on three earlier
# ones, so no sample takes part twice in steps whose noise belongs together.
SCHEMES = {"independent": noising.independent(), "4 bands": noising.band_mf(4)}
for name, noise in SCHEMES.items():
    plan = plan_for(16, noise)
    print(f"{name}: {plan.sampling}, {plan.neighbours}, ", end="")
    print(f"noise multiplier {plan.noise_multiplier:.2f}")

# %% The prediction: the noise in the sum of the first t gradients, its mean over t. It
# is smaller with bands at epsilon 16, and larger at epsilon 1, where sampling is worth
# more.
figure = plan.plot_noise([*SCHEMES.values()])
left, right = figure.axes
curves = [[float(loss) for loss in line.get_ydata()] for line in left.lines]
for epsilon, place in ((1, 0), (16, -1)):
    losses = [f"{curve[place]:.1f}" for curve in curves]
    print(f"epsilon {epsilon}: root losses {' and '.join(losses)}")
assert curves[1][-1] < 0.9 * curves[0][-1]
assert curves[1][0] > curves[0][0]

# %% Training. The plan is all that changes: it has the batches, the noise and the
# claim. The learning rate is as large as the noise of the budget allows.
RATES = {1: 0.25, 16: 1.0}


def train(plan, seed, rate):
    """Train once. -> loss and accuracy in per cent on held-out digits.

    Means over the parameters of the last 50 steps, which differ in their noise.
    """
    torch.manual_seed(seed)
    fmodel, params, buffers = vgrad.make_functional_with_buffers(
        nn.Linear(64, 10), disable_autograd_tracking=True
    )
    loss = vgrad.sample_loss(fmodel, F.cross_entropy)
    tx = vgrad.optim.sgd(rate)
    step = vgrad.training.private_step(loss, tx, plan)
    # A key from a seed, to compare runs; by default it comes from the operating system.
    state = vgrad.training.TrainState.create(tx, params, buffers, seed=seed)
    seen = []
    for indices in plan.sampler(state):
        state, _ = step(state, x[indices], y[indices])
        if state.step > plan.steps - 50:
            outputs = fmodel(state.params, state.buffers, held_x)
            right = (outputs.argmax(1) == held_y).float().mean()
            seen.append((float(F.cross_entropy(outputs, held_y)), 100 * float(right)))
    return torch.tensor(seen).mean(0)


table = {}
for epsilon, rate in RATES.items():
    for name, noise in SCHEMES.items():
        plan = plan_for(epsilon, noise)
        runs = [train(plan, seed, rate) for seed in SEEDS]
        table[epsilon, name] = torch.stack(runs, 1)
        loss, accuracy = table[epsilon, name].mean(1)
        print(f"epsilon {epsilon}, {name}: loss {loss:.3f}, {accuracy:.1f} %")

# %% As predicted, in the mean of five seeds: bands are better at epsilon 16, and worse
# at epsilon 1.
means = {key: values[0].mean() for key, values in table.items()}
assert means[16, "4 bands"] < means[16, "independent"]
assert means[1, "4 bands"] > means[1, "independent"]

# %% The ratio of losses on held-out digits, seed by seed, beside the predicted ratio of
# noise.
plt.style.use(
    "tableau-colorblind10"
)  # colours that colour-blind readers can tell apart
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
figure.suptitle(
    f"Four bands over independent noise: {SAMPLES} digits, {EPOCHS} epochs, "
    f"delta {DELTA:g}"
)
epsilons = (1, 2, 4, 8, 16)
ratios = [one / other for one, other in zip(curves[1], curves[0], strict=True)]
left.plot(epsilons, ratios, "C0o-")
left.set(ylabel="predicted noise, four bands / independent")
for epsilon in RATES:
    bands, plain = table[epsilon, "4 bands"][0], table[epsilon, "independent"][0]
    right.plot([epsilon] * len(SEEDS), bands / plain, "C1o", fillstyle="none")
    right.plot(epsilon, bands.mean() / plain.mean(), "C1_", markersize=24)
right.set(ylabel="held-out loss, four bands / independent")
for axes in (left, right):
    axes.axhline(1.0, color="black", linestyle=":")
    axes.set(xscale="log", xlabel=f"epsilon at delta {DELTA:g}, add or remove one")
    axes.set_xticks(epsilons, epsilons)
    axes.minorticks_off()
    axes.grid(alpha=0.3)

plt.show()
