"""Private training with transformers' Trainer: a tiny BERT learns a made-up rule.

The model comes from a config and the sentences from a generator: nothing is downloaded.
The run stops in its second epoch, and a new trainer resumes it from the checkpoint.
"""

import tempfile

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    TrainerCallback,
    TrainingArguments,
)

from vgrad.integrations.transformers import PrivateTrainer

SENTENCES, LENGTH, EPOCHS = 1200, 8, 6


def sentences(count):
    """Make sentences whose label says if the first word is one of the first ten."""
    words = torch.randint(20, (count, LENGTH))
    labels = (words[:, 0] < 10).long()
    return [
        {"input_ids": ids, "labels": label}
        for ids, label in zip(words, labels, strict=True)
    ]


class StopAndSave(TrainerCallback):
    """Ends training after 15 steps."""

    def on_step_end(self, args, state, control, **options):
        """Save a checkpoint, and stop."""
        if state.global_step == 15:
            control.should_save = control.should_training_stop = True


def trainer(folder, data, *callbacks):
    """Make a trainer of a new model; 60 sentences are on the device at once."""
    config = BertConfig(
        vocab_size=20,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=LENGTH,
    )
    arguments = TrainingArguments(
        folder,
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=60,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        use_cpu=True,
        report_to="none",
        save_strategy="epoch",
        disable_tqdm=True,
    )
    return PrivateTrainer(
        BertForSequenceClassification(config),
        arguments,
        train_dataset=data,
        callbacks=[*callbacks],
        epsilon=8.0,
        delta=1e-4,
        max_norm=1.0,
    )


torch.manual_seed(0)
train, test = sentences(SENTENCES), sentences(300)
with tempfile.TemporaryDirectory() as folder:
    trainer(folder, train, StopAndSave()).train()
    resumed = trainer(folder, train)
    resumed.train(resume_from_checkpoint=True)

model, private = resumed.model.eval(), resumed.private
with torch.no_grad():
    words = torch.stack([row["input_ids"] for row in test])
    guess = model(words).logits.argmax(1)
accuracy = (guess == torch.stack([row["labels"] for row in test])).double().mean()
print(f"accuracy {accuracy:.1%} with epsilon {private.epsilon():.2f}")
assert private.step == EPOCHS * 10
assert accuracy > 0.8
