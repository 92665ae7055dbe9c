"""Fine-tune a model of transformers privately, with LoRA.

The model stays as it comes: its weights are frozen, and the layers that look at words
get small adapters of low rank. Clipping and noise concern these and a new head alone.
Needs transformers beside vgrad; nothing is downloaded.
"""

# %% A model that was trained on public data. Texts are made up: half of the 16 words of
# each are about one of 16 topics. BERT learns to name the topic.
import dataclasses

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn import functional as F
from transformers import BertConfig, BertForSequenceClassification

import vgrad
from vgrad.training import TrainState, private_step

SEED, WORDS, LENGTH, TOPICS, RANK = 0, 64, 16, 16, 4
SAMPLES, HELD_OUT, STEPS, EPSILON, DELTA = 4000, 500, 60, 3.0, 1e-4
torch.set_num_threads(1)  # with a model this small, more threads only wait
torch.manual_seed(SEED)


def texts(samples: int) -> dict[str, torch.Tensor]:
    """Make up texts about random topics."""
    topics = torch.randint(TOPICS, (samples,))
    about = topics[:, None] + TOPICS * torch.randint(WORDS // TOPICS, (samples, LENGTH))
    other = torch.randint(WORDS, (samples, LENGTH))
    half = torch.rand(samples, LENGTH) < 0.5
    return {"input_ids": torch.where(half, about, other), "labels": topics}


def rows_of(data: dict[str, torch.Tensor], rows: torch.Tensor):
    """Take some of the texts."""
    return {name: value[rows] for name, value in data.items()}


sizes = {"vocab_size": WORDS, "max_position_embeddings": LENGTH, "num_labels": TOPICS}
sizes |= {"hidden_size": 32, "intermediate_size": 64}
sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2}
config = BertConfig(**sizes, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
model = BertForSequenceClassification(config)
optimizer = torch.optim.Adam(model.parameters(), 3e-3, fused=True)
public = texts(4000)
for _ in range(5):
    for rows in torch.randperm(4000).split(100):
        optimizer.zero_grad()
        model(**rows_of(public, rows)).loss.backward()
        optimizer.step()

# %% A private task. Readers like half of the topics; only the private data say which.
liked = torch.randperm(TOPICS) % 2
private, held_out = texts(SAMPLES), texts(HELD_OUT)
for data in (private, held_out):
    data["labels"] = liked[data["labels"]]


# %% LoRA in a dozen lines. The product of two thin matrices is added to a layer. One of
# them starts at zero, so that at first nothing changes. Adapters of peft work as well.
class LoRA(nn.Module):
    """A linear layer, and an adapter of low rank beside it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        down = torch.randn(rank, base.in_features) / base.in_features**0.5
        self.down = nn.Parameter(down)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


for layer in model.bert.encoder.layer:
    attention = layer.attention.self
    attention.query = LoRA(attention.query, RANK)
    attention.value = LoRA(attention.value, RANK)
model.classifier = nn.Linear(config.hidden_size, 2)
model.num_labels = config.num_labels = 2

# %% Freeze the rest. Frozen parameters are buffers, without gradients and noise.
fmodel, params, buffers = vgrad.make_functional_with_buffers(
    model, disable_autograd_tracking=True
)
params, buffers = vgrad.freeze(
    params, buffers, ["*embeddings*", "*.base.*", "*.key.*", "*.dense.*", "*LayerNorm*"]
)
count, frozen = (sum(p.numel() for p in part.values()) for part in (params, buffers))
print(f"trained: {count} of {count + frozen} numbers")

# %% Train privately. The model returns its loss, so there is no criterion; a batch is
# the dictionary that it takes.
plan = vgrad.dp.Plan.for_epsilon(
    EPSILON,
    dataset_size=SAMPLES,
    sampling_rate=0.04,
    max_norm=1.0,
    steps=STEPS,
    delta=DELTA,
)
tx = vgrad.optim.adam(0.02)
loss = vgrad.sample_loss(fmodel, None)


def train(plan):
    """Return pairs of step and accuracy on texts that were held out, in per cent."""
    step = private_step(loss, tx, plan)
    state = TrainState.create(tx, params, buffers, seed=SEED)
    seen = []
    for rows in plan.sampler(state):
        if int(state.step) % 5 == 0:
            seen.append((int(state.step), accuracy(state)))
        state, _ = step(state, rows_of(private, torch.tensor(rows)))
    return [*seen, (STEPS, accuracy(state))]


def accuracy(state):
    """Return the share of held-out texts that are right, in per cent."""
    logits = fmodel(state.params, state.buffers, **held_out).logits
    return 100 * (logits.argmax(1) == held_out["labels"]).float().mean().item()


curves = {
    f"epsilon {EPSILON:g}": train(plan),
    "clipped, no noise": train(dataclasses.replace(plan, noise_multiplier=0.0)),
}
for name, seen in curves.items():
    print(f"{name}: {seen[0][1]:.0f} % right before and {seen[-1][1]:.0f} % after")
assert curves[f"epsilon {EPSILON:g}"][-1][1] > 80

plt.style.use(
    "tableau-colorblind10"
)  # colours that colour-blind readers can tell apart
figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
for (label, seen), form in zip(curves.items(), ("o-", "s--"), strict=True):
    axes.plot(*zip(*seen, strict=True), form, label=label)
axes.axhline(50, color="black", linestyle=":", label="guessing")
axes.set(xlabel="step", ylabel=f"accuracy on {HELD_OUT} texts, %")
axes.set_title(
    f"LoRA of rank {RANK} in a small BERT, {SAMPLES} made-up texts,\n"
    f"{count} of {count + frozen} numbers trained, delta {DELTA:g}, seed {SEED}"
)
axes.legend(loc="center right")
axes.grid(alpha=0.3)

plt.show()
