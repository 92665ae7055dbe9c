"""Many models as one: an ensemble's doubt, a sweep, cross-validation.

All three are one run of stacked models. The members of a deep ensemble disagree where
they know little; members with rates of their own are a sweep; members with data of
their own are a cross-validation.
"""

# %% scikit-learn's digits; 500 of them are held out.
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import vgrad
from vgrad.ensemble import fold_indices, member, member_seed, predict
from vgrad.training import EnsembleState, ensemble_train_step

torch.set_num_threads(1)  # with models this small, more threads only wait
digits = load_digits()
order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
images = torch.tensor(digits.images, dtype=torch.float32)[order] / 16
labels = torch.tensor(digits.target)[order]
x, y, x_held, y_held = images[500:], labels[500:], images[:500], labels[:500]


def network() -> nn.Module:
    """One hidden layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def accuracy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the share of right answers, of each member if there is such an axis."""
    return (logits.argmax(-1) == targets).double().mean(-1)


# %% A deep ensemble: eight members, each from its own random numbers, trained at once.
# The optimizer is a single model's. Every member sees the data in its own order, so the
# batch has a member axis: in_dims=0.
MEMBERS, BATCH = 8, 64
seeds = [member_seed(0, i) for i in range(MEMBERS)]
fmodel, params, buffers = vgrad.stack(network, seeds=seeds)
loss = vgrad.batch_loss(fmodel, F.cross_entropy)
tx = vgrad.optim.adam(3e-3)
state = EnsembleState.create(tx, params, buffers, seed=0)
step = ensemble_train_step(loss, tx, in_dims=0)
source = torch.Generator().manual_seed(0)
for _ in range(12):
    orders = [torch.randperm(len(x), generator=source) for _ in range(MEMBERS)]
    for rows in torch.stack(orders).split(BATCH, 1):  # [E, B]
        state, metrics = step(state, x[rows], y[rows])

logits = vgrad.ensemble_forward(fmodel)(state.params, state.buffers, x_held)
joint = predict(fmodel, state.params, state.buffers, x_held)
shares, together = accuracy(logits, y_held), accuracy(joint.mean, y_held)  # [E], []
print("members  ", "  ".join(f"{share:.1%}" for share in shares.tolist()))
print(f"ensemble  {together:.1%}")
assert together >= shares.mean()

# A member is a model like any other.
first = fmodel(member(state.params, 0), member(state.buffers, 0), x_held)
torch.testing.assert_close(first, logits[0], rtol=1e-4, atol=1e-4)


# %% The members have never seen rotated digits. The mutual information is the part of
# the uncertainty that comes from their disagreement.
def turned(pictures: torch.Tensor, degrees: float) -> torch.Tensor:
    """Rotate pictures about their centres."""
    angle = torch.deg2rad(torch.tensor(degrees))
    cos, sin = angle.cos(), angle.sin()
    matrix = torch.stack(
        [torch.stack([cos, -sin, 0 * cos]), torch.stack([sin, cos, 0 * cos])]
    ).expand(len(pictures), 2, 3)
    grid = F.affine_grid(matrix, [len(pictures), 1, 8, 8], align_corners=False)
    return F.grid_sample(pictures[:, None], grid, align_corners=False)[:, 0]


print("\nturned by  accuracy  entropy  mutual information")
ANGLES, unsure = (0.0, 20.0, 40.0, 60.0), []
for degrees in ANGLES:
    seen = predict(fmodel, state.params, state.buffers, turned(x_held, degrees))
    unsure.append((seen.predictive_entropy.mean(), seen.mutual_information.mean()))
    right = accuracy(seen.mean, y_held)
    print(f"{degrees:9.0f}  {right:8.1%}  {unsure[-1][0]:7.3f}  {unsure[-1][1]:18.3f}")
upright, *others = unsure
for entropy, information in others:
    assert entropy > 1.5 * upright[0]
    assert information > 2 * upright[1]

# %% A sweep of learning rates as one run: a tensor [E] gives each member its own.
# All members start from the same weights and see the same batches.
rates = torch.logspace(-4, 1, 6)
fmodel, params, buffers = vgrad.stack(network, seeds=[member_seed(1, 0)])
params = {name: value.repeat_interleave(6, 0) for name, value in params.items()}
tx = vgrad.for_members(vgrad.optim.sgd, lr=rates, momentum=0.9)
state = EnsembleState.create(tx, params, buffers, seed=0)
step = ensemble_train_step(vgrad.batch_loss(fmodel, F.cross_entropy), tx)
for _ in range(6):
    for rows in torch.randperm(len(x), generator=source).split(BATCH):
        state, metrics = step(state, x[rows], y[rows])
logits = vgrad.ensemble_forward(fmodel)(state.params, state.buffers, x_held)
shares = accuracy(logits, y_held)
print("\nrate      accuracy")
for rate, share in zip(rates.tolist(), shares.tolist(), strict=True):
    print(f"{rate:<8.0e}  {share:8.1%}")
best, of_rates = int(shares.argmax()), 100 * shares
assert 0 < best < len(rates) - 1  # too small learns little, too large nothing
assert shares[best] > shares[0] + 0.2
assert shares[best] > shares[-1] + 0.2

# %% Cross-validation as one run: member k never sees fold k, which judges it.
FOLDS = 5
trained, validation = fold_indices(FOLDS, len(x), seed=2)  # [K, n - n/K], [K, n/K]
seeds = [member_seed(2, fold) for fold in range(FOLDS)]
fmodel, params, buffers = vgrad.stack(network, seeds=seeds)
tx = vgrad.optim.sgd(float(rates[best]), momentum=0.9)
state = EnsembleState.create(tx, params, buffers, seed=0)
step = ensemble_train_step(vgrad.batch_loss(fmodel, F.cross_entropy), tx, in_dims=0)
for _ in range(12):
    shuffled = torch.rand(trained.shape, generator=source).argsort(1)
    for rows in trained.gather(1, shuffled).split(BATCH, 1):
        state, metrics = step(state, x[rows], y[rows])
forward = vgrad.ensemble_forward(fmodel, in_dims=0)
logits = forward(state.params, state.buffers, x[validation])
shares = accuracy(logits, y[validation])
print("\nfolds    ", "  ".join(f"{share:.1%}" for share in shares.tolist()))
print(f"estimate  {shares.mean():.1%} +- {shares.std() / FOLDS**0.5:.1%}")
joint = predict(fmodel, state.params, state.buffers, x_held)
print(f"held out  {accuracy(joint.mean, y_held):.1%}")
assert abs(float(shares.mean() - accuracy(joint.mean, y_held))) < 0.05

plt.style.use(
    "tableau-colorblind10"
)  # colours that colour-blind readers can tell apart
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
figure.suptitle(f"Networks with one hidden layer on {len(x)} digits, seed 0")
entropies, informations = map(torch.stack, zip(*unsure, strict=True))
left.plot(ANGLES, entropies / upright[0], "o-", label="entropy")
left.plot(ANGLES, informations / upright[1], "s--", label="mutual information")
left.set(xlabel="digits turned by, degrees", ylabel="uncertainty, times that at 0")
left.set_title(f"What {MEMBERS} members do not know", fontsize="medium")
left.legend(loc="upper left")
right.plot(rates, of_rates, "C0o-")
right.set(xscale="log", xlabel="learning rate", ylabel="held-out accuracy, %")
right.set_title(f"A sweep of {len(rates)} rates in one run", fontsize="medium")
for axes in (left, right):
    axes.grid(alpha=0.3)

plt.show()
