import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.examples import examples
from vgrad import UnsupportedOp, make_functional_with_buffers
from vgrad.ensemble import (
    class_prediction,
    predict,
    predict_values,
    stack,
    value_prediction,
)

WIDTH = 3


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def linear(members, samples, outputs, *, seed=0, dtype=torch.float64):
    """An ensemble of linear models, a batch, and the outputs in float64."""
    options = {"generator": generator(seed), "dtype": dtype}
    fmodel, _, _ = make_functional_with_buffers(nn.Linear(WIDTH, outputs))
    params = {
        "weight": 2 * torch.randn(members, outputs, WIDTH, **options),
        "bias": torch.randn(members, outputs, **options),
    }
    x = torch.randn(samples, WIDTH, **options)
    weight, bias = params["weight"].double(), params["bias"].double()
    explicit = torch.einsum("eoi,ni->eno", weight, x.double()) + bias[:, None]
    return fmodel, params, x, explicit


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2)
    )


def stacked(models):
    """Stack by hand."""
    split = [make_functional_with_buffers(model) for model in models]
    params, buffers = (
        {name: torch.stack([each[part][name] for each in split]) for name in first}
        for part, first in ((1, split[0][1]), (2, split[0][2]))
    )
    return split[0][0], params, buffers


class Odd(nn.Linear):
    """A linear model whose output is changed by a function."""

    def __init__(self, change):
        super().__init__(WIDTH, 2)
        self.change = change

    def forward(self, x):
        return self.change(super().forward(x))


def reference(logits):
    """Every quantity by its formula, member by member, from logits [E, N, C]."""
    members, samples, _ = logits.shape
    each = [(row - row.logsumexp(1, keepdim=True)).exp() for row in logits.double()]
    mean = sum(each) / members
    variance = sum(p**2 for p in each) / members - mean**2

    def entropy(p):
        return -torch.xlogy(p, p).sum(1)

    # As the divergence of the members from their mean, which needs no difference.
    information = sum((torch.xlogy(p, p) - torch.xlogy(p, mean)).sum(1) for p in each)
    votes = [
        [float(p[n].argmax() != mean[n].argmax()) for p in each] for n in range(samples)
    ]
    disagreement = [sum(row) / members for row in votes]
    return {
        "mean": mean,
        "variance": variance,
        "predictive_entropy": entropy(mean),
        "expected_entropy": sum(entropy(p) for p in each) / members,
        "mutual_information": information / members,
        "disagreement": torch.tensor(disagreement, dtype=torch.float64),
    }


def assert_equal_reference(found, logits, **tolerance):
    for name, value in reference(logits).items():
        torch.testing.assert_close(
            getattr(found, name).double(),
            value,
            msg=lambda m, n=name: f"{n}: {m}",
            **tolerance,
        )


@pytest.mark.parametrize(
    ("dtype", "atol"), [(torch.float64, 1e-12), (torch.float32, 2e-6)]
)
def test_every_quantity_of_classes_equals_its_formula(dtype, atol):
    fmodel, params, x, logits = linear(5, 40, 4, dtype=dtype)
    found = predict(fmodel, params, {}, x)
    assert {value.dtype for value in found} == {dtype}
    assert_equal_reference(found, logits, rtol=0, atol=atol)
    assert (found.disagreement > 0).any()


@pytest.mark.parametrize("shape", [(), (2,), (2, 3)])
def test_every_quantity_of_values_equals_its_formula(shape):
    outputs = torch.randn(6, 7, *shape, generator=generator(), dtype=torch.float64)
    levels = [0.9, 0.0, 0.25, 0.5, 1.0]
    found = value_prediction(outputs, quantiles=levels)
    torch.testing.assert_close(found.mean, outputs.mean(0))
    torch.testing.assert_close(found.variance, outputs.var(0, correction=0))
    expected = [outputs.quantile(level, dim=0) for level in levels]
    torch.testing.assert_close(found.quantiles, torch.stack(expected))


def test_values_come_from_the_model_of_each_member():
    fmodel, params, x, outputs = linear(4, 9, 2, dtype=torch.float32)
    found = predict_values(fmodel, params, {}, x, quantiles=[0.3], chunk_size=4)
    assert {value.dtype for value in found} == {torch.float32}
    torch.testing.assert_close(found.mean.double(), outputs.mean(0), rtol=0, atol=1e-5)
    expected = outputs.quantile(0.3, dim=0, keepdim=True)
    torch.testing.assert_close(found.quantiles.double(), expected, rtol=0, atol=1e-5)


def test_no_quantiles_are_computed_unless_asked_for():
    fmodel, params, x, _ = linear(3, 4, 2)
    assert predict_values(fmodel, params, {}, x).quantiles.shape == (0, 4, 2)


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 7, 100])
def test_the_chunk_size_does_not_change_the_result(chunk_size):
    fmodel, params, x, _ = linear(3, 7, 4)
    whole = predict(fmodel, params, {}, x)
    parts = predict(fmodel, params, {}, x, chunk_size=chunk_size)
    torch.testing.assert_close(tuple(parts), tuple(whole), rtol=0, atol=1e-13)
    options = {"quantiles": [0.1, 0.8]}
    whole = predict_values(fmodel, params, {}, x, **options)
    parts = predict_values(fmodel, params, {}, x, **options, chunk_size=chunk_size)
    torch.testing.assert_close(tuple(parts), tuple(whole), rtol=0, atol=1e-13)


@examples(30)
@given(
    members=st.integers(1, 4),
    samples=st.integers(0, 5),
    classes=st.integers(2, 4),
    chunk_size=st.one_of(st.none(), st.integers(1, 6)),
    seed=st.integers(0, 100),
)
def test_all_sizes_work(members, samples, classes, chunk_size, seed):
    fmodel, params, x, outputs = linear(members, samples, classes, seed=seed)
    found = predict(fmodel, params, {}, x, chunk_size=chunk_size)
    assert found.mean.shape == found.variance.shape == (samples, classes)
    assert all(value.shape == (samples,) for value in found[2:])
    assert_equal_reference(found, outputs, rtol=0, atol=1e-12)
    found = predict_values(
        fmodel, params, {}, x, quantiles=[0.2, 0.7], chunk_size=chunk_size
    )
    assert found.quantiles.shape == (2, samples, classes)
    torch.testing.assert_close(found.mean, outputs.mean(0))


def test_one_member_has_no_uncertainty_of_its_own():
    fmodel, params, x, logits = linear(1, 30, 5)
    found = predict(fmodel, params, {}, x)
    for name in ("variance", "mutual_information", "disagreement"):
        assert (getattr(found, name) == 0).all()
    torch.testing.assert_close(found.mean, logits[0].softmax(1))
    values = predict_values(fmodel, params, {}, x, quantiles=[0.0, 0.4, 1.0])
    assert (values.variance == 0).all()
    assert (values.quantiles == values.mean).all()


@examples(100)
@given(
    row=st.lists(st.floats(-1e4, 1e4), min_size=2, max_size=5),
    members=st.integers(2, 12),
)
def test_identical_members_agree_exactly(row, members):
    logits = torch.tensor(row, dtype=torch.float64).expand(members, 1, -1)
    found = class_prediction(logits)
    for name in ("variance", "mutual_information", "disagreement"):
        assert (getattr(found, name) == 0).all()
    values = value_prediction(logits, quantiles=[0.3])
    assert (values.mean == logits[0]).all()
    assert (values.variance == 0).all()
    assert (values.quantiles[0] == logits[0]).all()


def test_mutual_information_is_never_negative():
    base = torch.randn(1, 2000, 10, generator=generator())
    noise = 1e-8 * torch.randn(7, 2000, 10, generator=generator(1), dtype=torch.float64)
    assert (class_prediction(base + noise).mutual_information >= 0).all()


def test_members_that_are_certain_of_different_classes_disagree():
    logits = 1e4 * torch.eye(4).unsqueeze(1)
    found = class_prediction(logits)
    assert_equal_reference(found, logits, rtol=0, atol=1e-6)
    assert found.mutual_information.item() == pytest.approx(math.log(4))
    assert found.expected_entropy.item() == 0
    assert found.disagreement.item() == 0.75


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1e4, math.inf])
def test_probabilities_of_zero_make_no_nan(dtype, size):
    logits = torch.randn(3, 8, 5, generator=generator())
    logits[:, :, 2] = -size
    logits[0, :4] *= 1e4
    found = class_prediction(
        logits.nan_to_num(neginf=-math.inf).clamp(max=6e4).to(dtype)
    )
    assert all(value.isfinite().all() for value in found)
    assert (found.mean[:, 2] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_logits_give_float32_as_good_as_they_are(dtype):
    logits = (3 * torch.randn(4, 50, 6, generator=generator())).to(dtype)
    found = class_prediction(logits)
    assert {value.dtype for value in found} == {torch.float32}
    assert_equal_reference(found, logits, rtol=0, atol=1e-6)
    found = value_prediction(logits, quantiles=[0.3])
    assert {value.dtype for value in found} == {torch.float32}
    expected = logits.double()
    torch.testing.assert_close(found.mean, expected.mean(0).float())
    torch.testing.assert_close(found.variance, expected.var(0, correction=0).float())
    torch.testing.assert_close(found.quantiles[0], expected.quantile(0.3, 0).float())


def test_a_bfloat16_model_predicts():
    fmodel, params, x, logits = linear(3, 6, 4, dtype=torch.bfloat16)
    found = predict(fmodel, params, {}, x)
    assert found.mean.dtype == torch.float32
    torch.testing.assert_close(found.mean.sum(1), torch.ones(6), rtol=0, atol=1e-6)
    expected = reference(logits)["mean"]
    torch.testing.assert_close(found.mean.double(), expected, rtol=0, atol=0.1)


def test_autocast_reaches_the_model_and_not_the_sums():
    fmodel, params, x, _ = linear(3, 6, 4, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = predict(fmodel, params, {}, x)
        logits = torch.stack(
            [
                nn.functional.linear(x, weight, bias)
                for weight, bias in zip(params["weight"], params["bias"], strict=True)
            ]
        )
    assert logits.dtype == torch.bfloat16
    assert_equal_reference(found, logits, rtol=0, atol=0.01)
    assert (found.mean.sum(1) - 1).abs().max() < 1e-6


def test_a_member_that_fails_spoils_its_samples_and_no_others():
    logits = torch.randn(3, 4, 2, generator=generator())
    logits[1, 2, 0] = torch.nan
    found = class_prediction(logits)
    others = torch.tensor([0, 1, 3])
    for value in found:
        assert value[2].isnan().all()
        assert value[others].isfinite().all()
    found = value_prediction(logits, quantiles=[0.0, 0.5])
    assert found.mean[2, 0].isnan()
    assert found.quantiles[:, 2, 0].isnan().all()
    assert found.quantiles[:, others].isfinite().all()


def test_variances_are_right_far_from_zero():
    outputs = 1e6 + torch.tensor([[0.0], [1.0], [2.0]])
    assert value_prediction(outputs).variance.item() == pytest.approx(2 / 3)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_runs_in_evaluation_mode_and_changes_nothing(training):
    models = [net(seed) for seed in range(3)]
    for model in models:
        model(torch.randn(20, WIDTH, generator=generator()))  # statistics of its own
    fmodel, params, buffers = stacked(models)
    fmodel = fmodel.train(training)
    before = {name: value.clone() for name, value in buffers.items()}
    x = torch.randn(6, WIDTH, generator=generator(1))
    found = predict(fmodel, params, buffers, x, chunk_size=4)
    logits = torch.stack([model.eval()(x) for model in models]).detach()
    assert_equal_reference(found, logits, rtol=0, atol=1e-6)
    assert fmodel.training == training
    assert all(torch.equal(buffers[name], value) for name, value in before.items())


def test_passes_with_dropout_are_summarised_by_hand():
    model = nn.Sequential(nn.Dropout(), nn.Linear(WIDTH, 2))
    torch.manual_seed(0)
    x = torch.randn(5, WIDTH)
    passes = torch.stack([model(x) for _ in range(8)])
    found = class_prediction(passes)
    assert_equal_reference(found, passes.detach(), rtol=0, atol=1e-6)
    assert (found.mutual_information > 0).any()


def test_no_graph_is_kept():
    fmodel, params, x, logits = linear(2, 3, 2)
    params = {name: value.requires_grad_() for name, value in params.items()}
    for found in (
        predict(fmodel, params, {}, x.requires_grad_()),
        predict_values(fmodel, params, {}, x, quantiles=[0.5]),
        class_prediction(logits.requires_grad_()),
        value_prediction(logits, quantiles=[0.5]),
    ):
        assert not any(value.requires_grad for value in found)


def test_no_more_samples_than_a_chunk_are_run_at_a_time_and_none_with_a_graph():
    seen = []

    def noting(y):
        seen.append((len(y), torch.is_grad_enabled()))
        return y

    fmodel, params, buffers = stacked([Odd(noting) for _ in range(3)])
    x = torch.randn(7, WIDTH, generator=generator())
    predict(fmodel, params, buffers, x, chunk_size=3)
    assert set(seen) == {(3, False), (1, False)}


def test_shared_entries_have_no_member_axis():
    fmodel, params, x, _ = linear(3, 5, 4)
    one = {**params, "bias": params["bias"][0]}
    copies = {**params, "bias": params["bias"][:1].expand(3, -1)}
    found = predict(fmodel, one, {}, x, shared=["bias"], chunk_size=2)
    expected = predict(fmodel, copies, {}, x)
    torch.testing.assert_close(tuple(found), tuple(expected), rtol=0, atol=1e-13)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2)

    def forward(self, x, others):
        return self.layer(x) * others["scale"]


def test_several_inputs_are_cut_together():
    torch.manual_seed(0)
    models = [TwoInputs() for _ in range(3)]
    fmodel, params, buffers = stacked(models)
    x, scale = torch.randn(5, WIDTH), torch.randn(5, 1)
    found = predict_values(fmodel, params, buffers, x, {"scale": scale}, chunk_size=2)
    expected = torch.stack([model(x, {"scale": scale}) for model in models]).mean(0)
    torch.testing.assert_close(found.mean, expected.detach())


@pytest.mark.parametrize("chunk_size", [0, -1, 2.0, "auto"])
@pytest.mark.parametrize("predict", [predict, predict_values])
def test_a_chunk_size_is_a_whole_number(predict, chunk_size):
    fmodel, params, x, _ = linear(2, 3, 2)
    with pytest.raises(ValueError, match="predict.*chunk_size=.* whole number >= 1"):
        predict(fmodel, params, {}, x, chunk_size=chunk_size)


@pytest.mark.parametrize("quantile", [-0.1, 1.5])
def test_a_quantile_is_from_zero_to_one(quantile):
    fmodel, params, x, outputs = linear(2, 3, 2)
    levels = [0.5, quantile]
    with pytest.raises(ValueError, match=f"predict_values.*to 1, got {quantile}"):
        predict_values(fmodel, params, {}, x, quantiles=levels)
    with pytest.raises(ValueError, match=f"value_prediction.*to 1, got {quantile}"):
        value_prediction(outputs, quantiles=levels)


def test_a_quantile_is_a_finite_number():
    with pytest.raises(ValueError, match="quantiles=nan.*finite number"):
        value_prediction(torch.ones(2, 3), quantiles=[math.nan])
    with pytest.raises(TypeError, match="quantiles='0.5'.*expected a number"):
        value_prediction(torch.ones(2, 3), quantiles=["0.5"])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda y: {"logits": y}, TypeError, "predict.*one tensor.*got a dict"),
        (lambda y: (y * 0).long(), TypeError, "predict.*got torch.int64"),
        (lambda y: y.mean(0), ValueError, "each of the 3 samples.*shape .2, 2."),
        (lambda y: y.sum(), ValueError, "members, samples, .*got shape .2,."),
    ],
)
@pytest.mark.parametrize("predict", [predict, predict_values])
def test_outputs_are_one_number_or_row_for_each_sample(predict, change, error, message):
    fmodel, params, buffers = stacked([Odd(change) for _ in range(2)])
    with pytest.raises(error, match=message):
        predict(fmodel, params, buffers, torch.ones(3, WIDTH))


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 1), (2, 3, 4, 5)])
def test_logits_are_of_two_classes_or_more(shape):
    with pytest.raises(ValueError, match="class_prediction.*two classes or more"):
        class_prediction(torch.zeros(shape))


@pytest.mark.parametrize("summarise", [class_prediction, value_prediction])
def test_an_ensemble_has_a_member(summarise):
    with pytest.raises(ValueError, match="one member or more"):
        summarise(torch.zeros(0, 3, 2))


def test_inputs_have_one_batch_size():
    fmodel, params, x, _ = linear(2, 3, 2)
    with pytest.raises(ValueError, match="predict.*one batch size"):
        predict(fmodel, params, {}, x, torch.ones(4))


def test_infinite_outputs_do_not_depend_on_the_order_of_members():
    outputs = torch.tensor([[torch.inf], [1.0], [torch.inf]])
    for order in ([0, 1, 2], [1, 0, 2]):
        found = value_prediction(outputs[order], quantiles=[0.0, 0.5, 0.75, 1.0])
        assert found.mean.item() == torch.inf
        assert found.quantiles.flatten().tolist() == [1.0, *[torch.inf] * 3]


@pytest.mark.parametrize("predict", [predict, predict_values])
def test_what_cannot_run_for_all_members_at_once_runs_in_a_loop(predict):
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            out = self.layer(x)
            return out.index_put((out > 0).nonzero(as_tuple=True), out.sum())

    fmodel, params, buffers = stack([Branches() for _ in range(3)])
    x = torch.randn(4, 3)
    with pytest.raises(UnsupportedOp, match="all members at once"):
        predict(fmodel, params, buffers, x, strategy="vmap")
    found = predict(fmodel, params, buffers, x, strategy="loop")
    assert found.mean.shape == (4, 2)


@pytest.mark.parametrize("run", [predict, predict_values])
def test_statistics_of_a_chunk_are_refused(run):
    models = [nn.BatchNorm1d(3, track_running_stats=False) for _ in range(2)]
    fmodel, params, buffers = stack(models)
    x = torch.randn(6, 3)
    run(fmodel, params, buffers, x)
    with pytest.raises(ValueError, match="batch statistics"):
        run(fmodel, params, buffers, x, chunk_size=2)
