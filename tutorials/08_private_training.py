"""Private training in an existing loop, and a run that stops half-way.

Module, data set, optimizer and scheduler stay as they are. `PrivateGradients` provides
the loader, whose batches are Poisson samples, and writes clipped and noised gradients
into `.grad`, in place of `loss.backward()`. An interrupted run resumes in the middle of
an epoch, and ends with the same weights.
"""

# %% A data set. A sample is the data of one person, which training has to hide.
import io

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import vgrad

SEED, EPSILON, DELTA, EPOCHS, BATCH, HELD_OUT = 0, 3.0, 1e-4, 8, 120, 360
torch.set_num_threads(1)  # with a model this small, more threads only wait
torch.manual_seed(SEED)
digits = load_digits()


class Digits(Dataset):
    """Some of scikit-learn's digits."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        row = self.rows[index]
        image = torch.tensor(digits.images[row], dtype=torch.float32)
        return image / 16, int(digits.target[row])


order = torch.randperm(len(digits.target)).tolist()
dataset = Digits(order[HELD_OUT:])
images, labels = next(iter(DataLoader(Digits(order[:HELD_OUT]), batch_size=HELD_OUT)))


def accuracy(model):
    """Return the share of held-out digits that are right, in per cent."""
    return 100 * (model(images).argmax(1) == labels).float().mean().item()


# %% The parts of a run: a module, an optimizer and a scheduler of torch, a data set and
# a privacy budget. Batches and noise are functions of a secret key. Here it comes from
# a seed, to compare runs; by default it comes from the operating system.
def begin():
    """Return the parts of a new run."""
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), 1.0, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    private = vgrad.dp.PrivateGradients(
        model,
        F.cross_entropy,
        dataset,
        epsilon=EPSILON,
        delta=DELTA,
        epochs=EPOCHS,
        batch_size=BATCH,
        max_norm=1.0,
        key=vgrad.dp.secret_key(seed=SEED),
    )
    private.watch(optimizer)
    return {"model": model, "opt": optimizer, "schedule": scheduler, "private": private}


# %% The loop. Two names are new: `.loader` and `.backward`.
def train(run, stop_at=None):
    """Train to the end, or to the step at which the power fails. -> step, accuracy."""
    model, optimizer, scheduler, private = run.values()
    seen = []
    for _ in range(scheduler.last_epoch, EPOCHS):
        for x, y in private.loader:
            private.backward(x, y)  # in the place of loss.backward()
            optimizer.step()
            if private.step == stop_at:
                return seen
        scheduler.step()
        seen.append((private.step, accuracy(model)))
    return seen


run = begin()
curve = train(run)
plan = run["private"].plan
print(f"{curve[-1][1]:.1f} % of {HELD_OUT} digits, ", end="")
print(f"epsilon {run['private'].epsilon():.2f} at delta {DELTA:g}")
assert run["private"].epsilon() <= EPSILON

# %% A run that stops in the middle of an epoch. Its states are dictionaries, which
# `torch.load` reads with `weights_only=True`. The state of `PrivateGradients` holds the
# key: keep it as secret as the data.
STOP = plan.steps // 2 + 5
stopped = begin()
before = train(stopped, STOP)
file = io.BytesIO()  # a path, as a rule
torch.save({name: part.state_dict() for name, part in stopped.items()}, file)

# %% It resumes in new objects, with the same batches and noise as the run that was not
# stopped: the weights are equal bit by bit, and nothing was spent twice.
file.seek(0)
resumed = begin()
for name, state in torch.load(file, weights_only=True).items():
    resumed[name].load_state_dict(state)
after = train(resumed)
assert before + after == curve
for one, other in zip(
    resumed["model"].parameters(), run["model"].parameters(), strict=True
):
    assert torch.equal(one, other)

plt.style.use(
    "tableau-colorblind10"
)  # colours that colour-blind readers can tell apart
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
figure.suptitle(
    f"Private training on {len(dataset)} digits, one hidden layer, "
    f"delta {DELTA:g}, seed {SEED}"
)
left.plot(*zip(*curve, strict=True), "C0-", label="not interrupted")
left.plot(*zip(*before, strict=True), "C1s", label="until it stopped")
left.plot(*zip(*after, strict=True), "C1o", fillstyle="none", label="resumed")
left.set(ylabel=f"accuracy on {HELD_OUT} held-out digits, %")
left.legend(loc="lower right")
steps = [0, *(step for step, _ in curve)]
right.plot(steps, [plan.epsilon(step) for step in steps], "C0-")
right.set(ylabel="epsilon spent", ylim=(0, None))
for axes in (left, right):
    axes.axvline(STOP, color="black", linestyle=":")
    axes.set(xlabel="step")
    axes.grid(alpha=0.3)
right.text(STOP, 0.1, " stopped here")

plt.show()
