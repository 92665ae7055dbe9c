"""Private training with Lightning: manual optimization and a checkpoint that resumes.

With automatic optimization Lightning clears `.grad` after `training_step`, so a step
would raise. With `use_distributed_sampler=True` several processes would draw batches of
their own, which raises as well. What Lightning clips are gradients of automatic
optimization alone.
"""

import logging
import tempfile
import warnings
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

from vgrad.dp import PrivateGradients

EPOCHS, HELD_OUT = 12, 360

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
train = TensorDataset(images[HELD_OUT:], labels[HELD_OUT:])


class Digits(LightningModule):
    """A network whose gradients are private."""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10)
        )
        self.private = PrivateGradients(
            self.net,
            torch.nn.functional.cross_entropy,
            train,
            epsilon=3.0,
            delta=1e-4,
            epochs=EPOCHS,
            batch_size=240,
            max_norm=1.0,
        )

    def train_dataloader(self):
        return self.private.loader

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.net.parameters(), lr=1.0)
        return self.private.watch(optimizer)

    def training_step(self, batch):
        self.private.backward(*batch)
        self.optimizers().step()

    def on_train_epoch_end(self):
        self.log("epsilon", self.private.epsilon())

    # The file is as secret as the data: it holds the key.
    def on_save_checkpoint(self, checkpoint):
        checkpoint["private"] = self.private.state_dict()

    def on_load_checkpoint(self, checkpoint):
        self.private.load_state_dict(checkpoint["private"])


def trainer(epochs):
    """Make a trainer that writes nothing of its own."""
    return Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", ".*does not have many workers.*")
torch.manual_seed(0)
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "half.ckpt"
    first = trainer(EPOCHS // 2)
    first.fit(Digits())
    first.save_checkpoint(path)
    model = Digits()
    trainer(EPOCHS).fit(model, ckpt_path=path, weights_only=True)

with torch.no_grad():
    scores = model.net(images[:HELD_OUT])
accuracy = (scores.argmax(1) == labels[:HELD_OUT]).double().mean().item()
print(f"accuracy {accuracy:.1%} with epsilon {model.private.epsilon():.2f}")
assert model.private.step == EPOCHS * len(model.private.loader)
assert accuracy > 0.8
