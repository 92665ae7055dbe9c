"""`explain` tells the strategy, the factor of each use and its bytes."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vgrad
from tests.compiled import problems
from vgrad import UnsupportedOp, explain
from vgrad.persample import EXPANDED
from vgrad.persample.engine import Transform
from vgrad.report import table

B = 4


def explained(loss, params, *batch, buffers=None, **options):
    compute = vgrad.clipped_grad(loss, max_norm=1.0, **options)
    return explain(compute)(params, buffers or {}, *batch)


def linear(params, buffers, x):
    return F.linear(x, params["w"]).square().sum()


def rows_of(text, x, **shapes):
    """Explain a loss that is an expression of parameters of these shapes and of `x`."""

    def loss(params, buffers, x):
        return eval(text, globals() | params | {"x": x}).sin().sum()

    params = {name: torch.randn(shape) for name, shape in shapes.items()}
    return explained(loss, params, x).rows


def floats(*shape):
    return torch.randn(B, *shape)


def numbers(text):
    return [int(each) for each in text.split()]


USES = """
F.linear(x, w)         | 30     | 20 30   | linear: Outer, both sides, 50
F.linear(x, w)         | 2 30   | 20 30   | linear: Outer, gram, 100
F.linear(x, w)         | 50 3   | 2 3     | linear: Outer, gradients, 6
F.linear(x, w[:20])    | 30     | 40 30   | linear: Outer, both sides, 50
F.conv1d(x, w)         | 1 64   | 2 1 3   | conv1d: Conv, gradients by, 6
F.conv2d(x, w)         | 4 3 3  | 4 4 1 1 | conv2d: Outer, gradients, 16
F.conv2d(x, w)         | 2 3 3  | 8 2 3 3 | conv2d: Conv, gram, 26
F.layer_norm(x, [5], w)| 2 5    | 5       | layer_norm: Dense, gradients, 5
F.embedding(x, w)      | long 7 | 50 3    | embedding: Rows, rows, 35
F.linear(w, x)         | 3 5    | 2 5     | linear: Dense, gradients, 10, expanded
x * w + torch.maximum(x, w) | 5 | 5       | mul, maximum: Dense, gradients, 5, expanded
F.linear(F.linear(x, w).tanh(), w) | 30 | 30 30 | linear: Outer, , 0; \
linear: Outer, , 0; : Outer, gram, 120, sum of 2 uses
F.linear(F.embedding(x, w), w) | long 2 | 40 30 | embedding: Rows, , 0; \
linear: Outer, , 0; : Tied, gram and rows, 204, sum of 2 uses
"""
"""A loss, shapes of a sample and of `w`, and its uses: op, factor, form, numbers."""


@pytest.mark.parametrize("case", USES.strip().splitlines())
def test_factors_and_forms_follow_from_ops_and_shapes(case):
    text, sample, shape, uses = (each.strip() for each in case.split("|"))
    lookups = sample.startswith("long")
    x = floats(*numbers(sample.removeprefix("long")))
    rows = rows_of(text, (x.abs() * 9).long() if lookups else x, w=numbers(shape))
    for row, use in zip(rows, uses.split("; "), strict=True):
        op, _, use = use.partition(": ")
        factor, form, count, *why = use.split(", ")
        why = {"expanded": EXPANDED}.get(*why, *why) if why else "has a rule"
        assert (row.names, row.op, row.factor) == (("w",), op, factor)
        assert (row.bytes, row.why) == (4 * B * int(count), why)
        assert row.form.startswith(form)


def test_a_decomposed_op_is_called_what_the_loss_calls_it():
    model = nn.MultiheadAttention(4, 2, batch_first=True)

    def loss(params, buffers, x):
        return torch.func.functional_call(model, params, (x, x, x))[0].square().sum()

    params = {name: value.detach() for name, value in model.named_parameters()}
    found = explained(loss, params, floats(1, 3, 4))
    assert {row.op for row in found.rows} == {"multi_head_attention_forward"}
    assert EXPANDED not in {row.why for row in found.rows}


@pytest.mark.parametrize("strategy", ["recorded", "vmap", "loop"])
def test_a_parameter_that_is_not_used_says_so(strategy):
    params = {"w": torch.randn(3, 5), "idle": torch.randn(2)}

    def loss(params, buffers, x):
        assert params["idle"].shape == (2,)  # to read its shape is no use
        return linear(params, buffers, x)

    used, idle = explained(loss, params, floats(5), strategy=strategy).rows
    assert idle.names == ("idle",)
    assert "not used" in idle.why
    assert "not used" not in used.why
    assert used.op == "linear"


def test_what_is_computed_from_parameters_is_one_use_of_all_of_them():
    shapes = {"scale": (3, 1), "v": (3, 5)}
    use, scale, v = rows_of("F.linear(x, v * scale)", floats(5), **shapes)
    assert set(use.names) == {"v", "scale"}
    assert use.op == "linear"
    assert "computed from parameters" in use.why
    assert (scale.names, scale.bytes) == (("scale",), B * 3 * 4)
    assert (v.names, v.form, v.bytes) == (("v",), "gradients", B * 15 * 4)


@pytest.mark.parametrize("strategy", ["vmap", "loop"])
def test_other_strategies_store_all_gradients(strategy):
    found = explained(linear, {"w": torch.randn(3, 5)}, floats(5), strategy=strategy)
    samples = 1 if strategy == "loop" else B
    assert (found.strategy, found.samples) == (strategy, samples)
    why = f"{strategy} stores all gradients"
    expected = (("w",), "linear", "Dense", "gradients", samples * 15 * 4, why)
    assert found.rows == (expected,)
    assert strategy in found.why


def unseen(params, buffers, x):
    with torch._C.DisableTorchFunction():
        return (x * params["w"]).sum()


def test_auto_says_why_it_does_not_record():
    params, x = {"w": torch.randn(5)}, floats(5)
    found = explained(unseen, params, x)
    assert found.strategy == "vmap"
    assert "expected ops that a function mode sees, got w in one" in found.why
    assert found.why in str(found)
    with pytest.raises(UnsupportedOp, match="that a function mode sees"):
        explained(unseen, params, x, strategy="recorded")


def test_auto_takes_vmap_inside_a_transform():
    seen = []

    def outer(w):
        seen.append(explained(linear, {"w": w}, floats(5)))
        return w.sum()

    torch.func.grad(outer)(torch.randn(3, 5))
    assert seen[0].strategy == "vmap"
    assert seen[0].why == "inside a transform of torch.func"
    assert seen[0].rows[0].op == "linear"


FORMS = {"grad": "gradients", "norm": "both sides", "weighted": "weighted sum"}
FORMS |= {"projection": "projected", "gram": "inner products", "moments": "gradients"}


@pytest.mark.parametrize("name", FORMS)
def test_every_transform_is_explained_with_the_same_arguments(name):
    compute, positions = problems.TRANSFORMS[name](linear), (5,) * (name == "gram")
    found = explain(compute)({"w": torch.randn(20, 30)}, {}, floats(*positions, 30))
    (row,) = found.rows
    assert found.function == compute.options.function
    assert (row.factor, row.form) == ("Outer", FORMS[name])
    sizes = {"grad": 600, "norm": 50, "weighted": 50}
    assert row.bytes == B * sizes[name] * 4 if name in sizes else True


def test_the_loss_runs_once_and_on_the_first_chunk():
    runs = []

    def loss(params, buffers, x):
        runs.append(x.shape)
        return linear(params, buffers, x)

    options = {"chunk_size": 3, "verify": False}
    found = explained(loss, {"w": torch.randn(3, 5)}, floats(5), **options)
    assert runs == [(5,)]
    assert found.samples == 3


@pytest.mark.parametrize("randomness", ["different", "same"])
@pytest.mark.parametrize("strategy", ["auto", "loop"])
def test_random_generators_are_put_back(strategy, randomness):
    def loss(params, buffers, x):
        return F.linear(F.dropout(x), params["w"]).sum()

    options = {"strategy": strategy, "randomness": randomness}
    before = torch.get_rng_state()
    explained(loss, {"w": torch.ones(3, 5)}, torch.ones(B, 5), **options)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_text_is_an_aligned_table():
    params = {"w": torch.randn(30, 40), "a.long.name": torch.randn(1)}
    text = str(explained(linear, params, floats(40)))
    title, verified, costs, rows = text.split("\n\n")
    assert verified.endswith("not yet: a.long.name")
    lines = rows.split("\n")
    assert title == (
        "clipped_grad of 4 samples, strategy recorded: the loss can be recorded"
    )
    assert costs.split("\n") == [
        "strategy  passes   bytes",
        "recorded       1   1,120",
        "vmap           1  19,216",
        "loop           4   4,804",
    ]
    assert [line.split()[0] for line in lines] == ["names", "w", "a.long.name"]
    column = lines[0].index("factor")
    assert [line[column:].split()[0] for line in lines] == ["factor", "Outer", "Zero"]
    assert "1,120" in lines[1]
    assert table([("a", "bb"), ("ccc", "d")], right={1}) == "a    bb\nccc   d"


def test_what_cannot_be_explained_is_refused():
    options = dataclasses.replace(vgrad.per_sample_grad(linear).options, function="own")
    with pytest.raises(ValueError, match=r"transform='own'\): expected one of"):
        explain(Transform(options, linear))
    with pytest.raises(TypeError, match=r"explain\(transform\): .* got a function"):
        explain(linear)
    with pytest.raises(ValueError, match=r"at least one sample, got an empty batch"):
        explained(linear, {"w": torch.ones(3, 5)}, torch.ones(0, 5))
