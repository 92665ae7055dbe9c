"""The private trainer takes the steps of a loop by hand, whole or resumed."""

import pytest
import torch

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from transformers import (  # noqa: E402
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from vgrad import dp  # noqa: E402
from vgrad.dp import Plan, PrivateGradients, secret_key  # noqa: E402
from vgrad.integrations.transformers import (  # noqa: E402
    STATE,
    PrivateTrainer,
)

pytestmark = pytest.mark.filterwarnings("ignore")

WORDS, LENGTH, SAMPLES = 20, 8, 60
KEY = secret_key(seed=3)
BUDGET = {"epsilon": 8.0, "delta": 1e-3, "max_norm": 1.0}
STEPS = 10  # two epochs of batches of 12


def model(**changes):
    torch.manual_seed(1)
    sizes = {"vocab_size": WORDS, "n_embd": 8, "n_layer": 1, "n_head": 2}
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1)
    tokens = {"n_positions": LENGTH, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **rates, **tokens, **changes))


def texts(count=SAMPLES, seed=0):
    """Make texts of random words whose first three, the prompt, are no labels."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(WORDS, (count, LENGTH), generator=generator)
    labels = words.masked_fill(torch.arange(LENGTH) < 3, -100)
    rows = zip(words, labels, strict=True)
    return [{"input_ids": row, "labels": label} for row, label in rows]


def arguments(folder, **changes):
    usual = {"num_train_epochs": 2, "per_device_train_batch_size": 4}
    usual |= {"gradient_accumulation_steps": 3, "learning_rate": 1e-2}
    usual |= {"report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    usual |= {"use_cpu": True, "logging_steps": 1, "dataloader_pin_memory": False}
    return TrainingArguments(str(folder), **usual | changes)


def trainer(folder, stop=None, options=None, **changes):
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == stop:
                control.should_training_stop = control.should_save = True

    given = {"model": model(), "train_dataset": texts(), "key": KEY, **BUDGET}
    given |= {"callbacks": [Stop()], **(options or {})}
    return PrivateTrainer(args=arguments(folder, **changes), **given)


def parameters(trained):
    return {name: x.detach().clone() for name, x in trained.named_parameters()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_steps_equal_a_loop_by_hand(tmp_path):
    ours = model()
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    constant = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    options = {"model": ours, "optimizers": (optimizer, constant)}
    trained = trainer(tmp_path, options=options)
    assert trained.train().global_step == STEPS

    by_hand = model().train()
    private = PrivateGradients(
        by_hand, None, texts(), plan=trained.private.plan, key=KEY
    )
    optimizer = private.watch(torch.optim.SGD(by_hand.parameters(), lr=0.1))
    for _ in range(2):
        for batch in private.loader:
            private.backward(batch)
            optimizer.step()
    # Physical batches are added up in another order.
    for name, x in parameters(by_hand).items():
        torch.testing.assert_close(parameters(ours)[name], x, rtol=1e-5, atol=1e-6)
    assert trained.private.epsilon() == private.epsilon() <= 8.0


@pytest.mark.parametrize("stop", [3, 5])
def test_a_run_that_is_resumed_has_the_bits_of_a_whole_one(tmp_path, stop):
    whole = trainer(tmp_path / "whole")
    whole.train()
    first = trainer(tmp_path / "parts", stop, save_strategy="steps", save_steps=100)
    assert first.train().global_step == stop == first.private.step
    assert (tmp_path / "parts" / f"checkpoint-{stop}" / STATE).stat().st_mode & 63 == 0

    second = trainer(tmp_path / "parts")
    assert second.train(resume_from_checkpoint=True).global_step == STEPS
    assert_same(parameters(second.model), parameters(whole.model))
    assert second.private.epsilon() == whole.private.epsilon()
    assert second.state.epoch == 2.0
    with pytest.raises(RuntimeError, match="has taken the 10 steps of its plan"):
        second.train()


def test_a_run_goes_on_in_memory(tmp_path):
    """A new call of `train` begins a schedule of its own, and takes what is left."""
    run = trainer(tmp_path, stop=4)
    assert [run.train().global_step for _ in range(3)] == [4, 4, 2]
    assert run.private.step == STEPS


def test_a_checkpoint_without_the_private_state_is_refused(tmp_path):
    run = trainer(tmp_path, stop=3, save_strategy="steps", save_steps=100)
    run.train()
    for name in (STATE, "optimizer.pt"):
        path = tmp_path / "checkpoint-3" / name
        content = path.read_bytes()
        path.unlink()
        with pytest.raises(ValueError, match=f"without {name}. Epsilon would leave"):
            trainer(tmp_path).train(resume_from_checkpoint=str(path.parent))
        path.write_bytes(content)
    with pytest.raises(ValueError, match="No valid checkpoint"):
        trainer(tmp_path / "none").train(resume_from_checkpoint=True)


def whole_and_resumed(folder, options):
    """Return a run that was not stopped, and the same run resumed after 3 steps."""
    whole = trainer(folder / "whole", options=options)
    whole.train()
    saving = {"save_strategy": "steps", "save_steps": 3}
    trainer(folder / "parts", 3, options | {"model": model()}, **saving).train()
    resumed = trainer(folder / "parts", options=options | {"model": model()})
    resumed.train(resume_from_checkpoint=True)
    return whole, resumed


def masked(rows):
    """Replace words by chance, as collators of masked language models do."""
    ids = torch.stack([row["input_ids"] for row in rows])
    labels = torch.stack([row["labels"] for row in rows])
    return {
        "input_ids": ids.masked_fill(torch.rand(ids.shape) < 0.3, 0),
        "labels": labels,
    }


def test_a_resumed_run_repeats_what_a_collator_draws(tmp_path):
    options = {"data_collator": masked}
    whole, resumed = whole_and_resumed(tmp_path, options)
    assert_same(parameters(resumed.model), parameters(whole.model))
    with pytest.raises(ValueError, match="samples that do not depend on chance"):
        trainer(tmp_path, options=options, dataloader_num_workers=2)


def test_a_state_is_of_the_weights_beside_it(tmp_path, monkeypatch):
    """Also where a save over an older checkpoint is killed before its end."""
    run = trainer(tmp_path, stop=4, save_strategy="steps", save_steps=4)
    run.train()
    monkeypatch.setattr(run, "_save_rng_state", lambda folder: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.train()
    with pytest.raises(ValueError, match=f"without {STATE}"):
        trainer(tmp_path).train(resume_from_checkpoint=True)


def test_a_resume_that_fails_takes_back_no_step(tmp_path):
    run = trainer(tmp_path, save_strategy="steps", save_steps=5)
    run.train()
    (tmp_path / "checkpoint-5" / "model.safetensors").unlink()
    with pytest.raises(Exception, match="checkpoint"):
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert run.private.step == STEPS
    with pytest.raises(RuntimeError, match="has taken the 10 steps of its plan"):
        run.train()


class OwnOptimizer(PrivateTrainer):
    def create_optimizer(self, model=None):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        return self.optimizer


class Adds(TrainerCallback):
    """Changes a gradient between the release and the step."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        for parameter in model.parameters():
            parameter.grad.add_(1.0)


def test_steps_on_changed_gradients_raise_with_an_optimizer_of_a_subclass(tmp_path):
    options = {"train_dataset": texts(), "callbacks": [Adds()], **BUDGET}
    run = OwnOptimizer(model(), arguments(tmp_path), **options)
    with pytest.raises(RuntimeError, match="expected the gradients as"):
        run.train()


class Interrupts(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, **_):
        if state.global_step == 2:
            raise KeyboardInterrupt


def test_a_run_goes_on_after_an_interrupt(tmp_path):
    """The release that no step used stays counted."""
    run = trainer(tmp_path, options={"callbacks": [Interrupts()]})
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert run.private.step == 3
    run.remove_callback(Interrupts)
    assert run.train().global_step == STEPS - 3


def test_a_damaged_state_is_refused(tmp_path):
    run = trainer(tmp_path, stop=3, save_strategy="steps", save_steps=100)
    run.train()
    path = tmp_path / "checkpoint-3" / STATE
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="damaged"):
        trainer(tmp_path).train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    "changes", [{"bf16": True}, {"gradient_checkpointing": True}, {"max_steps": 4}]
)
def test_arguments_of_the_trainer_work(tmp_path, changes):
    run = trainer(tmp_path, **changes)
    taken = run.train().global_step
    assert taken == run.private.plan.steps == changes.get("max_steps", STEPS)
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert len(losses) == taken
    if "gradient_checkpointing" in changes:
        plain = trainer(tmp_path)
        plain.train()
        for name, x in parameters(plain.model).items():
            torch.testing.assert_close(parameters(run.model)[name], x)


def test_a_plan_decides_over_steps_and_batches(tmp_path):
    plan = Plan.for_epsilon(
        2.0, dataset_size=SAMPLES, batch_size=20, epochs=1, delta=1e-3, max_norm=0.5
    )
    options = dict.fromkeys(BUDGET) | {"plan": plan}
    run = trainer(tmp_path, options=options)
    assert run.train().global_step == 3
    assert run.private.epsilon() <= 2.0


def test_padding_is_masked_and_evaluation_works(tmp_path):
    rows = [
        {
            "input_ids": row["input_ids"][: 4 + n % 5],
            "labels": row["labels"][: 4 + n % 5],
        }
        for n, row in enumerate(texts())
    ]

    def collate(samples):
        pad = torch.nn.utils.rnn.pad_sequence
        words, labels = ([row[n] for row in samples] for n in ("input_ids", "labels"))
        mask = pad([torch.ones_like(w) for w in words], True)
        batch = {"input_ids": pad(words, True), "attention_mask": mask}
        return batch | {"labels": pad(labels, True, -100)}

    options = {"train_dataset": rows, "eval_dataset": rows, "data_collator": collate}
    run = trainer(tmp_path, options=options, eval_strategy="epoch")
    run.train()
    evaluated = [x for x in run.state.log_history if "eval_loss" in x]
    assert [x["epoch"] for x in evaluated] == [1.0, 2.0]


def test_samples_without_labels_add_nothing(tmp_path):
    """Whatever their words are."""
    rows, others = texts(), texts(seed=1)
    for row, other in zip(rows[::2], others[::2], strict=True):
        row["labels"] = torch.full_like(row["labels"], -100)
        other["labels"] = row["labels"]
    others[1::2] = rows[1::2]
    trained = [trainer(tmp_path, options={"train_dataset": x}) for x in (rows, others)]
    one, same = (run.train() and parameters(run.model) for run in trained)
    assert_same(one, same)
    assert all(x.isfinite().all() for x in one.values())


def test_workers_load_the_same_batches(tmp_path):
    options = {"train_dataset": texts()}
    alone, loaded = (
        trainer(tmp_path, options=options | {"model": model()}, **workers)
        for workers in ({}, {"dataloader_num_workers": 2})
    )
    alone.train()
    loaded.train()
    assert_same(parameters(loaded.model), parameters(alone.model))


def test_adapters_are_trained(tmp_path):
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(
        model(), peft.LoraConfig(target_modules=["c_attn"], r=2, lora_dropout=0.1)
    )
    before = parameters(adapted)
    run = trainer(tmp_path, 3, {"model": adapted}, save_strategy="steps", save_steps=99)
    run.train()
    changed = {n for n, x in parameters(adapted).items() if not x.equal(before[n])}
    assert changed == {n for n, x in adapted.named_parameters() if x.requires_grad}
    assert (tmp_path / "checkpoint-3" / "adapter_model.safetensors").exists()


class OwnLoss(PrivateTrainer):
    def compute_loss(self, *args, **options):
        return super().compute_loss(*args, **options)


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({"fp16": True}, {}, "fp16=True.*bf16=True"),
        ({"label_smoothing_factor": 0.1}, {}, "label_smoothing_factor"),
        ({"torch_compile": True}, {}, "torch_compile"),
        ({"dataloader_drop_last": True}, {}, "dataloader_drop_last"),
        ({"auto_find_batch_size": True}, {}, "auto_find_batch_size"),
        ({"train_sampling_strategy": "sequential"}, {}, "train_sampling_strategy"),
        ({"include_num_input_tokens_seen": "all"}, {}, "include_num_input_tokens_seen"),
        ({"push_to_hub": True}, {}, "push_to_hub"),
        ({"enable_jit_checkpoint": True}, {}, "enable_jit_checkpoint"),
        ({}, {"physical_batch_size": 3}, "physical_batch_size"),
        ({}, {"train_dataset": iter(())}, "a data set with a length"),
        ({"per_device_train_batch_size": 100}, {}, "at most the 60 samples"),
        ({}, {"epsilon": None}, "got no epsilon"),
        ({}, {"plan": object()}, "got both"),
        ({}, {"model": None}, "a module, and train_dataset="),
        ({}, {"train_dataset": None}, "a module, and train_dataset="),
        ({}, {"compute_loss_func": print}, "the loss that the model returns"),
        ({}, {"anything": 1}, "anything"),
    ],
)
def test_what_private_steps_cannot_keep_is_refused(tmp_path, changes, options, words):
    with pytest.raises((TypeError, ValueError), match=words):
        trainer(tmp_path, options=options, **changes)


def test_a_loss_of_the_trainer_is_refused(tmp_path):
    with pytest.raises(TypeError, match="the loss that the model returns"):
        OwnLoss(model(), arguments(tmp_path), train_dataset=texts(), **BUDGET)
    assert OwnLoss.compute_loss is not Trainer.compute_loss


@pytest.mark.parametrize(
    "fields",
    [
        {"noise": dp.noising.band_mf(2)},
        {"max_norm": dp.quantile_clip(count_deviation=5.0)},
        {"max_norm": {"*bias": 0.1, "*weight": 1.0}},
    ],
)
def test_a_checkpoint_keeps_noise_and_bounds_of_any_plan(tmp_path, fields):
    numbers = {"dataset_size": SAMPLES, "sampling_rate": 0.2, "steps": 6}
    numbers |= {"noise_multiplier": 1.0, "max_norm": 1.0, "delta": 1e-3}
    options = dict.fromkeys(BUDGET) | {"plan": Plan(**numbers | fields)}
    whole, resumed = whole_and_resumed(tmp_path, options)
    assert_same(parameters(resumed.model), parameters(whole.model))
    assert resumed.private.plan == whole.private.plan
