"""What a transform does is told as it is, and telling changes nothing."""

import dataclasses
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vgrad
from vgrad import Report, UnsupportedOp, explain
from vgrad.persample import EXPANDED
from vgrad.persample.engine import Transform
from vgrad.report import table

B = 4
PROJECTION = functools.partial(vgrad.per_sample_projection, dim=2, seed=0)


def explained(loss, params, *batch, buffers=None, **options):
    compute = vgrad.clipped_grad(loss, max_norm=1.0, **options)
    return explain(compute)(params, buffers or {}, *batch)


def of_model(model, *batch, criterion=lambda output, target: output.sum()):
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    loss = vgrad.sample_loss(fmodel, criterion)
    found = explained(loss, params, *batch, torch.zeros(B), buffers=buffers)
    return {name: row for row in found.rows for name in row.names}


def linear(params, buffers, x):
    return F.linear(x, params["w"]).square().sum()


def of(text, *batch, **shapes):
    """Explain a loss that is an expression of parameters of these shapes and of `x`."""

    def loss(params, buffers, x):
        return eval(text, globals() | params | {"x": x}).sin().sum()

    params = {name: torch.randn(shape) for name, shape in shapes.items()}
    return explained(loss, params, *batch).rows


@pytest.mark.parametrize(
    ("form", "x", "w"),
    [
        ("both sides", (B, 30), (20, 30)),
        ("gram", (B, 2, 30), (20, 30)),
        ("gradients", (B, 50, 3), (2, 3)),
    ],
)
def test_the_form_of_a_linear_layer_follows_from_its_shapes(form, x, w):
    x, w = torch.randn(x), torch.randn(w)
    found = explained(linear, {"w": w}, x)
    (row,) = found.rows
    numbers = w.numel() * B if form == "gradients" else x.numel() * 50 // 30
    assert row == (("w",), "linear", "Outer", form, 4 * numbers, "has a rule")
    assert (found.strategy, found.samples) == ("recorded", B)


def test_the_forms_of_other_ops():
    rows = of_model(
        nn.Sequential(
            nn.Conv2d(2, 8, 3, padding=1),
            nn.GroupNorm(2, 8),
            nn.Conv2d(8, 4, 1),
            nn.Flatten(),
            nn.Linear(36, 3),
        ),
        torch.randn(B, 2, 3, 3),
    )
    assert rows["0.weight"].factor == "Conv"
    assert rows["0.weight"].form.startswith(("gram", "gradients by "))
    assert rows["1.weight"][1:4] == ("group_norm", "Dense", "gradients")
    assert rows["2.weight"].factor == "Outer"
    assert rows["4.bias"].bytes == B * 3 * 4
    assert {row.why for row in rows.values()} == {"has a rule"}


def test_kernels_with_more_pixels_than_weights_use_gradients():
    rows = of_model(nn.Conv1d(1, 2, 3, bias=False), torch.randn(B, 1, 64))
    assert rows["weight"].form.startswith("gradients by ")
    assert rows["weight"].bytes == B * 6 * 4


def test_lookups_keep_rows():
    rows = of_model(nn.Embedding(50, 3), torch.randint(50, (B, 7)))
    assert rows["weight"][2:5] == ("Rows", "rows", B * 7 * (8 + 3 * 4))


def test_a_parameter_of_an_op_without_a_rule_is_expanded():
    (row,) = of("(x * w).sin() + torch.maximum(x, w)", torch.randn(B, 5), w=(5,))
    assert row == (("w",), "mul, maximum", "Dense", "gradients", B * 5 * 4, EXPANDED)


def test_a_call_that_the_rule_does_not_fit_is_expanded():
    (row,) = of("F.linear(w, x)", torch.randn(B, 3, 5), w=(2, 5))
    assert (row.op, row.why) == ("linear", EXPANDED)


def test_a_decomposed_op_is_called_what_the_loss_calls_it():
    model = nn.MultiheadAttention(4, 2, batch_first=True)

    def loss(params, buffers, x):
        return torch.func.functional_call(model, params, (x, x, x))[0].square().sum()

    params = {name: value.detach() for name, value in model.named_parameters()}
    found = explained(loss, params, torch.randn(B, 1, 3, 4))
    assert {row.op for row in found.rows} == {"multi_head_attention_forward"}
    assert EXPANDED not in {row.why for row in found.rows}


@pytest.mark.parametrize("strategy", ["recorded", "vmap", "loop"])
def test_a_parameter_that_is_not_used_says_so(strategy):
    params = {"w": torch.randn(3, 5), "idle": torch.randn(2)}

    def loss(params, buffers, x):
        assert params["idle"].shape == (2,)  # to look at its shape is no use
        return linear(params, buffers, x)

    used, idle = explained(loss, params, torch.randn(B, 5), strategy=strategy).rows
    assert idle.names == ("idle",)
    assert "not used" in idle.why
    assert "not used" not in used.why
    assert used.op == "linear"


def test_several_uses_have_a_row_each_and_one_for_the_sum():
    rows = of("F.linear(F.linear(x, w).tanh(), w)", torch.randn(B, 30), w=(30, 30))
    assert [row.op for row in rows] == ["linear", "linear", ""]
    assert [row.bytes for row in rows] == [0, 0, B * 2 * 2 * 30 * 4]
    assert rows[2][2:4] == ("Outer", "gram")
    assert rows[2].why == "sum of 2 uses"


def test_a_tied_table_keeps_both_factors():
    rows = of("F.linear(F.embedding(x, w), w)", torch.randint(40, (B, 2)), w=(40, 30))
    assert [row.op for row in rows] == ["embedding", "linear", ""]
    assert rows[2][2:4] == ("Tied", "gram and rows")


def test_a_view_of_a_parameter_is_that_parameter():
    (row,) = of("F.linear(x, w[:20])", torch.randn(B, 30), w=(40, 30))
    assert row[:4] == (("w",), "linear", "Outer", "both sides")


def test_what_is_computed_from_parameters_is_one_use_of_all_of_them():
    shapes = {"scale": (3, 1), "v": (3, 5)}
    use, scale, v = of("F.linear(x, v * scale)", torch.randn(B, 5), **shapes)
    assert set(use.names) == {"v", "scale"}
    assert use.op == "linear"
    assert "computed from parameters" in use.why
    assert (scale.names, scale.bytes) == (("scale",), B * 3 * 4)
    assert (v.names, v.form, v.bytes) == (("v",), "gradients", B * 15 * 4)


@pytest.mark.parametrize("strategy", ["vmap", "loop"])
def test_other_strategies_store_all_gradients(strategy):
    params = {"w": torch.randn(3, 5)}
    found = explained(linear, params, torch.randn(B, 5), strategy=strategy)
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
    found = explained(unseen, {"w": torch.randn(5)}, torch.randn(B, 5))
    assert found.strategy == "vmap"
    assert "expected ops that a function mode sees, got w in one" in found.why
    assert found.why in str(found)


def test_a_strategy_that_was_asked_for_fails_as_in_the_transform():
    with pytest.raises(UnsupportedOp, match="that a function mode sees"):
        explained(unseen, {"w": torch.ones(5)}, torch.ones(B, 5), strategy="recorded")


def test_auto_takes_vmap_inside_a_transform():
    seen = []

    def outer(w):
        seen.append(explained(linear, {"w": w}, torch.randn(B, 5)))
        return w.sum()

    torch.func.grad(outer)(torch.randn(3, 5))
    assert seen[0].strategy == "vmap"
    assert seen[0].why == "inside a transform of torch.func"
    assert seen[0].rows[0].op == "linear"


def test_a_transform_whose_forms_are_not_known_is_refused():
    options = dataclasses.replace(vgrad.per_sample_grad(linear).options, function="own")
    with pytest.raises(
        ValueError, match=r"explain\(transform='own'\): expected one of"
    ):
        explain(Transform(options, linear))


@pytest.mark.parametrize(
    ("transform", "name", "form", "size"),
    [
        (vgrad.per_sample_grad, "per_sample_grad", "gradients", 600),
        (vgrad.per_sample_norm, "per_sample_norm", "both sides", 50),
        (vgrad.weighted_grad, "weighted_grad", "weighted sum", 50),
        (vgrad.per_sample_gram, "per_sample_gram", "inner products", None),
        (PROJECTION, "per_sample_projection", "projected", None),
        (vgrad.gradient_moments, "gradient_moments", "gradients", None),
    ],
)
def test_every_transform_is_explained_with_the_same_arguments(
    transform, name, form, size
):
    params, shape = {"w": torch.randn(20, 30)}, (B, 30) if size else (B, 5, 30)
    found = explain(transform(linear))(params, {}, torch.randn(shape))
    (row,) = found.rows
    assert (found.function, row.factor, row.form) == (name, "Outer", form)
    if size:
        assert row.bytes == B * size * 4


def test_the_loss_runs_once_and_on_the_first_chunk():
    runs = []

    def loss(params, buffers, x):
        runs.append(x.shape)
        return linear(params, buffers, x)

    params = {"w": torch.randn(3, 5)}
    found = explained(loss, params, torch.randn(B, 5), chunk_size=3)
    assert runs == [(5,)]
    assert found.samples == 3


@pytest.mark.parametrize("randomness", ["different", "same"])
@pytest.mark.parametrize("strategy", ["auto", "loop"])
def test_random_generators_are_put_back(strategy, randomness):
    def loss(params, buffers, x):
        return F.linear(F.dropout(x), params["w"]).sum()

    params, options = {"w": torch.randn(3, 5)}, {"strategy": strategy}
    before = torch.get_rng_state()
    explained(loss, params, torch.ones(B, 5), randomness=randomness, **options)
    assert torch.equal(torch.get_rng_state(), before)


def test_it_works_with_aux_and_in_inference_mode():
    def loss(params, buffers, x):
        return linear(params, buffers, x), x.sum()

    with torch.inference_mode():
        params, x = {"w": torch.randn(3, 5)}, torch.randn(B, 5)
        assert explained(loss, params, x, has_aux=True).strategy == "recorded"


def test_the_text_is_an_aligned_table():
    params = {"w": torch.randn(30, 40), "a.long.name": torch.randn(1)}
    text = str(explained(linear, params, torch.randn(B, 40)))
    title, empty, *lines = text.split("\n")
    assert title == (
        "clipped_grad of 4 samples, strategy recorded: the loss can be recorded"
    )
    assert not empty
    assert [line.split()[0] for line in lines] == ["parameter", "w", "a.long.name"]
    column = lines[0].index("factor")
    assert [line[column:].split()[0] for line in lines] == ["factor", "Outer", "Zero"]
    assert "1,120" in lines[1]


def test_columns_are_as_wide_as_their_widest_cell():
    assert table([("a", "bb"), ("ccc", "d")], right={1}) == "a    bb\nccc   d"


def test_explanations_can_be_compared_and_not_changed():
    params, x = {"w": torch.randn(3, 5)}, torch.randn(B, 5)
    found = explained(linear, params, x)
    assert isinstance(found, Report)
    assert found == explained(linear, params, x)
    with pytest.raises(AttributeError):
        found.strategy = "vmap"


def test_what_is_no_transform_is_refused():
    with pytest.raises(TypeError, match=r"explain\(transform\): .* got a function"):
        explain(linear)


def test_an_empty_batch_is_refused():
    with pytest.raises(ValueError, match=r"at least one sample, got an empty batch"):
        explained(linear, {"w": torch.ones(3, 5)}, torch.ones(0, 5))
