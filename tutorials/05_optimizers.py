"""From `torch.optim` to pure functions: the same numbers, and more uses for them.

An optimizer of vgrad is two functions: `init(params)` makes a state, and
`update(grads, state, params)` returns updates and a new state. Nothing changes in
place. So a whole training run is a function: it can be mapped over many runs at once,
and it can be differentiated.
"""

# %% scikit-learn's digits and a small network, in float64 to compare curves.
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import vgrad
from vgrad import optim

torch.set_num_threads(1)  # with a model this small, more threads only wait
torch.manual_seed(0)
digits = load_digits()
order = torch.randperm(len(digits.target))
x = torch.tensor(digits.data, dtype=torch.float64)[order] / 16
y = torch.tensor(digits.target)[order]
x_held, y_held, x, y = x[:500], y[:500], x[500:], y[500:]
EPOCHS, BATCH = 3, 64
batches = [rows for _ in range(EPOCHS) for rows in torch.randperm(len(x)).split(BATCH)]
STEPS = len(batches)

model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double()
fmodel, start = vgrad.make_functional(model, disable_autograd_tracking=True)


def loss(params, rows):
    """Return the cross-entropy of a batch."""
    return F.cross_entropy(fmodel(params, x[rows]), y[rows])


# %% The loop with torch.optim: model, optimizer and scheduler change in place.
optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.01, weight_decay=0.1)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
curve_of_torch = []
for rows in batches:
    optimizer.zero_grad()
    value = F.cross_entropy(model(x[rows]), y[rows])
    value.backward()
    optimizer.step()
    scheduler.step()
    curve_of_torch.append(value.item())

# %% The loop with vgrad.optim: what changes goes in and comes out. The schedule is a
# function of the step count and part of the optimizer.
tx = optim.adamw(optim.schedules.cosine(0.01, STEPS), weight_decay=0.1)
params, state = start, tx.init(start)
value_and_grad = torch.func.grad_and_value(loss)
curve = []
for rows in batches:
    grads, value = value_and_grad(params, rows)
    params, state = optim.step(tx, grads, state, params)
    curve.append(value.item())

torch.testing.assert_close(
    torch.tensor(curve), torch.tensor(curve_of_torch), rtol=1e-9, atol=0
)
print(f"{STEPS} steps from {curve[0]:.4f} to {curve[-1]:.4f}, with both")

# %% Code that needs an optimizer of torch gets one.
adapted = optim.as_torch(optim.lion(1e-3), model.named_parameters())
assert isinstance(adapted, torch.optim.Optimizer)


# %% A training is a function of the rate: one optimizer, one loop, the loss at the end.
def trained(rate, batches):
    """Return the parameters after a step for each batch."""
    tx, params = optim.sgd(rate, momentum=0.9), start
    state = tx.init(params)
    for rows in batches:
        grads = torch.func.grad(loss)(params, rows)
        params, state = optim.step(tx, grads, state, params)
    return params


def held_out(params):
    """Return the cross-entropy of the held-out digits."""
    return F.cross_entropy(fmodel(params, x_held), y_held)


# %% A sweep is that function mapped over the rates: sixteen trainings in one run. The
# optimizer is made inside of the mapped function, where its rate is a single number.
rates = torch.logspace(-3, 1, 16, dtype=torch.float64)
members = torch.vmap(lambda rate: trained(rate, batches))(rates)
losses = torch.vmap(held_out)(members)
best = losses.argmin()
print(f"best of {len(rates)} rates: {rates[best]:.3f}, loss {losses[best]:.4f}")
assert 0 < best < len(rates) - 1

# Every member is the training that it would be alone.
single = trained(rates[best].item(), batches)
for name, value in single.items():
    torch.testing.assert_close(members[name][best], value, rtol=1e-6, atol=1e-9)


# %% The training run is differentiable, too: the gradient of the loss after ten steps
# flows through all updates, momentum included, to the rate of every single step.
def outcome(log_rates):
    """Return the loss after a step at each of the rates."""
    schedule = log_rates.exp()
    return held_out(trained(lambda count: schedule[count], batches[: len(log_rates)]))


constant = torch.log(rates)[:, None].expand(-1, 10)
of_constant = torch.vmap(outcome)(constant)
first = of_constant.min()
log_rates = constant[of_constant.argmin()].clone()

slopes = torch.func.grad(outcome)(log_rates)
shift = 1e-5 * torch.eye(10, dtype=torch.float64)[3]
difference = (outcome(log_rates + shift) - outcome(log_rates - shift)) / 2e-5
torch.testing.assert_close(slopes[3], difference, rtol=1e-4, atol=1e-8)

# %% So one more optimizer can learn the schedule. No sweep finds ten rates at once:
# they beat the best single rate for all steps.
meta, learned = optim.adam(0.05), {"log_rates": log_rates}
meta_state = meta.init(learned)
for _ in range(30):
    slopes = torch.func.grad(outcome)(learned["log_rates"])
    learned, meta_state = optim.step(meta, {"log_rates": slopes}, meta_state, learned)
last = outcome(learned["log_rates"])
print("\nlearned schedule:", *(f"{rate:.2f}" for rate in learned["log_rates"].exp()))
print(f"loss after 10 steps: {first:.4f} with the best rate, {last:.4f} with these")
assert last < 0.9 * first

plt.style.use(
    "tableau-colorblind10"
)  # colours that colour-blind readers can tell apart
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
figure.suptitle(f"SGD with momentum, one hidden layer, {len(x)} digits, seed 0")
left.plot(rates, losses, "o-")
left.set(xscale="log", yscale="log", xlabel="learning rate", ylabel="held-out loss")
left.set_title(f"{len(rates)} trainings of {STEPS} steps in one run", fontsize="medium")
right.plot(log_rates.exp(), "C1--", label=f"best constant rate: loss {first:.2f}")
right.plot(learned["log_rates"].exp(), "C0o-", label=f"learned: loss {last:.2f}")
right.set(xlabel="step", ylabel="learning rate", ylim=(0, 3.3))
right.set_title("A schedule learned through ten steps", fontsize="medium")
right.legend(loc="upper right")

plt.show()
