"""Private training with accelerate, which prepares all but the loader.

Of a `DataLoader` that it prepares accelerate reads one batch ahead, and on several
processes it deals batches out. `private.loader` is none and stays as it is. Gradients
are neither clipped nor scaled (`mixed_precision` is "no" or "bf16"): a step on changed
gradients raises.
"""

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

from vgrad.dp import PrivateGradients

EPOCHS, HELD_OUT = 15, 360

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
train = TensorDataset(images[HELD_OUT:], labels[HELD_OUT:])

model = torch.nn.Sequential(
    torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10)
)
private = PrivateGradients(
    model,
    torch.nn.functional.cross_entropy,
    train,
    epsilon=3.0,
    delta=1e-4,
    epochs=EPOCHS,
    batch_size=240,
    max_norm=1.0,
)
optimizer = private.watch(torch.optim.SGD(model.parameters(), lr=1.0))
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=60, gamma=0.5)

accelerator = Accelerator(cpu=True)
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

for _ in range(EPOCHS):
    for x, y in private.loader:
        private.backward(x.to(accelerator.device), y.to(accelerator.device))
        optimizer.step()
        scheduler.step()

with torch.no_grad():
    scores = model(images[:HELD_OUT].to(accelerator.device)).cpu()
accuracy = (scores.argmax(1) == labels[:HELD_OUT]).double().mean().item()
print(f"accuracy {accuracy:.1%} with epsilon {private.epsilon():.2f}")
assert accuracy > 0.8
