"""A population: the worst members of a sweep become copies of the best ones.

A sweep keeps every bad rate to its end, and no single rate is best from the first step
to the last. Population based training replaces the worst members by copies of the best
ones now and then, with the optimizer's state, and changes the copies' rates a little.
The rates become a schedule that nobody wrote.
"""

# %% scikit-learn's digits: some to train on, some to choose by, some to report on.
# Scores by which members are chosen are too good; those on the third part are not.
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import vgrad
from vgrad import optim
from vgrad.ensemble import take
from vgrad.training import EnsembleState, ensemble_train_step

torch.set_num_threads(1)  # with models this small, more threads only wait
digits = load_digits()
order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
images = torch.tensor(digits.images, dtype=torch.float32)[order] / 16
labels = torch.tensor(digits.target)[order]
x, chosen_x, held_x = images.split([897, 450, 450])
y, chosen_y, held_y = labels.split([897, 450, 450])


def network() -> nn.Module:
    """One hidden layer, and dropout."""
    first, last = nn.Linear(64, 64), nn.Linear(64, 10)
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), nn.Dropout(0.3), last)


# %% Sixteen members begin with rates over five decades. The rates are part of the
# optimizer's state: there they can be set, and they go along with a copy.
MEMBERS, BATCH, ROUNDS = 16, 64, 12
fmodel, params, buffers = vgrad.stack(network, seeds=range(MEMBERS))
tx = vgrad.for_members(optim.inject_hyperparams(optim.adam, lr=0.1))
step = ensemble_train_step(vgrad.batch_loss(fmodel, F.cross_entropy), tx)
forward = vgrad.ensemble_forward(fmodel.eval())


def with_rates(state: EnsembleState, rates: torch.Tensor) -> EnsembleState:
    """Set the rate of each member."""
    inner = optim.with_hyperparams(state.optimizer.members, lr=rates)
    return state._replace(optimizer=state.optimizer._replace(members=inner))


def accuracy(state: EnsembleState, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the share of right answers of each member, `[E]`."""
    logits = forward(state.params, state.buffers, x)
    return (logits.argmax(-1) == y).double().mean(-1)


def trained(replaced: int) -> tuple[EnsembleState, torch.Tensor]:
    """Train, and replace so many members a round; also return the rates, `[R, E]`."""
    state = EnsembleState.create(tx, params, buffers, seed=0)
    rates = torch.logspace(-5, 0, MEMBERS, dtype=torch.float64)
    source, history = torch.Generator().manual_seed(0), []
    for _ in range(ROUNDS):
        state = with_rates(state, rates)
        history.append(rates)
        for rows in torch.randperm(len(x), generator=source).split(BATCH):
            state, _ = step(state, x[rows], y[rows])
        ranked = accuracy(state, chosen_x, chosen_y).argsort(descending=True)
        best, worst = ranked[:replaced], ranked[MEMBERS - replaced :]
        members = torch.arange(MEMBERS).index_copy(0, worst, best)
        state, rates = take(state, members), rates[members]
        rates[worst] *= 2.0 ** (2 * torch.randint(2, (replaced,), generator=source) - 1)
    return state, torch.stack(history)


# %% In a sweep the rates at both ends are lost, with their members. In the population
# nearly all members end where the best of the sweep does, and its best is better.
separate, fixed = trained(replaced=0)
together, moved = trained(replaced=MEMBERS // 4)
sweep = accuracy(separate, held_x, held_y)
population = accuracy(together, held_x, held_y)
for name, shares in (("a sweep", sweep), ("a population", population)):
    low, median, high = shares.min(), shares.median(), shares.max()
    print(f"{name:12}  worst {low:.1%}  median {median:.1%}  best {high:.1%}")
assert population.max() > sweep.max()
assert population.min() > sweep.median() + 0.1

# %% Halving works alike: take the better half, and the same step trains fewer members.
# Copies draw dropout masks of their own.
half = accuracy(together, chosen_x, chosen_y).topk(MEMBERS // 2).indices
few, metrics = step(take(together, half), x[:BATCH], y[:BATCH])
assert metrics["loss"].shape == (MEMBERS // 2,)
same, metrics = step(take(together, [0, 0]), x[:BATCH], y[:BATCH])
assert metrics["loss"][0] != metrics["loss"][1]

# %% Rates of the middle spread first, and lower ones towards the end.
plt.style.use(
    "tableau-colorblind10"
)  # colours that colour-blind readers can tell apart
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
figure.suptitle(f"{MEMBERS} networks with one hidden layer on {len(x)} digits, seed 0")
rounds = torch.arange(1, ROUNDS + 1)
left.plot(rounds, moved, "C0.", markersize=5)
left.plot(rounds, moved.median(1).values, "C1-", label="median")
left.set(xlabel="round", ylabel="learning rate", yscale="log")
left.set_title("Rates of the population", fontsize="medium")
left.legend(loc="lower right")
for shares, style, name in ((sweep, "C0o", "sweep"), (population, "C1s", "population")):
    right.plot(range(1, MEMBERS + 1), 100 * shares.sort().values, style, label=name)
right.set(xlabel="member, from the worst to the best", ylabel="held-out accuracy, %")
right.set_title("After the same number of steps", fontsize="medium")
right.legend(loc="lower right")
for axes in (left, right):
    axes.grid(alpha=0.3)

plt.show()
