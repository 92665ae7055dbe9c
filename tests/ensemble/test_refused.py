"""Errors of functions of an ensemble, whose messages name argument and value."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vgrad
from tests.ensemble.test_contract import CASES, build
from tests.ensemble.test_stacking import mlp, models
from tests.losses import randn
from vgrad import ensemble
from vgrad.ensemble import group, stack
from vgrad.training import EnsembleState

ONES, X, STACK = torch.ones(5, 4), randn(6, 5), stack(models())
THREE, TWO, SCALAR, NONE = (torch.ones(shape) for shape in (3, 2, (), (0, 2)))
_, FMODEL, PARAMS, BUFFERS = build(CASES["mlp"], 3)
NAMES = vars(ensemble) | globals()
NAMES |= {
    "EnsembleState": EnsembleState,
    "ENTRIES": (PARAMS, BUFFERS),
    "LESS": PARAMS | {"0.bias": PARAMS["0.bias"][:2]},
    "NORM": stack([nn.BatchNorm1d(5).double() for _ in range(3)]),
    "ONE_MODEL": mlp(),
    "PAIR": {"a": torch.ones(2, 3), "b": TWO},
    "MISSING": {n: x for n, x in STACK[1].items() if n != "0.weight"},
    "SUMS": {"w": torch.zeros(3, 4)},
    "UNEVEN": {"a": torch.zeros(2, 3), "b": torch.zeros(3, 3)},
    "AT": {"key": vgrad.dp.secret_key(seed=0), "step": 0},
    "GRAD": torch.ones(3, requires_grad=True),
    "LOSS": vgrad.sample_loss(FMODEL, F.cross_entropy),
    "TX": vgrad.optim.sgd(0.1),
    "W": ({"w": randn(3, 4)}, {}, ONES),
    "forward": ensemble.ensemble_forward,
    "gradient": ensemble.ensemble_grad,
    "clipped": ensemble.ensemble_clipped_grad,
    "product": lambda params, buffers, x: (params["w"] * x).mean(),
}
REFUSED = [
    # Forward passes.
    ("forward(FMODEL, strategy='fast')", "strategy='fast'.*one of 'auto', 'vmap'"),
    ("forward(FMODEL, randomness='none')", "randomness='none'.*one of 'error'"),
    ("forward(FMODEL, chunk_size=0)", "chunk_size=0.*whole number >= 1"),
    ("forward(FMODEL, typo=1)", "_forward.typo=...*among chunk_size, in_dims.*'typo'"),
    ("forward(FMODEL, layout=1)", "expected options among .*got 'layout'"),
    ("gradient(product, dims=0)", "ensemble_grad.dims=...*has_aux, in_dims, rand"),
    ("forward(FMODEL, in_dims=(0, 0))(*ENTRIES, X)", r"in_dims=\(0, 0\).*the 1 items"),
    ("forward(FMODEL, in_dims=0)(*ENTRIES, X)", "3 members along axis 0 of .* 0.*6, 5"),
    ("forward(FMODEL, in_dims=2)(*ENTRIES, X)", "3 members along axis 2 of item 0"),
    ("forward(FMODEL, shared=['typo'])(*ENTRIES, X)", "parameter or buffer, got none"),
    ("forward(FMODEL)(LESS, {}, X)", r"3 members .* of '0.bias', got shape \(2, 8\)"),
    ("forward(FMODEL)([*PARAMS], {}, X)", "params.*dictionary"),
    ("forward(FMODEL, chunk_size=2).with_buffers(*ENTRIES, X)", r"\).with_buf.*None"),
    ("forward(lambda p, b, x, y: x, chunk_size=2)(*ENTRIES, X, X[:4])",
     r"one size, got \[4, 6"),
    ("forward(lambda p, b, x: (x, None))(*ENTRIES, X)", "NoneType"),
    ("forward(lambda p, b, x: (x, None), strategy='loop')(*ENTRIES, X)", "NoneType"),
    ("forward(NORM[0], chunk_size=2)(*NORM[1:], X)", "batch statistics"),
    ("forward(NORM[0], chunk_size=2, strategy='loop')(*NORM[1:], X)", "batch stat"),
    # Gradients.
    ("gradient('no')", "loss='no'.*expected a function loss"),
    ("gradient(product, strategy='fast')", "strategy='fast'.*one of"),
    ("gradient(product, randomness='x')", "randomness='x'.*one of"),
    ("gradient(product, in_dims=0)(*W)", r"in_dims=\(0,\).*3 members along axis 0"),
    ("gradient(product)(*W, loss_scale=TWO)", "shape .2,.*of the 3 mem"),
    ("gradient(product)(*W, loss_scale=torch.ones(3, 2))", "shape .3, 2."),
    ("clipped(LOSS, max_norm=[1.0, 2.0])(*ENTRIES, X, THREE)", "each of the 3 members"),
    ("clipped(LOSS, max_norm=GRAD)", "tensor that requires grad.*detach"),
    ("clipped(LOSS, max_norm=1.0, typo=1)", r"ensemble_clipped_grad\(typo=...\): exp"),
    ("clipped(LOSS, max_norm=1.0).add_noise(SUMS, noise_multiplier=[1.0], **AT)",
     "as many"),
    ("clipped(LOSS, max_norm=1.0).add_noise(UNEVEN, noise_multiplier=1, **AT)",
     r"\[2, 3\]"),
    # Models, stacked and taken apart.
    ("stack([])", r"stack\(models\): expected at least one model, got none"),
    ("stack(nn.Sequential(nn.ReLU()))", "several models, got a single Sequential"),
    ("stack([nn.ReLU(), 'a'])", r"stack\(models\)\[1\]\(str\): expected a plain"),
    ("stack({'a': nn.ReLU()})", r"stack\(models\)\[0\]\(str\): expected a plain"),
    ("stack(mlp)", r"several models, got <function mlp .*seeds=range"),
    ("stack(3, seeds=[1])", r"stack\(make\): .*returns a module, got a int"),
    ("rank_one(lambda: 3, 2, seed=0)", r"rank_one\(make\): .*module, got a int"),
    ("take(PAIR, 1)", r"indices=1\): expected numbers of members in a list.*\[1\]"),
    *((f"take(SUMS, {some})", r"from 0 to 2.*gather_members")
      for some in ("[]", "[3]", "torch.tensor([4])")),
    *((f"take(SUMS, {some})", r"take\(index.*whole number >= 0")
      for some in ("[-1]", "[True]", "torch.tensor([True, False, True])", "[0.5]")),
    ("take(SUMS | {'scale': TWO}, [0])", "3 members as in .*first axis"),
    ("stack(mlp, seeds=[])", "expected at least one model, got none"),
    ("stack(mlp, seeds=[-1])", r"stack\(seeds=-1\): expected a whole number >= 0"),
    ("stack(lambda: ONE_MODEL, seeds=[1, 2])", "a new model from each call, got one"),
    ("member_seed(0, -1)", r"member_seed\(i=-1\): expected a whole"),
    ("member_seed(0, 2**32)", r"\(i=4294967296\): expected i < 2\*\*32"),
    ("member_seed(0.5, 0)", r"\(seed=0.5\): expected a whole"),
    ("share(PAIR, {}, ['c*'])", r"^share\('c\*'\): .* matches a parameter or buffer"),
    ("share(PAIR, {'c': THREE}, ['a'])", "2 members as in 'a' on .* of 'c', got"),
    ("share(PAIR, {'c': SCALAR}, ['a'])", r"axis of 'c', got shape \(\)"),
    ("share({'a': NONE}, {}, ['a'])", "at least one member, got none"),
    ("share({}, {}, [])", r"^share\(.* an entry with a member axis, got none"),
    ("unstack(STACK[0], PAIR, {}, shared=['*'])", "an entry with a member axis, got n"),
    ("unstack(STACK[0], MISSING, STACK[2])", "missing: '0.weight'"),
    ("member(PAIR, 2)", r"member\(i=2\): expected i < 2, the number of members"),
    ("member(PAIR, -1)", r"member\(i=-1\): expected a whole number >= 0"),
    ("member(PAIR, 0, shared=['c'])", r"^member\('c'\): expected a pattern"),
    ("member(list(PAIR), 0)", "expected a dictionary of tensors by name"),
    ("share(list(PAIR), {}, [])", "expected a dictionary of tensors by name"),
    ("group([])", r"group\(models\): expected at least one model"),
    # Draws.
    ("bootstrap_indices(0, 5, seed=0)", r"members=0\): expected a whole"),
    ("bootstrap_indices(2, 0, seed=0)", r"n=0\): expected a whole"),
    ("bootstrap_indices(2, 5, size=0, seed=0)", r"size=0\): expected a"),
    ("bootstrap_indices(2, 5, seed=-1)", r"bootstrap_indices\(seed=-1\)"),
    ("fold_indices(1, 5, seed=0)", r"folds=1\): expected a whole number >= 2"),
    ("fold_indices(2, 2.5, seed=0)", r"n=2\.5\): expected a whole number"),
    ("fold_indices(2, 5, seed=-1)", r"fold_indices\(seed=-1\): expected"),
    ("fold_indices(4, 3, seed=0)", "at least one sample a fold, got 3"),
]  # fmt: skip
PATTERNS = [
    "share(*ENTRIES, patterns={})",
    "member(PARAMS, 0, shared={})",
    "unstack(FMODEL, *ENTRIES, shared={})",
    "for_members(TX, shared={})",
    "forward(FMODEL, shared={})",
    "gradient(abs, shared={})",
    "ensemble_per_sample_grad(abs, shared={})",
    "clipped(abs, max_norm=1.0, shared={})",
    "EnsembleState.create(TX, *ENTRIES, shared={})",
]
REFUSED += [(call.format("'a'"), r"^\w.*='a'\): .* got a string") for call in PATTERNS]
REFUSED += [(call.format({"a"}), "of patterns of names, got a s") for call in PATTERNS]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_bad_calls_are_refused(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        eval(call, NAMES)


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([THREE, (TWO,)], "expected results of one struct"),
        ([THREE, THREE], "axis of 2 members from group 1"),
        ([SCALAR, TWO], "axis of 3 members from group 0"),
        ([THREE, 2.0], "expected tensors, got a float from group 1"),
        ([THREE[:, None], TWO[:, None, None]], r"axis only, got \(2, 1, 1\)"),
        ([THREE, TWO.double()], r"axis only, got \(2,\), .*float64"),
    ],
)
def test_results_that_do_not_fit_together_are_refused(results, message):
    torch.manual_seed(0)
    pairs = [nn.Sequential(nn.Linear(3, 2), nn.Tanh()) for _ in range(3)]
    mixed = [pairs[0], nn.Linear(3, 2), *pairs[1:], nn.Linear(3, 2)]
    groups, rest = group(mixed), iter(results)
    with pytest.raises((ValueError, TypeError), match=message):
        groups.map(lambda fmodel, params, buffers: next(rest))
