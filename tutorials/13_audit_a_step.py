"""Audit a private step: bound how much it spends from below, without data.

The accountant bounds from above what a right step spends. Whether the step is right is
another question. An audit puts canaries into its batches, samples with known gradients,
each by a coin, and guesses from the noisy gradient which of them were there. If that
goes better than the claim allows, the step is broken.
"""

# %% A network for digits and the step of a plan. The audit takes no sample of them.
from dataclasses import replace

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn import functional as F

import vgrad

SEED, CANARIES, SIGNIFICANCE = 0, 1200, 0.01
torch.set_num_threads(1)  # with a model this small, more threads only wait
torch.manual_seed(SEED)
model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
loss = vgrad.sample_loss(fmodel, F.cross_entropy)
tx = vgrad.optim.sgd(0.5)
state = vgrad.training.TrainState.create(tx, params, buffers)
run = {"dataset_size": 1200, "sampling_rate": 0.1, "steps": 300, "delta": 1e-4}
numbers = {"noise_multiplier": 2.0, "max_norm": 1.0, **run}
plan = vgrad.dp.Plan(**numbers)


def audited(plan, canaries=CANARIES):
    """Return the audit of the step of a plan."""
    step = vgrad.training.private_step(loss, tx, plan)
    options = {"significance": SIGNIFICANCE, "seed": SEED}
    return plan.audit(step, state, canaries=canaries, **options)


# %% A right step. The claim is the one of two steps that hold every canary or none of
# them; a run, which samples, spends less on each. Gradients of canaries are longer than
# the bound of the clip, up to 10^4 times, and lie in all parameters or in one.
right = audited(plan)
print(right)
assert not right.exceeded


# %% A broken step: its noise is a part of the noise that the plan claims.
class Broken(vgrad.dp.Plan):
    """A plan whose noise is too small by a factor, as by a forgotten division."""

    share = 1.0

    def step_noise(self, *arguments, **place):
        """Return the noise of a step."""
        noise = super().step_noise(*arguments, **place)
        return replace(noise, deviation=self.share * noise.deviation)


broken = Broken(**numbers)
broken.__dict__["share"] = 0.5
half = audited(broken)
print(half)
assert half.exceeded

# %% The bound says which claim would stand, for noise of any size. The estimate of mu
# is a little below the truth, so that noise of nine tenths is not seen.
shares = [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3]
bounds = []
for share in shares:
    broken.__dict__["share"] = share
    bounds.append(audited(broken).mu.value)
truths = [right.claimed_mu / share for share in shares]
assert all(bound < truth for bound, truth in zip(bounds, truths, strict=True))

# %% Guesses assume nothing of the distribution of scores, and show less. Even if all of
# them are right, so many show no larger epsilon than the ceiling.
counts = [150, 300, 600, 1200, 2400]
results = [audited(plan, count) for count in counts]
shown = [result.epsilon.value for result in results]
ceilings = [result.epsilon.ceiling for result in results]
broken.__dict__["share"] = 0.3
of_broken = [audited(broken, count).epsilon.value for count in counts]
for count, ceiling in zip(counts, ceilings, strict=True):
    print(f"{count} canaries show an epsilon of {ceiling:.2f} at most")
claims = [result.claimed_epsilon for result in results]  # at a delta for each count
assert all(value < claim for value, claim in zip(shown, claims, strict=True))
assert of_broken[-1] > claims[-1]

# %% The picture: scores, bounds of mu and bounds of epsilon.
plt.style.use(
    "tableau-colorblind10"
)  # colours that colour-blind readers can tell apart
figure, axes = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
figure.suptitle(
    f"Audits of the private step of a network for digits, {CANARIES:,} canaries, "
    f"significance {SIGNIFICANCE} (seed {SEED})"
)
scores, mus, epsilons = axes
bins = torch.linspace(-5, 7, 49).tolist()
for number, (name, result) in enumerate({"right": right, "half": half}.items()):
    style = {"bins": bins, "histtype": "step", "density": True, "color": f"C{number}"}
    scores.hist(result.included, **style, label=f"{name}: in")
    scores.hist(result.excluded, **style, linestyle=":", label=f"{name}: out")
scores.set(xlabel="score, in deviations of the noise claimed", ylabel="density")
scores.legend(title="noise", fontsize="small")
mus.plot(shares, truths, "k:", label="spent")
mus.plot(shares, bounds, "C0o-", label="bound of the audit")
mus.axhline(right.claimed_mu, color="C1", label="claim")
mus.set(xlabel="noise, as a part of the claimed", ylabel="mu of two steps")
mus.invert_xaxis()
mus.legend(fontsize="small")
epsilons.plot(counts, ceilings, "k:", label="ceiling: all guesses right")
epsilons.plot(counts, of_broken, "C2^-", label="bound, 0.3 of the noise")
epsilons.plot(counts, shown, "C0o-", label="bound, right step")
epsilons.plot(counts, claims, "C1", label="claim")
epsilons.set(xscale="log", xlabel="canaries", ylabel="epsilon, from guesses")
epsilons.set_xticks(counts, [str(count) for count in counts])
epsilons.minorticks_off()
epsilons.legend(fontsize="small")
for panel in axes:
    panel.grid(alpha=0.3)

plt.show()
