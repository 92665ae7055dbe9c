"""Which training samples made a mistake?

Some held-out digits get the wrong class. An influence score says how each training
sample moved such a prediction, from gradients and curvature, without training again.
Here one training label in twenty is wrong, but about half of the most harmful samples
have wrong labels. Trained again without these few, the network gets most digits right.
"""

# %% Digits, of which one training label in twenty is wrong.
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.nn import functional as F

import vgrad
from vgrad import attribution, curvature, optim, training

SEED, WRONG, TRAIN, DECAY, STEPS = 0, 0.05, 1197, 1e-3, 150
torch.set_num_threads(1)  # with a model this small, more threads only wait
torch.manual_seed(SEED)
digits = load_digits()
order = torch.randperm(len(digits.target))
images = torch.tensor(digits.images, dtype=torch.float32)[order] / 16
classes = torch.tensor(digits.target)[order]
x, held_x = images[:TRAIN], images[TRAIN:]
true, held_y = classes[:TRAIN], classes[TRAIN:]
flipped = torch.rand(TRAIN) < WRONG
y = torch.where(flipped, (true + torch.randint(1, 10, (TRAIN,))) % 10, true)

# %% A network with one hidden layer. Weight decay is part of its objective. A network
# for each of several subsets of the samples is a member of one ensemble; the first
# subset is all of them.
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
fmodel, start, buffers = vgrad.make_functional_with_buffers(
    model, disable_autograd_tracking=True
)
loss = vgrad.sample_loss(fmodel, F.cross_entropy)


def objective(params: dict, buffers: dict, *sample: torch.Tensor) -> torch.Tensor:
    """Return the loss of a sample with weight decay."""
    squares = sum(param.square().sum() for param in params.values())
    return loss(params, buffers, *sample) + DECAY / 2 * squares


def trained(subsets: torch.Tensor) -> dict:
    """Train a model on each subset, `[S, N]`."""

    def mean(params: dict, buffers: dict, chosen: torch.Tensor) -> torch.Tensor:
        losses = torch.vmap(objective, (None, None, 0, 0))(params, buffers, x, y)
        return torch.where(chosen, losses, 0).sum() / chosen.sum()

    tx, count = optim.adam(2e-2), len(subsets)
    copies = {n: p.expand(count, *p.shape).clone() for n, p in start.items()}
    state = training.EnsembleState.create(tx, copies, buffers, seed=SEED)
    step = training.ensemble_train_step(mean, tx, in_dims=0)
    for _ in range(STEPS):
        state, _ = step(state, subsets)
    return state.params


everything = trained(torch.ones(1, TRAIN, dtype=torch.bool))
params = {name: stacked[0] for name, stacked in everything.items()}
guesses = fmodel(params, buffers, held_x).argmax(1)
mistakes = (guesses != held_y).nonzero().flatten()
print(f"{len(mistakes)} of {len(held_y)} held-out digits get the wrong class")

# %% The curvature of the loss, by EK-FAC. Weight decay has a curvature, too, which is
# part of the damping.
batches = list(zip(x.split(400), y.split(400), strict=True))
ggn = curvature.ggn(fmodel, "categorical")
inverse = curvature.ekfac(ggn, params, buffers, [(part,) for part, _ in batches])
by = {"curvature": inverse, "damping": 2 * DECAY}

# %% Wrong labels have a large influence on themselves. The area under the ROC curve
# is the share of pairs, of a wrong label and a right one, that are in order.
selves = attribution.self_influence(loss, params, buffers, batches, **by)
losses = F.cross_entropy(fmodel(params, buffers, x), y, reduction="none")
areas = [roc_auc_score(flipped.numpy(), score.numpy()) for score in (selves, losses)]
print(f"wrong labels found: influence on itself {areas[0]:.4f}, loss {areas[1]:.4f}")
assert min(areas) > 0.99

# %% The loss finds them, too. This network has not learned wrong labels by heart;
# tutorial 10 has one that did, and another score for it.

# %% Influence says more: which samples made each mistake. Positive is helpful.
REMOVED, queries = 20, mistakes[:6]
batch = held_x[queries], held_y[queries]
scores = attribution.influence(loss, params, buffers, batch, batches, **by)
harmful = scores.topk(REMOVED, largest=False).indices  # [Q, REMOVED]
share = flipped[harmful].float().mean()
print(f"wrong labels among the {REMOVED} most harmful: {share:.0%}")
assert share > 0.3

# %% The judge is training again. For each mistake a network is trained without its
# twenty most harmful samples, and another one without twenty at random.
count = len(queries)
removed = torch.cat([harmful, torch.rand(count, TRAIN).argsort()[:, :REMOVED]])
subsets = torch.ones(2 * count, TRAIN, dtype=torch.bool).scatter(1, removed, False)
retrained = trained(subsets)
forward = vgrad.ensemble_forward(fmodel)
logits = forward(retrained, buffers, batch[0])  # [2 Q, Q, 10]
members = torch.arange(2 * count)
logits = logits[members, members % count].view(2, count, 10)
without = [F.cross_entropy(rows, batch[1], reduction="none") for rows in logits]
before = F.cross_entropy(fmodel(params, buffers, batch[0]), batch[1], reduction="none")
right = (logits.argmax(2) == batch[1]).sum(1).tolist()
print(f"right without the harmful: {right[0]} of {count}; at random: {right[1]}")
assert right[0] > right[1]
assert (without[0] < before).all()

# %% Each row is a mistake, with samples that helped and harmed its right class.
# Colours that colour-blind readers can tell apart.
plt.style.use("tableau-colorblind10")
figure = plt.figure(figsize=(9.5, 5.2), layout="constrained")
figure.suptitle(
    f"{count} mistakes of a network trained on {TRAIN} digits, {flipped.sum()} of them "
    f"with wrong labels (seed {SEED})"
)
left, right_half = figure.subfigures(1, 2, width_ratios=(5, 3))
rows = min(count, 4)
helpful = scores.topk(3).indices
for row, line in enumerate(left.subplots(rows, 7)):
    shown = [*helpful[row].tolist(), *harmful[row, :3].tolist()]
    query = int(queries[row])
    titles = [f"is {held_y[query]}\nguess {guesses[query]}"]
    titles += [
        f"label {y[n]}\n" + (f"is {true[n]}!" if flipped[n] else "") for n in shown
    ]
    pictures = [held_x[query], *x[shown]]
    for axes, picture, title in zip(line, pictures, titles, strict=True):
        axes.imshow(picture.numpy(), cmap="gray_r")
        axes.set(xticks=[], yticks=[])
        axes.set_title(title, fontsize="small")
left.suptitle("mistake, three helpful and three harmful samples", fontsize="medium")
axes = right_half.subplots()
places = torch.arange(count)
for values, shift, name in (
    (before, -0.25, "all samples"),
    (without[1], 0.0, f"without {REMOVED} at random"),
    (without[0], 0.25, f"without the {REMOVED} most harmful"),
):
    axes.bar((places + shift).numpy(), values.numpy(), 0.25, label=name)
axes.set(xlabel="mistake", ylabel="loss at its right class", xticks=range(count))
axes.grid(alpha=0.3, axis="y")
right_half.legend(loc="outside upper center")

plt.show()
