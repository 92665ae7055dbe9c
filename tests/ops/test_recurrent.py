"""Recurrent nets against torch's own, whose gradients come from plain autograd."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import vgrad
from tests import oracle
from tests.examples import examples
from tests.losses import randn
from tests.oracle import assert_exact
from vgrad.ops import OPS, recurrent
from vgrad.testing import check_rule

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
every_mode = pytest.mark.parametrize("mode", GATES)
LAYOUT = {
    "num_layers": 1,
    "dropout": 0.0,
    "train": True,
    "bidirectional": False,
    "batch_first": False,
}
TWICE = {"num_layers": 2, "bidirectional": True}
LAYOUTS = {
    "one layer": {},
    "no bias": {"bias": False},
    "three layers": {"num_layers": 3},
    "bidirectional": {"bidirectional": True, "batch_first": True},
    "two layers, bidirectional, no bias": {**TWICE, "bias": False},
    "one step": {**TWICE, "steps": 1},
    "one sequence": {"size": 1, "batch_first": True},
    "no sequence": {"size": 0, "num_layers": 2},
    "wide input": {"inputs": 9},
    "one feature": {"inputs": 1, "features": 1},
}
PROJECTED = [
    (f"{name}, projected to {size}", "lstm", {**LAYOUTS[name], "projected": size})
    for name in LAYOUTS
    for size in (2, 4)
]
PROBLEMS = [(name, mode, LAYOUTS[name]) for name in LAYOUTS for mode in GATES]


def problem(
    mode,
    *,
    steps=4,
    size=3,
    inputs=2,
    features=3,
    projected=None,
    bias=True,
    dtype=torch.float64,
    **layout,
):
    """Make `x`, the states, the flat list of weights and the layout."""
    layout = LAYOUT | layout
    directions = 1 + layout["bidirectional"]
    rows, out = GATES[mode] * features, projected or features
    weights: list[Tensor] = []
    for number in range(layout["num_layers"]):
        width = out * directions if number else inputs
        shapes = [(rows, width), (rows, out), *[(rows,)] * (2 * bias)]
        shapes += [(projected, features)] * (projected is not None)
        for shape in shapes * directions:
            weights.append(0.6 * randn(*shape, seed=50 + len(weights), dtype=dtype))
    lead = (size, steps) if layout["batch_first"] else (steps, size)
    places = layout["num_layers"] * directions
    sizes = (out, features) if mode == "lstm" else (features,)
    hidden = [
        randn(places, size, each, seed=1 + place, dtype=dtype)
        for place, each in enumerate(sizes)
    ]
    return randn(*lead, inputs, dtype=dtype), hidden, weights, layout


def by_torch(mode, x, hidden, weights, layout):
    places = layout["num_layers"] * (1 + layout["bidirectional"])
    state = tuple(hidden) if mode == "lstm" else hidden[0]
    biases = len(weights) // places > 3
    return getattr(torch, mode)(x, state, weights, biases, *layout.values())


def by_steps(mode, x, hidden, weights, layout):
    return recurrent.steps(recurrent.Net(mode, x, hidden, weights, **layout))


def by_kernels(mode, x, hidden, weights, layout, report=lambda *_: None):
    anchor = torch.zeros((), dtype=x.dtype, requires_grad=True)
    net = recurrent.Net(mode, x, hidden, weights, **layout)
    return recurrent.run_recorded(net, report, anchor)


def leaves(tensors):
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def value_of(outputs, at=(0, 1, 2)):
    """Return a function of some outputs: output, h_n, c_n."""
    seeds = [
        randn(*each.shape, seed=90 + n, dtype=each.dtype)
        for n, each in enumerate(outputs)
    ]
    pairs = enumerate(zip(outputs, seeds, strict=True))
    return sum((one * other).sum() for n, (one, other) in pairs if n in at)


def differentiated(run, mode, x, hidden, weights, layout, at=(0, 1, 2)):
    """Outputs, and gradients at x, the states and the weights, by plain autograd."""
    x, *rest = leaves([x, *hidden, *weights])
    outputs = run(mode, x, rest[: len(hidden)], rest[len(hidden) :], layout)
    grads = torch.autograd.grad(
        value_of(outputs, at), [x, *rest], allow_unused=True, materialize_grads=True
    )
    return list(outputs), list(grads)


def reported(mode, x, hidden, weights, layout, at=(0, 1, 2)):
    """The same by `run_recorded`, weights' gradients made of its reports.

    Gradients of the weights are for each sequence, [N, *shape].
    """
    x, *hidden = leaves([x, *hidden])
    found: dict[int, Tensor] = {}
    each = len(weights) // (layout["num_layers"] * (1 + layout["bidirectional"]))

    def report(first, d_ih, d_hh, x, h_prev):
        assert first not in found
        pairs = (d_ih, x), (d_hh, h_prev)
        for place, (d, inputs) in enumerate(pairs, first):
            found[place] = torch.einsum("tno,tni->noi", d, inputs.to(d.dtype))
        if each == 4:
            found[first + 2], found[first + 3] = d_ih.sum(0), d_hh.sum(0)

    outputs = by_kernels(mode, x, hidden, weights, layout, report)
    grads = torch.autograd.grad(value_of(outputs, at), [x, *hidden])
    assert sorted(found) == list(range(len(weights)))
    return list(outputs), list(grads), [found[place] for place in sorted(found)]


def by_reports(mode, *arguments, at=(0, 1, 2)):
    """Outputs and gradients as `differentiated` lists them, summed over sequences."""
    outputs, grads, of_weights = reported(mode, *arguments, at=at)
    return outputs, [*grads, *(each.sum(0) for each in of_weights)]


assert_equal = partial(oracle.assert_exact, tolerance=1e-11)


def check_both(mode, *arguments, at=(0, 1, 2), projected=False):
    expected = differentiated(by_torch, mode, *arguments, at=at)
    found = differentiated(by_steps, mode, *arguments, at=at)
    assert_equal(found, expected)
    if not projected:
        assert_equal(by_reports(mode, *arguments, at=at), expected)


@pytest.mark.parametrize(("name", "mode", "sizes"), PROBLEMS + PROJECTED)
def test_numbers_and_gradients_are_those_of_torch(name, mode, sizes):
    check_both(mode, *problem(mode, **sizes), projected="projected" in sizes)


@pytest.mark.slow
@examples(60)
@given(
    mode=st.sampled_from(list(GATES)),
    steps=st.integers(1, 5),
    size=st.integers(0, 3),
    inputs=st.integers(1, 4),
    features=st.integers(1, 4),
    bias=st.booleans(),
    num_layers=st.integers(1, 3),
    bidirectional=st.booleans(),
    batch_first=st.booleans(),
    at=st.sets(st.integers(0, 1), min_size=1),
)
def test_nets_of_any_size(mode, at, **sizes):
    check_both(mode, *problem(mode, **sizes), at=at)


@every_mode
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_dropout_between_layers_draws_what_torch_draws(
    mode, bidirectional, batch_first
):
    sizes = {"bidirectional": bidirectional, "batch_first": batch_first}
    *arguments, layout = problem(mode, num_layers=3, dropout=0.4, **sizes)

    def seeded(run):
        torch.manual_seed(7)
        return run(mode, *arguments, layout), torch.get_rng_state()

    expected, state = seeded(partial(differentiated, by_torch))
    for run in (partial(differentiated, by_steps), by_reports):
        found, after = seeded(run)
        assert torch.equal(after, state)
        assert_equal(found, expected)
    torch.manual_seed(8)
    other = by_steps(mode, *arguments, layout)
    assert not torch.equal(other[0], expected[0][0])
    evaluated = layout | {"train": False}
    whole = by_torch(mode, *arguments, layout | {"dropout": 0.0})
    assert_equal(by_steps(mode, *arguments, evaluated), whole)
    assert_equal(by_reports(mode, *arguments, evaluated)[0], [*whole])


@every_mode
def test_steps_run_under_vmap_with_weights_of_every_sample(mode):
    scales = torch.linspace(0.5, 1.5, 3, dtype=torch.float64)
    x, hidden, weights, layout = problem(mode, **TWICE)
    stacked = [torch.stack([w * s for s in scales]) for w in weights]

    def value(run, weights):
        outputs = run(mode, x, hidden, weights, layout)
        return sum(each.sin().sum() for each in outputs)

    found = torch.vmap(torch.func.grad(partial(value, by_steps)))(stacked)
    for member, scale in enumerate(scales):
        own = leaves([w * scale for w in weights])
        expected = torch.autograd.grad(value(by_torch, own), own)
        assert_equal([each[member] for each in found], [*expected])


@every_mode
@pytest.mark.parametrize("bias", [False, True])
def test_cells_have_the_numbers_and_gradients_of_torch(mode, bias):
    x, hidden, weights, _ = problem(mode, bias=bias)
    x, hidden = x[0], [each[0] for each in hidden]
    op = getattr(torch, f"{mode}_cell")

    def run(cell):
        own, *rest = leaves([x, *hidden, *weights])
        states, flat = rest[: len(hidden)], rest[len(hidden) :]
        found = cell(own, tuple(states) if mode == "lstm" else states[0], *flat)
        found = found if mode == "lstm" else (found,)
        value = sum(each.sin().sum() for each in found)
        return [*found, *torch.autograd.grad(value, [own, *rest])]

    assert_equal(run(OPS[op].mapped), run(op))
    states = [each[:1] for each in hidden]
    message = rf"{mode}_cell\(a state of shapes .*expected"
    with pytest.raises(RuntimeError, match=message):
        OPS[op].mapped(x, states if mode == "lstm" else states[0], *weights)


@every_mode
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_goes_back_in_float32(mode, dtype):
    x, hidden, weights, layout = problem(mode, dtype=dtype, **TWICE)
    wide = [x.double(), [h.double() for h in hidden], [w.double() for w in weights]]
    outputs, grads = differentiated(by_torch, mode, *wide, layout)
    found, sums = by_reports(mode, x, hidden, weights, layout)
    count = 1 + len(hidden)
    assert {each.dtype for each in (*found, *sums[:count])} == {dtype}
    assert {each.dtype for each in sums[count:]} == {torch.float32}
    tolerances = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
    for one, other in zip(found, outputs, strict=True):
        close = {"rtol": 0, "atol": tolerances[dtype]}
        torch.testing.assert_close(one.double(), other, **close)
    assert_exact(sums, grads, tolerances[dtype])


@pytest.mark.parametrize("mode", ["gru", "rnn_tanh", "rnn_relu"])
def test_autocast_gives_the_dtypes_and_values_of_torch(mode):
    arguments = problem(mode, dtype=torch.float32, num_layers=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = by_torch(mode, *arguments)
        found, sums = by_reports(mode, *arguments)
    assert_exact(found, [*expected], 0)
    _, exact = differentiated(by_torch, mode, *arguments)
    assert {each.dtype for each in sums} == {torch.float32}
    assert_exact(sums, exact, 0.1)


# Refusals.


GRU = problem("gru")
REFUSED = [
    *[
        ("gru", (*GRU[:2], [*GRU[2], GRU[2][0]][:count], LAYOUT), text)
        for count in (1, 3, 5)
        for text in [rf"\({count} weights\): expected 1 times w_ih, w_hh"]
    ],
    *[
        ("gru", (torch.zeros(*shape).double(), *GRU[1:]), text)
        for shape in ((0, 3, 2), (4, 2), (1, 4, 3, 2))
        for text in [rf"\(x \({', '.join(map(str, shape))}\)\): expected \[T, N, I\]"]
    ],
    *[
        (mode, (x, wrong(hidden), *rest), r"\(a state of shapes .*w_hh")
        for mode in GATES
        for x, hidden, *rest in [problem(mode)]
        for wrong in (
            lambda hidden: [each.expand(2, -1, -1) for each in hidden],
            lambda hidden: [each[:, :1] for each in hidden],
            lambda hidden: [each[..., :1] for each in hidden],
            lambda hidden: hidden * 2,
        )
    ],
]


@pytest.mark.parametrize("run", [by_steps, by_kernels])
def test_refused(run):
    for mode, arguments, text in REFUSED:
        with pytest.raises(RuntimeError, match=f"^{mode}{text}"):
            run(mode, *arguments)


# Recorded nets.


@pytest.mark.parametrize("net", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("computed", [False, True])
def test_recorded_nets_have_every_quantity_of_a_loop(net, computed):
    """Behind a layer of its own; the weights may be computed from others."""
    fmodel, params, _ = vgrad.make_functional_with_buffers(net(3, 4).double())
    params = {name: value.detach() for name, value in params.items()}
    params["first"] = randn(3, 3, seed=7)

    def loss(params, buffers, x):
        if computed:
            params = {name: 0.5 * w + w.tanh() for name, w in params.items()}
        rest = {name: value for name, value in params.items() if name != "first"}
        outputs = fmodel(rest, {}, F.linear(x, params["first"]).sin())
        found = pytree.tree_leaves(outputs)
        return sum((n * each).sin().sum() for n, each in enumerate(found, 1))

    check_rule(loss, params, {}, randn(3, 5, 3), expanded=computed)


@pytest.mark.parametrize("mode", ["lstm", "gru", "rnn_tanh"])
def test_recorded_nets_may_share_weights_and_start_from_parameters(mode):
    x, hidden, weights, layout = problem(mode, features=2, num_layers=2)
    params = {str(place): each for place, each in enumerate(weights[:4])}
    params |= {f"h{place}": each[:, 0] for place, each in enumerate(hidden)}

    def loss(params, buffers, x):
        own = [params[str(place % 4)] for place in range(8)]
        starts = [params[f"h{place}"] for place in range(len(hidden))]
        states = [each[:, None].expand(-1, x.shape[1], -1) for each in starts]
        return sum(each.sin().sum() for each in by_torch(mode, x, states, own, layout))

    check_rule(loss, params, {}, randn(3, *x.shape), expanded=True)


@every_mode
def test_dropout_of_recorded_nets_draws_for_each_sample_or_once(mode):
    x, hidden, weights, layout = problem(mode, num_layers=2, dropout=0.5)
    params = {str(place): each for place, each in enumerate(weights)}
    x = x.expand(6, *x.shape)

    def loss(params, buffers, x):
        own = list(params.values())
        return by_torch(mode, x, hidden, own, layout)[0].sin().sum()

    def grads(strategy, **options):
        torch.manual_seed(0)
        compute = vgrad.per_sample_grad(loss, strategy=strategy, **options)
        return compute(params, {}, x)["4"]

    recorded = grads("recorded", randomness="same")
    for strategy in ("vmap", "loop"):
        found = grads(strategy, randomness="same")
        torch.testing.assert_close(found[0], found[-1])
        torch.testing.assert_close(found, recorded)
    different = grads("recorded", randomness="different")
    assert len(different.flatten(1).unique(dim=0)) == 6
    with pytest.raises(RuntimeError, match='randomness="different"'):
        grads("recorded")
