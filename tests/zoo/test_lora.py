"""Adapters of peft, fine-tuned privately on a frozen model of transformers."""

import copy
import itertools

import pytest
import torch

import vgrad
from tests import oracle
from tests.zoo import libraries
from tests.zoo.entries import SIZE
from tests.zoo.of_transformers import GPT2, READER, padded, sentences
from vgrad.training import TrainState, private_step

libraries.declare_vision_ops()
transformers = pytest.importorskip("transformers", reason="`make zoo` runs this")
peft = pytest.importorskip("peft", reason="`make zoo` runs this")

pytestmark = pytest.mark.filterwarnings("ignore")  # of old forms in others' files

STEPS = 3
SINGLE = 1e-5

BASES = {
    "BertForSequenceClassification": (READER, ["query", "value"]),
    "GPT2ForSequenceClassification": (GPT2 | {"pad_token_id": 0}, ["c_attn"]),
}


@pytest.fixture(params=BASES)
def base(request):
    """A model of transformers as it comes, with random weights."""
    torch.manual_seed(0)
    config, _ = BASES[request.param]
    kind = getattr(transformers, request.param)
    # Attention sees words: with the usual 0.02 float32 loses what the first steps add.
    return kind(kind.config_class(**config, initializer_range=0.3))


@pytest.fixture
def model(base):
    """The model with adapters, and a head that is trained with them."""
    _, targets = BASES[type(base).__name__]
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=targets)
    return peft.get_peft_model(copy.deepcopy(base), config)


@pytest.fixture
def batch():
    torch.manual_seed(1)
    batch = padded(sentences)()
    batch["input_ids"] = batch["input_ids"] * batch["attention_mask"]
    return batch


def begun(model, *, noise: float):
    plan = vgrad.dp.Plan(
        dataset_size=100,
        sampling_rate=SIZE / 100,
        noise_multiplier=noise,
        max_norm=1.0,
        steps=STEPS,
        delta=1e-5,
    )
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    tx = vgrad.optim.sgd(0.5)
    step = private_step(vgrad.sample_loss(fmodel, None), tx, plan)
    return fmodel, step, TrainState.create(tx, params, buffers, seed=0)


def taken(step, state, batch):
    yield state
    for _ in range(STEPS):
        state, _ = step(state, batch)
        yield state


def test_clipped_gradients_are_those_of_plain_autograd(model, batch):
    """At the start and after each step, in float32 against float64."""
    fmodel, step, first = begun(model, noise=0.5)
    compute = vgrad.per_sample_grad(vgrad.sample_loss(fmodel, None))
    plain = copy.deepcopy(model)
    for state in taken(step, first, batch):
        _, unknown = plain.load_state_dict(dict(state.params), strict=False)
        assert not unknown
        exact = oracle.model_gradients(plain, lambda m, x: m(**x).loss, (batch,), SIZE)
        given = state.params, state.buffers, batch
        grads, sums = compute(*given), step.source.transform(*given)
        oracle.assert_exact(grads, exact, SINGLE)
        assert sums.clipped > 0
        bound = step.source.plan.max_norm
        mean = {n: g / SIZE for n, g in oracle.clipped(exact, bound).items()}
        oracle.assert_exact(sums.grads, mean, SINGLE)


def test_every_adapter_moves_in_each_step(model, batch):
    """Without noise, which would move it as well. B starts at zero, so A waits once."""
    _, step, first = begun(model, noise=0.0)
    states = list(taken(step, first, batch))
    for number, (old, new) in enumerate(itertools.pairwise(states)):
        for name, value in new.params.items():
            moved = not torch.equal(value, old.params[name])
            assert moved == (number > 0 or "lora_A" not in name), (number, name)
        oracle.assert_exact(new.buffers, first.buffers, 0)


def test_trained_adapters_load_into_plain_peft(model, base, batch, tmp_path):
    fmodel, step, first = begun(model, noise=0.5)
    *_, last = taken(step, first, batch)
    fmodel.copy_to_(model, last.params, last.buffers)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path)
    with torch.no_grad():
        found = loaded(**batch).logits
        before = fmodel(first.params, first.buffers, **batch).logits
        assert torch.equal(found, fmodel(last.params, last.buffers, **batch).logits)
    assert (found != before).all()
