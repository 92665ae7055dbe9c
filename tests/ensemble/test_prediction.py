"""Predictions are their formulas over the outputs of the members."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.examples import examples
from tests.losses import Net, randn
from tests.oracle import assert_exact
from vgrad import make_functional_with_buffers, stack
from vgrad.ensemble import EnsemblePrediction, ValuePrediction, predict

WIDTH = 3
of_logits, of_outputs = EnsemblePrediction.from_logits, ValuePrediction.from_outputs
values = partial(predict, kind="value")


def linear(members, samples, outputs, *, seed=0, dtype=torch.float64):
    """An ensemble of linear models, a batch, and the outputs in float64."""
    fmodel, _, _ = make_functional_with_buffers(nn.Linear(WIDTH, outputs))
    weight = 2 * randn(members, outputs, WIDTH, seed=seed)
    bias, x = randn(members, outputs, seed=seed + 1), randn(samples, WIDTH, seed=seed)
    weight, bias, x = (value.to(dtype) for value in (weight, bias, x))
    outputs = torch.einsum("eoi,ni->eno", weight.double(), x.double())
    params = {"weight": weight, "bias": bias}
    return fmodel, params, x, outputs + bias.double()[:, None]


def changed(change):
    """Linear models whose outputs a function changes."""
    make = lambda: Net(  # noqa: E731
        lambda self, x: change(self.layer(x)), layer=nn.Linear(WIDTH, 2)
    )
    return stack(make, seeds=range(3))


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


def assert_classes(prediction, logits, atol):
    for name, value in reference(logits).items():
        got = getattr(prediction, name).double()
        torch.testing.assert_close(got, value, rtol=0, atol=atol, msg=name)


def assert_values(prediction, outputs, levels=(), atol=1e-12):
    outputs = outputs.double()
    expected = outputs.mean(0), outputs.var(0, correction=0)
    quantiles = [outputs.quantile(level, dim=0) for level in levels]
    shape = (0, *outputs.shape[1:])
    expected += (torch.stack(quantiles) if levels else outputs.new_empty(shape),)
    for got, value in zip(prediction, expected, strict=True):
        torch.testing.assert_close(got.double(), value, rtol=atol, atol=atol)


@pytest.mark.parametrize(
    ("dtype", "result", "atol"),
    [
        (torch.float64, torch.float64, 1e-12),
        (torch.float32, torch.float32, 1e-5),
        (torch.bfloat16, torch.float32, 0.2),
    ],
)
def test_models_predict_in_float32_or_wider(dtype, result, atol):
    fmodel, params, x, outputs = linear(5, 40, 4, dtype=dtype)
    classes = predict(fmodel, params, {}, x)
    numbers = values(fmodel, params, {}, x, quantiles=[0.3])
    assert {value.dtype for value in (*classes, *numbers)} == {result}
    if dtype != torch.bfloat16:
        assert_classes(classes, outputs, atol)
        assert_values(numbers, outputs, [0.3], atol)
    assert_exact(classes.mean.double(), reference(outputs)["mean"], 10 * atol)
    assert (classes.disagreement > 0).any()


@examples(30)
@given(
    members=st.integers(1, 4),
    samples=st.integers(0, 5),
    classes=st.integers(2, 4),
    chunk_size=st.one_of(st.none(), st.integers(1, 6)),
    seed=st.integers(0, 100),
)
def test_all_sizes_and_chunks_work(members, samples, classes, chunk_size, seed):
    fmodel, params, x, outputs = linear(members, samples, classes, seed=seed)
    prediction = predict(fmodel, params, {}, x, chunk_size=chunk_size)
    assert_classes(prediction, outputs, 1e-12)
    prediction = values(
        fmodel, params, {}, x, quantiles=[0.2, 0.7], chunk_size=chunk_size
    )
    assert prediction.quantiles.shape == (2, samples, classes)
    if samples:
        assert_values(prediction, outputs, [0.2, 0.7])


@pytest.mark.parametrize("shape", [(), (2,), (2, 3)])
@pytest.mark.parametrize("levels", [[0.9, 0.0, 0.25, 0.5, 1.0], []])
def test_values_have_any_shape(shape, levels):
    outputs = randn(6, 7, *shape)
    assert_values(of_outputs(outputs, quantiles=levels), outputs, levels)


@examples(100)
@given(
    row=st.lists(st.floats(-1e4, 1e4), min_size=2, max_size=5),
    members=st.integers(1, 12),
)
def test_identical_members_agree_exactly(row, members):
    logits = torch.tensor(row, dtype=torch.float64).expand(members, 1, -1)
    classes, numbers = of_logits(logits), of_outputs(logits, quantiles=[0.0, 0.3, 1])
    for zero in (classes.variance, classes.mutual_information, classes.disagreement):
        assert (zero == 0).all()
    assert (numbers.variance == 0).all()
    assert (numbers.mean == logits[0]).all()
    assert (numbers.quantiles == logits[0]).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1e4, math.inf])
def test_probabilities_of_zero_make_no_nan(dtype, size):
    logits = randn(3, 8, 5, dtype=torch.float32)
    logits[:, :, 2] = -size
    logits[0, :4] *= 1e4
    logits = logits.nan_to_num(neginf=-math.inf).clamp(max=6e4)
    prediction = of_logits(logits.to(dtype))
    assert all(value.isfinite().all() for value in prediction)
    assert (prediction.mean[:, 2] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_outputs_give_float32_as_good_as_they_are(dtype):
    outputs = (3 * randn(4, 50, 6)).to(dtype)
    assert_classes(of_logits(outputs), outputs, 1e-6)
    assert_values(of_outputs(outputs, quantiles=[0.3]), outputs, [0.3], 1e-6)


def test_autocast_reaches_the_model_and_not_the_sums():
    fmodel, params, x, _ = linear(3, 6, 4, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        prediction = predict(fmodel, params, {}, x)
        rows = zip(params["weight"], params["bias"], strict=True)
        logits = torch.stack([nn.functional.linear(x, *row) for row in rows])
    assert logits.dtype == torch.bfloat16
    assert_classes(prediction, logits, 0.01)
    assert (prediction.mean.sum(1) - 1).abs().max() < 1e-6


def test_a_member_that_fails_spoils_its_samples_and_no_others():
    logits = randn(3, 4, 2)
    logits[1, 2, 0] = torch.nan
    others = torch.tensor([0, 1, 3])
    for value in of_logits(logits):
        assert value[2].isnan().all()
        assert value[others].isfinite().all()
    prediction = of_outputs(logits, quantiles=[0.0, 0.5])
    assert prediction.mean[2, 0].isnan()
    assert prediction.quantiles[:, 2, 0].isnan().all()
    assert prediction.quantiles[:, others].isfinite().all()


@pytest.mark.parametrize("training", [True, False])
def test_the_model_runs_in_evaluation_mode_and_changes_nothing(training):
    models = [
        nn.Sequential(
            nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2)
        ).double()
        for _ in range(3)
    ]
    for model in models:
        model(randn(20, WIDTH))  # statistics of its own
    fmodel, params, buffers = stack(models)
    fmodel = fmodel.train(training)
    before = {name: value.clone() for name, value in buffers.items()}
    x = randn(6, WIDTH, seed=1)
    prediction = predict(fmodel, params, buffers, x, chunk_size=4)
    logits = torch.stack([model.eval()(x) for model in models]).detach()
    assert_classes(prediction, logits, 1e-6)
    assert fmodel.training == training
    assert_exact(buffers, before, 0)


def test_no_graph_is_kept():
    fmodel, params, x, logits = linear(2, 3, 2)
    params = {name: value.requires_grad_() for name, value in params.items()}
    for prediction in (
        predict(fmodel, params, {}, x.requires_grad_()),
        values(fmodel, params, {}, x, quantiles=[0.5]),
        of_logits(logits.requires_grad_()),
        of_outputs(logits, quantiles=[0.5]),
    ):
        assert not any(value.requires_grad for value in prediction)


def test_a_chunk_of_samples_runs_at_a_time_and_without_a_graph():
    seen = set()

    def noting(y):
        seen.add((len(y), torch.is_grad_enabled()))
        return y

    predict(*changed(noting), randn(7, WIDTH).float(), chunk_size=3)
    assert seen == {(3, False), (1, False)}


OUTPUTS, ONES = torch.zeros(2, 3, 2), torch.ones(2, 3)
OF_EITHER_KIND = [
    ("{}(*MODEL, X, chunk_size=0)", "chunk_size=0.* whole number >= 1"),
    ("{}(*MODEL, X, chunk_size='auto')", "chunk_size='auto'.* whole number"),
    ("{}(*changed(lambda y: dict(logits=y)), X)", "one tensor.*got a dict"),
    ("{}(*changed(lambda y: (y * 0).long()), X)", "got torch.int64"),
    ("{}(*changed(lambda y: y.mean(0)), X)", "each of the 4 samples.*shape .3, 2."),
    ("{}(*changed(lambda y: y.sum()), X)", "members, samples, .*got shape .3,."),
    ("predict(*MODEL, X, kind='other')", "kind='other'.*one of 'class', 'value'"),
]
REFUSED = [
    ("predict(*MODEL, X, quantiles=[0.5])", "predict.*quantiles of values.*kind="),
    ("values(*MODEL, X, quantiles=[0.5, -0.1])", "predict.*to 1, got -0.1"),
    ("of_outputs(OUTPUTS, quantiles=[1.5])", "from_outputs.*to 1, got 1.5"),
    ("of_outputs(ONES, quantiles=[math.nan])", "quantiles=nan.*finite number"),
    ("of_outputs(ONES, quantiles=['0.5'])", "quantiles='0.5'.*expected a number"),
    ("of_logits(ONES)", "from_logits.*two classes or more"),
    ("of_logits(ONES[:, :, None])", "two classes or more"),
    ("of_logits(OUTPUTS[None])", "two classes or more"),
    ("of_logits(OUTPUTS[:0])", "one member or more"),
    ("of_outputs(OUTPUTS[:0])", "one member or more"),
    ("predict(*MODEL, X, torch.ones(5))", "predict.*one batch size"),
    ("predict(*NORM, X, chunk_size=2)", "batch statistics"),
    ("values(*NORM, X, chunk_size=2)", "batch statistics"),
]
REFUSED += [
    (call.format(kind), f"^predict.*{message}")
    for call, message in OF_EITHER_KIND
    for kind in ("predict", "values")
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_bad_calls_are_refused(call, message):
    norm = [nn.BatchNorm1d(WIDTH, track_running_stats=False) for _ in range(2)]
    models = {"MODEL": changed(lambda y: y), "NORM": stack(norm)}
    predict(*models["NORM"], torch.randn(4, WIDTH))
    with pytest.raises((ValueError, TypeError), match=message):
        eval(call, globals() | models | {"X": torch.ones(4, WIDTH)})
