"""Find mislabelled samples by their gradients.

A network that has learned every label by heart still gives a wrong one away: its
gradient pulls against the gradients of similar samples. Random projections keep the
angles between gradients and are small enough to compare every sample with all others.
"""

# %% Digits, of which one label in twenty is wrong. Nothing below uses the true labels
# but the scores at the end.
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import vgrad

SEED, WRONG, DIM, NEAREST = 0, 0.05, 256, 10
torch.set_num_threads(1)  # with a model this small, more threads only wait
torch.manual_seed(SEED)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32) / 16
true = torch.tensor(digits.target)
samples = len(true)
flipped = torch.rand(samples) < WRONG
others = (true + torch.randint(1, 10, (samples,))) % 10
labels = torch.where(flipped, others, true)
print(f"{flipped.sum()} of {samples} labels are wrong")

# %% Train until every label is learned. This is any loop of yours; vgrad has no part in
# it.
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = torch.optim.Adam(model.parameters(), 2e-2, fused=True)
for _ in range(110):
    for rows in torch.randperm(samples).split(450):
        optimizer.zero_grad()
        F.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()
logits = model(images).detach()
learned = (logits.argmax(1) == labels).float()
print(f"{learned.mean():.1%} of the given labels learned, ", end="")
print(f"{learned[flipped].mean():.1%} of the wrong ones")
assert learned[flipped].mean() > 0.9

# %% The gradient of every sample, projected to 256 numbers. The model has 38 thousand
# parameters; its gradients would take 280 MB.
fmodel, params, buffers = vgrad.make_functional_with_buffers(
    model, disable_autograd_tracking=True
)
loss = vgrad.sample_loss(fmodel, F.cross_entropy)
project = vgrad.per_sample_projection(loss, DIM, seed=SEED)
grads = project(params, buffers, images, labels).double()  # [B, DIM]

# %% Three scores. The loss is what everyone has at hand. The leverage g (G'G)^-1 g says
# how far a gradient lies from all others.
losses = F.cross_entropy(logits.double(), labels, reduction="none")
leverage = (grads * torch.linalg.solve(grads.mT @ grads, grads.mT).mT).sum(1)

# The third asks the samples that are most like this one, those whose gradients lie most
# nearly on the same line. Where labels agree they point the same way, else opposite.
directions = F.normalize(grads)
cosines = (directions @ directions.mT).fill_diagonal_(0)
nearest = cosines.abs().topk(NEAREST).indices  # [B, NEAREST]
contradiction = -cosines.gather(1, nearest).mean(1)


# %% How good they are. The area under the ROC curve is the share of pairs, one wrong
# label and one right, in which the wrong one has the higher score.
def area(score: torch.Tensor) -> float:
    """Return the area under the ROC curve."""
    pairs = score[flipped, None] - score[~flipped]
    return ((pairs > 0) + 0.5 * (pairs == 0)).double().mean().item()


scores = {"contradiction": contradiction, "leverage": leverage, "loss": losses}
areas = {name: area(score) for name, score in scores.items()}
print("area under the ROC curve:", ", ".join(f"{k} {v:.4f}" for k, v in areas.items()))
assert areas["loss"] < areas["leverage"] < areas["contradiction"]
assert areas["contradiction"] > 0.99

# %% What a person would see first: the samples that are contradicted most. Below each
# is the sample that contradicts it most.
SHOWN = 6
order = contradiction.argsort(descending=True)[:SHOWN]
pairs = torch.stack([order, cosines[order].argmin(1)])

plt.style.use(
    "tableau-colorblind10"
)  # colours that colour-blind readers can tell apart
figure = plt.figure(figsize=(9.5, 3.8), layout="constrained")
figure.suptitle(
    f"{flipped.sum()} wrong labels among {samples} digits, all of them learned by a "
    f"network of one hidden layer (seed {SEED})"
)
left, right = figure.subfigures(1, 2, width_ratios=(2, 3))
axes = left.subplots()
checked = 100 * torch.arange(1, samples + 1) / samples
for name, score in scores.items():
    hits = flipped[score.argsort(descending=True)].cumsum(0)
    axes.plot(checked, 100 * hits / flipped.sum(), label=f"{name}: {areas[name]:.3f}")
share = 100 * flipped.float().mean()
axes.plot([0, share, 100], [0, 100, 100], "k:", label="best possible")
axes.set(xlabel="samples checked, %", ylabel="wrong labels found, %", xlim=(0, 30))
axes.legend(title="score: area under ROC", loc="lower right")
axes.grid(alpha=0.3)
for axes, row in zip(right.subplots(2, SHOWN).flat, pairs.flatten(), strict=True):
    axes.imshow(images[row].numpy(), cmap="gray_r")
    axes.set(xticks=[], yticks=[])
    axes.set_title(f"given {labels[row]}\ntrue {true[row]}", fontsize="medium")
right.suptitle("contradicted most, and below by which sample", fontsize="medium")

plt.show()
