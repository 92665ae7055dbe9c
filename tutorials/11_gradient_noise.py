"""How large a batch is worth its price, step by step.

The gradient noise scale is the batch size at which the noise in a gradient is as large
as the gradient itself. With far fewer samples most of a step is noise; far more of them
are wasted. It grows while a model learns, so a run may start with small batches.

With g the gradient of one sample and G its mean it is tr(Cov g) / |G|^2 (McCandlish et
al., An Empirical Model of Large-Batch Training, arXiv 1812.06162).
"""

# %% Digits and a network of one hidden layer.
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import vgrad

SEED, BATCH, WINDOWS, STEPS = 0, 128, 7, 40
torch.set_num_threads(1)  # with a model this small, more threads only wait
torch.manual_seed(SEED)
digits = load_digits()
x = torch.tensor(digits.data, dtype=torch.float32) / 16
y = torch.tensor(digits.target)
model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
fmodel, params, buffers = vgrad.make_functional_with_buffers(
    model, disable_autograd_tracking=True
)
loss = vgrad.sample_loss(fmodel, F.cross_entropy)

# %% A step that knows its own noise. One call gives the gradient of the mean loss and
# its spread over the samples, so training needs no second backward pass.
tx = vgrad.optim.sgd(0.1)
state = tx.init(params)
moments_of = vgrad.gradient_moments(loss)


def training_step(params, state):
    """Return parameters and state after a step on a random batch, and its moments."""
    rows = torch.randint(len(x), (BATCH,))
    moments = moments_of(params, buffers, x[rows], y[rows])
    return *vgrad.optim.step(tx, moments.mean, state, params), moments


# %% Average, then divide. A batch gives unbiased estimates of trace and squared norm,
# but their ratio is anything, even negative. NoiseScale adds both up over a window of
# 40 steps, and divides at the end. All data, at four steps in each window, confirm it;
# they are all there is, so the squared norm is the one of their mean.
single, averaged, exact = [], [], []
for _ in range(WINDOWS):
    noise, trace, square = vgrad.NoiseScale(), 0.0, 0.0
    for step in range(STEPS):
        if step % 10 == 5:
            all_moments = moments_of(params, buffers, x, y)
            trace += float(all_moments.trace)
            square += float(sum(g.square().sum() for g in all_moments.mean.values()))
        params, state, moments = training_step(params, state)
        noise = noise.add(moments)
        single.append(float(moments.noise_scale))
    averaged.append(float(noise.value))
    exact.append(trace / square)
    print(
        f"loss {all_moments.losses.mean():.2f}: noise scale {averaged[-1]:5.1f} over "
        f"{STEPS} batches of {BATCH}, {exact[-1]:5.1f} with all data"
    )

# %% It grows several times over, and the average finds it.
assert averaged[-1] > 3 * averaged[0]
for estimate, true in zip(averaged, exact, strict=True):
    assert true / 1.4 < estimate < true * 1.4
misses = [abs(value / exact[at // STEPS] - 1) > 0.5 for at, value in enumerate(single)]
print(f"{sum(misses) / len(misses):.0%} of single batches are off by more than half")

# %% What it says about batch sizes. A step on B samples gets 1 / (1 + scale / B) of the
# progress of a step on all data. First 128 samples are plenty, in the end they are few.
plt.style.use(
    "tableau-colorblind10"
)  # colours that colour-blind readers can tell apart
figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.8), layout="constrained")
figure.suptitle(
    f"Gradient noise while a network of one hidden layer learns digits (seed {SEED})"
)
steps = range(len(single))
middles = [STEPS * (window + 0.5) for window in range(WINDOWS)]
left.plot(steps, single, "C2.", label=f"one batch of {BATCH}")
left.plot(middles, averaged, "C0o-", label=f"average over {STEPS} batches")
left.plot(middles, exact, "kx", markersize=9, label="all data")
left.set(yscale="log", xlabel="step", ylabel="noise scale, samples")
left.legend()
for number, size in enumerate((32, 128, 512)):
    shares = [100 / (1 + scale / size) for scale in averaged]
    right.plot(middles, shares, f"C{number}o-", label=str(size))
right.set(xlabel="step", ylabel="progress of a step, % of one on all data")
right.set_ylim(0, 120)
right.legend(title="samples in a batch", loc="upper center", ncols=3)
for axes in (left, right):
    axes.grid(alpha=0.3)

plt.show()
