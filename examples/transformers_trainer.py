"""Private training with transformers' Trainer: a tiny BERT learns a made-up rule.

The model comes from a config and the sentences from a generator: nothing is downloaded.
The trainer clips gradients by default (`max_grad_norm=1.0`). This is switched off, as
each sample's gradient was clipped before there was noise. So are accumulation and mixed
precision with a scaler. A step on gradients that were changed raises.
"""

import tempfile

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
)

from vgrad.dp import PrivateGradients

SENTENCES, LENGTH, EPOCHS = 1200, 8, 6


def sentences(count):
    """Make sentences whose label says if the first word is one of the first ten."""
    words = torch.randint(20, (count, LENGTH))
    labels = (words[:, 0] < 10).long()
    return [
        {"input_ids": ids, "labels": label}
        for ids, label in zip(words, labels, strict=True)
    ]


class PrivateTrainer(Trainer):
    """A trainer whose gradients come from `private`."""

    def __init__(self, private, **options):
        super().__init__(**options)
        self.private = private

    def get_train_dataloader(self):
        return self.private.loader

    def create_optimizer(self, *args, **kwargs):
        return self.private.watch(super().create_optimizer(*args, **kwargs))

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        inputs = self._prepare_inputs(inputs)
        return self.private.backward(inputs)["loss"].nan_to_num()  # of an empty batch


torch.manual_seed(0)
train, test = sentences(SENTENCES), sentences(300)
model = BertForSequenceClassification(
    BertConfig(
        vocab_size=20,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=LENGTH,
    )
)
private = PrivateGradients(
    model,
    None,
    train,
    epsilon=8.0,
    delta=1e-4,
    epochs=EPOCHS,
    batch_size=120,
    max_norm=1.0,
)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        num_train_epochs=EPOCHS,
        learning_rate=1e-2,
        max_grad_norm=0.0,
        gradient_accumulation_steps=1,
        fp16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    PrivateTrainer(private, model=model, args=arguments).train()

model.eval()
with torch.no_grad():
    words = torch.stack([row["input_ids"] for row in test])
    guess = model(words).logits.argmax(1)
accuracy = (guess == torch.stack([row["labels"] for row in test])).double().mean()
print(f"accuracy {accuracy:.1%} with epsilon {private.epsilon():.2f}")
assert private.step == EPOCHS * 10
assert accuracy > 0.8
