"""A Laplace posterior: one trained network that is unsure where it has seen nothing.

An ensemble costs as many trainings as it has members. Laplace's approximation takes one
network as it is: around its parameters, how much the loss bends says how far they could
have ended elsewhere. The outputs of a Gaussian of parameters are Gaussian too, and
vgrad takes their covariance from Kronecker factors, without a Jacobian.
"""

# %% scikit-learn's digits: some to train on, some to choose a prior by, some to report
# on, which are turned by angles that no training sample has.
from dataclasses import replace

import matplotlib.pyplot as plt
import torch
from sklearn.calibration import calibration_curve
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import vgrad
from vgrad import curvature
from vgrad.ensemble import EnsemblePrediction, member, predict
from vgrad.training import EnsembleState, ensemble_train_step

torch.set_num_threads(1)  # with models this small, more threads only wait
digits = load_digits()
order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
images = torch.tensor(digits.images, dtype=torch.float32)[order] / 16
labels = torch.tensor(digits.target)[order]
x, chosen_x, held_x = images.split([897, 300, 600])
y, chosen_y, held_y = labels.split([897, 300, 600])


def network() -> nn.Module:
    """One hidden layer."""
    first, last = nn.Linear(64, 32), nn.Linear(32, 10)
    return nn.Sequential(nn.Flatten(), first, nn.Tanh(), last)


def turned(pictures: torch.Tensor, degrees: float) -> torch.Tensor:
    """Rotate pictures about their centres."""
    angle = torch.deg2rad(torch.tensor(degrees))
    cos, sin = angle.cos(), angle.sin()
    matrix = torch.tensor([[cos, -sin, 0], [sin, cos, 0]]).expand(len(pictures), 2, 3)
    grid = F.affine_grid(matrix, [len(pictures), 1, 8, 8], align_corners=False)
    return F.grid_sample(pictures[:, None], grid, align_corners=False)[:, 0]


# %% An ensemble of ten, trained as one. Its first member is the network to go on with.
fmodel, params, buffers = vgrad.stack(network, seeds=range(10))
tx = vgrad.for_members(vgrad.optim.adam, lr=1e-2)
state = EnsembleState.create(tx, params, buffers, seed=0)
step = ensemble_train_step(vgrad.batch_loss(fmodel, F.cross_entropy), tx)
for _ in range(500):
    state, _ = step(state, x, y)
params, buffers = member(state.params, 0), member(state.buffers, 0)

# %% Its posterior takes one pass over the training data. The prior is the one of the
# largest marginal likelihood, or the one that predicts other data best.
data = list(zip(x.split(300), y.split(300), strict=True))
posterior = curvature.laplace(fmodel, "categorical", params, buffers, data)
evidence = posterior.fit_prior()
priors = torch.logspace(-1, 2, 7).tolist()
others = [replace(posterior, prior_precision=prior) for prior in priors]
chosen = max(others, key=lambda fit: fit.log_likelihood([(chosen_x, chosen_y)]))
for name, fit in (("evidence", evidence), ("other data", chosen)):
    value = float(fit.log_marginal_likelihood())
    print(f"prior by {name:10}  {fit.prior_precision:6.2f}  log p(y) {value:7.1f}")
assert evidence.log_marginal_likelihood() > chosen.log_marginal_likelihood()

# %% All of them are probabilities, so the same functions judge them.
ANGLES, DEGREES = torch.arange(0.0, 46, 5).tolist(), 20.0


def predictions(degrees: float) -> dict[str, torch.Tensor]:
    """Return the probabilities of each kind, `[N, C]`."""
    pictures = turned(held_x, degrees)
    ensemble = predict(fmodel, state.params, state.buffers, pictures)
    return {
        "one network": fmodel(params, buffers, pictures).softmax(1).detach(),
        "ensemble of ten": ensemble.mean,
        "Laplace, prior by other data": chosen.predict(pictures),
        "Laplace, prior by evidence": evidence.predict(pictures),
    }


losses: dict[str, list[float]] = {}
for degrees in ANGLES:
    for name, prediction in predictions(degrees).items():
        losses.setdefault(name, []).append(float(F.nll_loss(prediction.log(), held_y)))
print(f"\n{'turned by, degrees':30}", *(f"{degrees:5.0f}" for degrees in ANGLES[::3]))
for name, values in losses.items():
    print(f"{name:30}", *(f"{value:5.2f}" for value in values[::3]))
one, ten, by_data, by_evidence = losses.values()
assert by_data[0] < one[0]  # of digits as they were, nearly as good as ten networks
assert by_data[-1] < ten[-1] < one[-1]  # of digits that are turned, better
assert by_evidence[-1] < 0.5 * ten[-1]  # with a wide posterior far better, at a price:
assert by_evidence[0] > 2 * by_data[0]

# %% Draws of outputs, or of parameters, are like members of an ensemble.
pictures = turned(held_x, 30.0)
drawn = EnsemblePrediction.from_logits(chosen.draw(pictures, count=100, seed=0))
ensemble = predict(fmodel, state.params, state.buffers, pictures)
print("\nmutual information at 30 degrees")
print(f"ensemble of ten  {ensemble.mutual_information.mean():.3f}")
print(f"Laplace          {drawn.mutual_information.mean():.3f}")
assert drawn.mutual_information.mean() > ensemble.mutual_information.mean()
assert chosen.sample(10, seed=0)["1.weight"].shape == (10, 32, 64)

# %% One figure of all four.
plt.style.use(
    "tableau-colorblind10"
)  # colours that colour-blind readers can tell apart
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
figure.suptitle(f"Networks with one hidden layer on {len(x)} digits, seed 0")
for (name, prediction), style in zip(
    predictions(DEGREES).items(), ("C0o-", "C1s--", "C2^-.", "C3v:"), strict=True
):
    left.plot(ANGLES, losses[name], style, label=name, markersize=4)
    confidence, guess = prediction.max(1)
    accuracy, confidence = calibration_curve(guess == held_y, confidence, n_bins=8)
    right.plot(confidence, accuracy, style, markersize=4)
left.set(xlabel="digits turned by, degrees", ylabel="negative log-likelihood, nats")
left.set_title("Digits turned as no training sample is", fontsize="medium")
left.legend(loc="upper left", fontsize="small")
right.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
right.set(xlabel="confidence", ylabel="accuracy")
right.set_title(f"Turned by {DEGREES:.0f} degrees: calibration", fontsize="medium")
for axes in (left, right):
    axes.grid(alpha=0.3)

plt.show()
