"""Modules of torch.nn as they are: recorded, with the numbers of a loop.

Single ops are in `tests/persample/test_rules.py`, models with a state in `tests/zoo`.

A sample has exactly the shapes that its case names, with or without batch dimensions.
The reference runs the module itself in float64, one sample after another.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import vgrad
from tests import losses, oracle
from tests.losses import Net

B = 3
# Torch says that it will not use nested tensors.
pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")


def padding(*shape):
    """Make booleans of which each row's last are set, a number of them per sample."""
    length = shape[-1]
    kept = torch.arange(length, length - B, -1).view(B, *[1] * len(shape))
    return (torch.arange(length) >= kept).expand(B, *shape)


class Case(NamedTuple):
    """A module, its sample, how it is called, and which parameters are expanded.

    The sample is shapes of random numbers, or batches.
    """

    module: Callable[[], nn.Module]
    sample: tuple
    call: Callable[..., Any]
    expanded: frozenset[str]


def case(module, *sample, call=lambda module, *x: module(*x), expanded=()):
    """Make a case of what makes a module, or of the layers of a Sequential as text."""
    make = partial(layers, module) if isinstance(module, str) else module
    return Case(make, sample, call, frozenset(expanded))


def layers(text):
    return nn.Sequential(*eval(f"[{text}]"))


class Loss(nn.Module):
    """Add up all that a module returns; with `first`, a layer stands in front of it."""

    def __init__(self, inner: nn.Module, call: Callable, *, first: bool) -> None:
        super().__init__()
        self.inner = inner
        self.call = call
        self.first = nn.Parameter(torch.tensor(0.7)) if first else None

    def forward(self, *x: Tensor) -> Tensor:
        if self.first is not None:
            x = [(a * self.first).sin() if a.is_floating_point() else a for a in x]
        found = pytree.tree_leaves(self.call(self.inner, *x))
        found = [each for each in found if isinstance(each, Tensor)]
        return sum((n * each).sin().sum() for n, each in enumerate(found, 1))


# Attention: E = 8 features in 2 heads, T = 5 queries, S = 7 keys.

CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)
BIAS = torch.linspace(-1, 1, 25, dtype=torch.float64).view(5, 5).sin()
PER_HEAD = torch.linspace(-2, 2, 50, dtype=torch.float64).view(2, 5, 5).cos()
UNWEIGHTED = {"need_weights": False}
FIRST = {"batch_first": True}


def itself(*sample, module=None, **options):
    """Attend to the same sequence; `options` are those of the call."""
    module = module or {}

    def call(made, x, padding=None):
        return made(x, x, x, key_padding_mask=padding, **options)

    expanded = ["bias_k", "bias_v"] if "add_bias_kv" in module else []
    make = partial(nn.MultiheadAttention, 8, 2, **module)
    return case(make, *sample, call=call, expanded=expanded)


def others(call, *sample, **options):
    """Attend to other sequences; `options` are those of the module."""
    sizes = {"kdim": sample[1][-1], "vdim": sample[-1][-1]}
    make = partial(nn.MultiheadAttention, 8, 2, **sizes, **options)
    return case(make, *sample, call=call)


def biased(*shape: int, need_weights: bool, **options: Any) -> Net:
    """Attend with a mask that is a parameter, or is computed from the sample."""

    def forward(self, x: Tensor, by: Tensor | None = None) -> tuple:
        mask = self.bias if by is None else self.bias * by
        return self.attend(x, x, x, attn_mask=mask, need_weights=need_weights)

    attend = nn.MultiheadAttention(8, 2, batch_first=True, **options)
    return Net(forward, attend=attend, bias=torch.randn(shape))


def heads(
    heads: int = 2, groups: int = 2, *, table: bool = False, **options: Any
) -> Net:
    """Attend by the function alone, with a bias of relative positions as in T5."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if table:
            place = torch.arange(5)
            mask = self.table(place[:, None] - place + 4).permute(2, 0, 1)
        q = self.q(x).unflatten(-1, (-1, 4)).transpose(-3, -2)
        k, v = self.kv(x).unflatten(-1, (-1, 8)).transpose(-3, -2).chunk(2, -1)
        found = F.scaled_dot_product_attention(q, k, v, mask, **options)
        return self.out(found.transpose(-3, -2).flatten(-2))

    parts = {"q": nn.Linear(8, heads * 4), "out": nn.Linear(heads * 4, 8)}
    parts |= {"table": nn.Embedding(9, 2)} if table else {}
    return Net(forward, kv=nn.Linear(8, groups * 8, bias=False), **parts)


TOKENS, TIME, PADDED = (1, 5, 8), (5, 1, 8), padding(1, 5)
TWO_MORE = {"add_bias_kv": True, "add_zero_attn": True}
MASKED = {"attn_mask": CAUSAL, "is_causal": True}
GROUPED = {"enable_gqa": True, "is_causal": True}
THREE = ((5, 1, 8), (7, 1, 6), (7, 1, 3))
ATTENTION = {
    "itself": itself(TOKENS, module=FIRST),
    "itself, no weights": itself(TOKENS, module=FIRST, **UNWEIGHTED),
    "time first": itself(TIME),
    "time first, no weights": itself(TIME, module={"bias": False}, **UNWEIGHTED),
    "no batch": itself((5, 8)),
    "no batch, no weights": itself((5, 8), module=FIRST, **UNWEIGHTED),
    "a batch in a sample": itself((5, 3, 8)),
    "weights of every head": itself(TOKENS, module=FIRST, average_attn_weights=False),
    "keys and values": others(lambda m, x, z: m(x, z, z), TOKENS, (1, 7, 8), **FIRST),
    "three inputs": others(lambda m, x, z: m(x, z, 2 * z), TIME, (7, 1, 8)),
    "keys are queries": others(lambda m, x, z: m(x, x, z), TIME, TIME),
    "values are queries": others(lambda m, x, z: m(x, z, x), TIME, TIME),
    "kdim and vdim": others(lambda m, *x: m(*x), *THREE),
    "kdim and vdim, no weights": others(
        lambda m, *x: m(*x, **UNWEIGHTED), *THREE, bias=False
    ),
    "bias_kv": itself(TOKENS, module={"add_bias_kv": True, **FIRST}),
    "bias_kv and a zero": itself(TIME, module=TWO_MORE),
    "bias_kv, a zero, padding and a mask": itself(
        TOKENS, PADDED, module={**TWO_MORE, **FIRST}, attn_mask=CAUSAL, **UNWEIGHTED
    ),
    "a zero": itself((5, 8), module={"add_zero_attn": True}),
    "padding": itself(TOKENS, PADDED, module=FIRST),
    "padding, no weights": itself(TIME, PADDED, **UNWEIGHTED),
    "padding, no batch": itself((5, 8), padding(5)),
    "causal": itself(TOKENS, module=FIRST, attn_mask=CAUSAL),
    "causal, no weights": itself(TOKENS, module=FIRST, **MASKED, **UNWEIGHTED),
    "causal and padding": itself(TOKENS, PADDED, module=FIRST, **MASKED, **UNWEIGHTED),
    "bias": itself(TIME, attn_mask=BIAS),
    "bias, no weights": itself(TIME, attn_mask=BIAS, **UNWEIGHTED),
    "bias of every head": itself(TIME, attn_mask=PER_HEAD),
    "bias of every head, no batch": itself((5, 8), attn_mask=PER_HEAD, **UNWEIGHTED),
    "bias is a parameter": case(partial(biased, 5, 5, need_weights=False), TOKENS),
    "bias is a parameter, weights": case(
        partial(biased, 2, 5, 5, need_weights=True), TOKENS, expanded=["bias"]
    ),
    "bias is computed": case(
        partial(biased, 2, 5, 5, need_weights=False), TOKENS, (5, 5), expanded=["bias"]
    ),
    "dropout in evaluation": case(
        lambda: biased(5, 5, need_weights=False, dropout=0.5).eval(), TOKENS
    ),
    "function": case(heads, TOKENS),
    "function, no batch": case(heads, (5, 8)),
    "function, causal": case(partial(heads, is_causal=True), TOKENS),
    "function, scaled": case(partial(heads, scale=0.3), TOKENS),
    "function, groups": case(partial(heads, 4, 2, enable_gqa=True), TOKENS),
    "function, one group": case(partial(heads, 4, 1, **GROUPED), (2, 5, 8)),
    "function, padding": case(heads, TOKENS, ~PADDED),
    "function, shared mask": case(heads, TOKENS, call=lambda m, x: m(x, ~CAUSAL)),
    "function, mask with a gradient": case(heads, TOKENS, (1, 2, 5, 5)),
    "function, positions": case(partial(heads, table=True), TOKENS),
}


# Transformers.


LAYERS_OF = {
    "encoder": (nn.TransformerEncoderLayer, nn.TransformerEncoder),
    "decoder": (nn.TransformerDecoderLayer, nn.TransformerDecoder),
}


def layer(kind: str, mode: str, **options: Any) -> nn.Module:
    """Make a layer of width 8, as trained or as evaluated."""
    made = LAYERS_OF[kind][0](8, 2, 12, **{"dropout": 0.0, **options})
    return made.train(mode == "train")


def stack(kind: str, mode: str, **options: Any) -> nn.Module:
    made = LAYERS_OF[kind][1](layer(kind, mode, **options), 2, nn.LayerNorm(8))
    return made.train(mode == "train")


def transformer(mode: str, **options: Any) -> nn.Module:
    return nn.Transformer(8, 2, 1, 2, 12, 0.0, **options).train(mode == "train")


def encoded(module, x, padding, mask=None):
    return module(x, mask, src_key_padding_mask=padding)


def decoded(module, x, z):
    return module(x, z, tgt_mask=CAUSAL, tgt_is_causal=True)


def translated(module, z, x):
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=x.dtype)
    return module(z, x, tgt_mask=mask, tgt_is_causal=True)


def transformers(mode: str, *, norm_first: bool) -> dict[str, Case]:
    """Make the cases of one mode with one order of norms."""
    options, masked = {"norm_first": norm_first, **FIRST}, partial(encoded, mask=CAUSAL)
    encoder, decoder = (partial(layer, kind, mode, **options) for kind in LAYERS_OF)
    causal = partial(stack, "decoder", mode, **options)
    both = partial(transformer, mode, **options)
    found = {
        "encoder layer": case(encoder, TOKENS),
        "encoder layer, padded": case(encoder, TOKENS, PADDED, call=masked),
        "decoder layer": case(decoder, TOKENS, (1, 7, 8)),
        "decoder, causal": case(causal, TOKENS, (1, 7, 8), call=decoded),
        "transformer": case(both, (1, 7, 8), TOKENS, call=translated),
    }
    return {f"{name}, {mode}": each for name, each in found.items()}


ENCODER = partial(stack, "encoder")
ENCODER_LAYER = partial(layer, "encoder", "eval")
TRANSFORMERS = {
    **transformers("train", norm_first=True),
    **transformers("eval", norm_first=False),  # which torch would run by a fused kernel
    "encoder, gelu, no bias": case(
        partial(ENCODER, "train", activation="gelu", bias=False, norm_first=True), TIME
    ),
    "encoder, causal": case(
        partial(ENCODER, "eval", norm_first=True),
        TIME,
        call=lambda m, x: m(x, mask=CAUSAL, is_causal=True),
    ),
    "encoder layer, time first": case(ENCODER_LAYER, TIME),
    "encoder layer, no batch": case(ENCODER_LAYER, (5, 8)),
    "encoder layer, dropout": case(
        partial(ENCODER_LAYER, dropout=0.5, **FIRST), TOKENS
    ),
    "decoder layer, no batch": case(partial(layer, "decoder", "train"), (5, 8), (7, 8)),
    "transformer, time first": case(partial(transformer, "train"), (7, 1, 8), TIME),
}


# Recurrent nets.


def started(kind: Callable[..., nn.Module]) -> Net:
    """Start from a state that another part computes."""

    def forward(self, x: Tensor, start: Tensor) -> tuple:
        h = self.state(start).view(2, -1, 4)
        return self.net(x, (h, h.tanh()) if self.net.mode == "LSTM" else h)

    return Net(forward, state=nn.Linear(3, 8), net=kind(3, 4, num_layers=2))


RECURRENT = {
    "gru, no batch": case(partial(nn.GRU, 4, 6, 2, bias=False), (5, 4)),
    "lstm, a batch": case(partial(nn.LSTM, 4, 6, 2, bias=False), (5, 2, 4)),
    "lstm with a state": case(partial(started, nn.LSTM), (5, 1, 3), (1, 3)),
    "gru with a state": case(partial(started, nn.GRU), (5, 1, 3), (1, 3)),
    "lstm, dropout": case(lambda: nn.LSTM(3, 4, 2, dropout=0.5).eval(), (5, 1, 3)),
}


# Convolutions and norms.


def evaluated(made: nn.Module) -> nn.Module:
    """Make a norm as if it had seen data."""
    with torch.no_grad():
        made.running_mean.normal_()
        made.running_var.uniform_(0.5, 2)
        for each in made.parameters():
            each.normal_()
    return made.eval()


CLASSIFIER = (
    "nn.Conv2d(2, 8, (3, 2), padding=(1, 0), stride=(1, 2)), nn.ReLU(inplace=True), "
    "nn.PixelShuffle(2), nn.Conv2d(2, 2, 3, padding=1, padding_mode='replicate'), "
    "nn.Unfold(2, stride=2), nn.Conv1d(8, 8, 1), nn.Fold((8, 4), 2, stride=2), "
    "nn.PReLU(2), nn.PixelUnshuffle(2), nn.ChannelShuffle(2), "
    "nn.ReflectionPad2d((1, 0, 1, 1)), nn.Conv2d(8, 4, 2, padding='valid', groups=2), "
    "nn.Upsample(size=(7, 5), mode='bilinear', align_corners=True), nn.MaxPool2d(2), "
    "nn.Conv2d(4, 2, 2), nn.AdaptiveAvgPool2d((2, 1)), nn.Flatten(), nn.Linear(4, 3)"
)
NORMS = (  # a shift in front of the instance norm would have no gradient
    "nn.Conv2d(2, 4, 2), nn.GroupNorm(2, 4), nn.Mish(), "
    "nn.Conv2d(4, 3, 2, bias=False), nn.InstanceNorm2d(3, affine=True), nn.GELU(), "
    "nn.Conv2d(3, 2, 1)"
)
RUNNING = "evaluated(nn.InstanceNorm2d(3, affine=True, track_running_stats=True))"
PIXELS = (1, 2, 4, 4)
CONVOLUTIONS = {
    "conv transposed, output size": case(
        partial(nn.ConvTranspose2d, 2, 3, 3, stride=2, padding=1),
        (1, 2, 3, 3),
        call=lambda m, x: m(x, output_size=[6, 6]),
    ),
    "classifier": case(CLASSIFIER, PIXELS, expanded=["7.weight"]),
    "group and instance norms": case(NORMS, PIXELS),
    "instance norm, running statistics": case(RUNNING, (1, 3, 3, 3)),
}

LAYERS = {
    "norms": case(
        "nn.RMSNorm(4), nn.Linear(4, 6), nn.LayerNorm((5, 6)), nn.RMSNorm((5, 6)), "
        "nn.LayerNorm(6, bias=False)",
        (1, 5, 4),
    ),
    "group norm of vectors": case("nn.GroupNorm(2, 6)", (1, 6)),
    "adaptive softmax, all classes": case(
        lambda: nn.AdaptiveLogSoftmaxWithLoss(6, 9, [3, 5], 2, head_bias=True),
        (1, 6),
        call=lambda m, x: m.log_prob(x),
    ),
}

CASES = [ATTENTION, TRANSFORMERS, RECURRENT, CONVOLUTIONS, LAYERS]
CASES = {name: each for cases in CASES for name, each in cases.items()}


ALONE = ["itself", "itself, no weights", "bias_kv", "bias is a parameter", "function"]
ALONE += ["function, positions", "encoder layer, train", "encoder layer, eval"]
ALONE += ["gru, no batch", "lstm with a state", "classifier"]
ALONE += ["group and instance norms", "norms"]
"""Cases that run without a layer in front, too: inputs then need no gradient."""


@pytest.mark.parametrize(
    ("name", "first"),
    [(name, True) for name in CASES] + [(name, False) for name in ALONE],
    ids=[*CASES, *(f"{name}, alone" for name in ALONE)],
)
def test_modules_are_recorded_with_the_numbers_of_a_loop(name, first):
    """Every quantity; few parameters have copies for samples."""
    module, sample, call, copied = CASES[name]
    model = Loss(module(), call, first=first).double()
    generator = torch.Generator().manual_seed(1)
    randn = partial(torch.randn, generator=generator, dtype=torch.float64)
    batch = tuple(x if isinstance(x, Tensor) else randn(B, *x) for x in sample)
    expected = oracle.model_gradients(
        model, lambda model, *one: model(*(leaf[0] for leaf in one)), batch, B
    )
    assert bool((oracle.norms(expected) > 1e-3).all())

    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    loss = lambda *given: fmodel(*given)  # noqa: E731
    params = {name: value.detach() for name, value in params.items()}
    options = {"buffers": buffers, "expected": expected, "strategy": "recorded"}
    losses.assert_quantities(loss, params, batch, **options)

    found = vgrad.explain(vgrad.per_sample_norm(loss))(params, buffers, *batch)
    assert found.strategy == "recorded"
    rows = [row for row in found.rows if "expanded over the samples" in row.why]
    names = {name for row in rows for name in row.names}
    assert names - {"first"} == {f"inner.{n}" for n in copied}
