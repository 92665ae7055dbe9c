"""Models that were not written for this package run as they are.

They come from transformers, tiny and with random weights: nothing is downloaded. The
reference is the module itself, sample by sample, under plain autograd in float64.
"""

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import vgrad
from tests import oracle
from tests.zoo import libraries
from vgrad.persample import EXPANDED

libraries.declare_vision_ops()
transformers = pytest.importorskip("transformers")

# Swin ends in an adaptive pooling that torch's vmap runs sample by sample.
pytestmark = pytest.mark.filterwarnings("ignore:.*as_strided_:vgrad.FallbackWarning")

B, T = 3, 7
EXACT, SINGLE = 1e-10, 1e-6

KEY_BIASES = ("key.bias", "key_proj.bias", "k_proj.bias", "k_lin.bias")
"""Softmax ignores what is added to all keys: such a gradient is zero but for rounding.

With rotary positions it is not; then the comparison is merely less strict.
"""

EAGER = ("eager",)


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A model and a batch for it.

    Attributes:
        model: name of the class.
        config: what its configuration gets.
        inputs: the keyword arguments, for a batch.
        attention: the implementations to try.
        expanded: endings of the names of parameters that no rule takes.
        rounded: endings of those that the model casts to float32. Their gradients and
            the clipped sum of these are float32 numbers.
        target: for a loss of ours; without it the model computes its own.
    """

    model: str
    config: dict[str, Any]
    inputs: dict[str, Tensor]
    attention: tuple[str, ...] = ("sdpa", "eager")
    expanded: tuple[str, ...] = ()
    rounded: tuple[str, ...] = ()
    target: Tensor | None = None


def words(seed):
    return torch.randint(3, 48, (B, T), generator=torch.Generator().manual_seed(seed))


def pictures(size):
    source = torch.Generator().manual_seed(0)
    images = torch.randn(B, 3, size, size, generator=source)
    return {"pixel_values": images, "labels": torch.tensor([0, 1, 2])}


MASK = torch.arange(T) < torch.tensor([T, T - 2, T - 4])[:, None]
PADDED = {"attention_mask": MASK.long()}
PADDED_4D = {"attention_mask": MASK[:, None, None].expand(B, 1, T, T)}
TEXT = {"input_ids": words(0), "labels": words(1)}
SENTENCES = {"input_ids": words(0), "labels": torch.tensor([0, 1, 1])}
LAST = torch.full((B, 1), 49)  # from where CLIP reads a text's features
PAIRS = {"input_ids": torch.cat([words(0), LAST], 1)}
PAIRS |= {"pixel_values": pictures(8)["pixel_values"]}

SMALL = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
SMALL |= dict(intermediate_size=24)
READER = SMALL | dict(vocab_size=50, max_position_embeddings=16)
WRITER = READER | dict(num_key_value_heads=1)
TIED = WRITER | dict(tie_word_embeddings=True)
EXPERTS = WRITER | dict(num_local_experts=4, experts_implementation="batched_mm")
VIEWER = SMALL | dict(image_size=8, patch_size=4, num_labels=3)
GPT2 = dict(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2)
GPT2 |= dict(bos_token_id=1, eos_token_id=2)
DISTIL = dict(vocab_size=50, max_position_embeddings=16, dim=16, n_layers=2)
DISTIL |= dict(n_heads=2, hidden_dim=24)
OPT = READER | dict(ffn_dim=24, word_embed_proj_dim=16)
T5 = dict(vocab_size=50, d_model=16, d_kv=8, d_ff=24, num_heads=2, num_layers=2)
T5 |= dict(decoder_start_token_id=0)
BLOOM = dict(vocab_size=50, hidden_size=16, n_layer=1, n_head=2)
MAMBA = dict(vocab_size=50, hidden_size=16, num_hidden_layers=2, state_size=4)
MAMBA |= dict(time_step_rank=2, use_cache=False)
SWIN = dict(image_size=16, patch_size=2, embed_dim=8, window_size=4, num_labels=3)
SWIN |= dict(depths=[2, 2], num_heads=[2, 2])
CONVNEXT = dict(hidden_sizes=[8, 12], depths=[1, 1], num_stages=2, patch_size=2)
CONVNEXT |= dict(num_labels=3)
CLIP = dict(vision_config=VIEWER, projection_dim=8)
CLIP |= dict(text_config=READER | dict(eos_token_id=49, pad_token_id=0))

RMS = ("norm.weight", "norm_f.weight")  # scales of norms that are written out
STACKED = ("gate_up_proj", "down_proj")  # of all experts, some of which are read
MIXER = ("A_log", ".D", "dt_proj.bias")
PLACES = ("cls_token", "position_embeddings")
LOGITS = ("logit_scale", "class_embedding")

ONES, CONV = torch.ones(B, 1, 1), "ConvNextForImageClassification"
BERT = "BertForSequenceClassification"
MODELS = {
    "gpt2": Case("GPT2LMHeadModel", GPT2, TEXT),
    "gpt2_padded": Case("GPT2LMHeadModel", GPT2, TEXT | PADDED, EAGER),
    "opt": Case("OPTForCausalLM", OPT, TEXT),
    "llama": Case("LlamaForCausalLM", WRITER, TEXT, expanded=RMS),
    "llama_padded": Case("LlamaForCausalLM", WRITER, TEXT | PADDED, EAGER, RMS),
    "qwen2": Case("Qwen2ForCausalLM", TIED, TEXT, expanded=RMS),
    "mixtral": Case("MixtralForCausalLM", EXPERTS, TEXT, expanded=RMS + STACKED),
    "mamba": Case("MambaForCausalLM", MAMBA, TEXT, EAGER, RMS + MIXER, MIXER),
    "bert": Case(BERT, READER, SENTENCES),
    "bert_padded": Case(BERT, READER, SENTENCES | PADDED_4D),
    "roberta": Case("RobertaForSequenceClassification", READER, SENTENCES),
    "distilbert": Case("DistilBertForSequenceClassification", DISTIL, SENTENCES),
    "t5": Case("T5ForConditionalGeneration", T5, TEXT, expanded=RMS),
    "t5_padded": Case("T5ForConditionalGeneration", T5, TEXT | PADDED_4D, expanded=RMS),
    "vit": Case("ViTForImageClassification", VIEWER, pictures(8), expanded=PLACES),
    "swin": Case("SwinForImageClassification", SWIN, pictures(16)),
    "convnext": Case(CONV, CONVNEXT, pictures(16), EAGER, ("layer_scale_parameter",)),
    "clip": Case("CLIPModel", CLIP, PAIRS, expanded=LOGITS, target=ONES),
}

LOOP = EXPERTS | {"experts_implementation": "eager"}
CACHE = MAMBA | {"use_cache": True}
DEBERTA = "DebertaV2ForSequenceClassification"
HARD = [  # they ask for values, write into what all share, are of the old style
    Case("GPT2LMHeadModel", GPT2, TEXT | PADDED),
    Case(BERT, READER, SENTENCES | PADDED),
    Case(DEBERTA, READER, SENTENCES, EAGER),
    Case("MixtralForCausalLM", LOOP, TEXT),
    Case("MambaForCausalLM", CACHE, TEXT, EAGER, rounded=MIXER),
    Case("BloomForCausalLM", BLOOM, TEXT, EAGER),
]


def similarity(output, target):
    return (output.logits_per_image - target).square().sum()


def built(case, attention, dtype=torch.float64):
    """Return the model; noise moves weights away from initial zeros and ones."""
    torch.manual_seed(0)
    kind = getattr(transformers, case.model)
    config = kind.config_class(**case.config, attn_implementation=attention)
    model = kind(config).eval().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def batch_of(case, dtype=torch.float64):
    given = (case.inputs,) if case.target is None else (case.inputs, case.target)
    return pytree.tree_map(
        lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, given
    )


def of_model(case, model, dtype=torch.float64):
    """Return the loss of one sample and what it is called with."""
    fmodel, params, buffers = vgrad.make_functional_with_buffers(
        model, disable_autograd_tracking=True
    )
    loss = vgrad.sample_loss(fmodel, None if case.target is None else similarity)
    return loss, (params, buffers, *batch_of(case, dtype))


@functools.cache
def reference(case, attention):
    """Return the loss, its arguments and the gradients of every sample."""
    model = built(case, attention)

    def run(model, inputs, *target):
        output = model(**inputs)
        return similarity(output, *target) if target else output.loss

    expected = oracle.model_gradients(model, run, batch_of(case), B)
    return *of_model(case, model), expected


def assert_exact(case, found, expected):
    """Compare each parameter with its largest entry."""
    assert found.keys() == expected.keys()
    largest = max(float(value.abs().max()) for value in expected.values())
    for name, value in expected.items():
        size = float(value.abs().max())
        if name.endswith(KEY_BIASES):
            size = largest
        assert size > 1e-6 * largest, f"{name} has no part in the loss"
        tolerance = SINGLE if name.endswith(case.rounded) else EXACT
        assert float((found[name] - value).abs().max()) <= tolerance * size, name


def assert_norms(found, expected):
    torch.testing.assert_close(found, oracle.norms(expected), rtol=EXACT, atol=0)


@pytest.mark.parametrize(
    ("name", "attention"),
    [(name, each) for name, case in MODELS.items() for each in case.attention],
)
@pytest.mark.parametrize("strategy", ["auto", "recorded"])
def test_gradients_norms_and_clipped_sums_are_exact(name, attention, strategy):
    case = MODELS[name]
    loss, given, expected = reference(case, attention)
    found = vgrad.per_sample_grad(loss, strategy=strategy)(*given)
    assert_exact(case, found, expected)
    assert_norms(vgrad.per_sample_norm(loss, strategy=strategy)(*given), expected)
    bound = 0.8 * float(oracle.norms(expected).max())  # at least one is clipped
    clip = vgrad.clipped_grad(loss, max_norm=bound, strategy=strategy)
    assert_exact(case, clip(*given).grads, oracle.clipped(expected, bound))


@pytest.mark.parametrize("name", MODELS)
def test_explain_tells_the_strategy_and_what_was_expanded(name):
    case = MODELS[name]
    loss, given, _ = reference(case, case.attention[0])
    found = vgrad.explain(vgrad.clipped_grad(loss, max_norm=1.0))(*given)
    assert found.strategy == "recorded"
    assert {each for row in found.rows for each in row.names} == given[0].keys()
    rows = (row for row in found.rows if row.why.startswith(EXPANDED))
    expanded = {each for row in rows for each in row.names}
    assert expanded == {each for each in given[0] if each.endswith(case.expanded)}


@pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning")
@pytest.mark.parametrize("case", HARD)
def test_what_vmap_alone_cannot_run_is_exact(case):
    loss, given, expected = reference(case, case.attention[0])
    for strategy in ("auto", "loop"):
        found = vgrad.per_sample_grad(loss, strategy=strategy)(*given)
        assert_exact(case, found, expected)
        assert_norms(vgrad.per_sample_norm(loss, strategy=strategy)(*given), expected)


def test_dropout_of_a_model_in_training_mode_has_to_be_allowed():
    case = MODELS["gpt2"]
    loss, given = of_model(case, built(case, "sdpa").train())
    with pytest.raises(RuntimeError, match='Pass randomness="different"'):
        vgrad.per_sample_norm(loss)(*given)
    torch.manual_seed(0)
    clip = vgrad.clipped_grad(loss, max_norm=1e-3, randomness="different")
    total = sum(float(g.square().sum()) for g in clip(*given).grads.values()) ** 0.5
    assert 0 < total <= B * 1e-3 * (1 + 1e-6)


@pytest.mark.parametrize("name", ["gpt2", "llama", "vit"])
def test_strategies_agree_under_autocast(name):
    case = MODELS[name]
    loss, given = of_model(case, built(case, "sdpa", torch.float32), torch.float32)
    full = vgrad.per_sample_grad(loss)(*given)
    with vgrad.autocast("cpu", dtype=torch.bfloat16):
        found = {
            strategy: vgrad.per_sample_grad(loss, strategy=strategy)(*given)
            for strategy in ("recorded", "vmap", "loop")
        }
    length = oracle.norms(full)
    for grads in found.values():
        assert {grad.dtype for grad in grads.values()} == {torch.float32}
        apart = {key: grad - found["loop"][key] for key, grad in grads.items()}
        lost = {key: grad - full[key] for key, grad in grads.items()}
        assert (oracle.norms(apart) <= 2**-6 * length).all()
        assert (oracle.norms(lost) >= 2**-10 * length).all()  # it was in bfloat16
