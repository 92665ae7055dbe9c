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
from tests.oracle import assert_exact
from vgrad.lowering.sequences import cells, recurrent
from vgrad.testing import check_rule

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
every_mode = pytest.mark.parametrize("mode", GATES)
LAYOUT = {"num_layers": 1, "bidirectional": False, "dropout": 0.0}
LAYOUT |= {"training": True, "batch_first": False}
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


def normal(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


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
    """Make `x`, the states, the flat list of weights and the rest of the arguments."""
    layout = {**LAYOUT, **layout}
    directions = 1 + layout["bidirectional"]
    rows, out = GATES[mode] * features, projected or features
    weights: list[Tensor] = []
    for number in range(layout["num_layers"]):
        width = out * directions if number else inputs
        shapes = [(rows, width), (rows, out), *[(rows,)] * (2 * bias)]
        shapes += [(projected, features)] * (projected is not None)
        for shape in shapes * directions:
            weights.append(0.6 * normal(*shape, seed=50 + len(weights), dtype=dtype))
    lead = (size, steps) if layout["batch_first"] else (steps, size)
    places = layout["num_layers"] * directions
    sizes = (out, features) if mode == "lstm" else (features,)
    hidden = [
        normal(places, size, each, seed=1 + place, dtype=dtype)
        for place, each in enumerate(sizes)
    ]
    return normal(*lead, inputs, dtype=dtype), hidden, weights, layout


def by_torch(mode, x, hidden, weights, layout):
    """Run torch's own function."""
    places = layout["num_layers"] * (1 + layout["bidirectional"])
    return getattr(torch, mode)(
        x,
        tuple(hidden) if mode == "lstm" else hidden[0],
        weights,
        len(weights) // places > 3,
        layout["num_layers"],
        layout["dropout"],
        layout["training"],
        layout["bidirectional"],
        layout["batch_first"],
    )


def by_steps(mode, x, hidden, weights, layout):
    return cells.steps(mode, x, hidden, weights, **layout)


def leaves(tensors):
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def cotangents(outputs):
    return [
        normal(*each.shape, seed=90 + place, dtype=each.dtype)
        for place, each in enumerate(outputs)
    ]


def differentiated(run, mode, x, hidden, weights, layout, at=(0, 1, 2)):
    """Outputs, and gradients at x, the states and the weights, by plain autograd.

    `at` says which outputs the gradient comes from: output, h_n, c_n.
    """
    x, *rest = leaves([x, *hidden, *weights])
    hidden, weights = rest[: len(hidden)], rest[len(hidden) :]
    outputs = run(mode, x, hidden, weights, layout)
    given = [(o, g) for o, g in zip(outputs, cotangents(outputs), strict=True)]
    value = sum((o * g).sum() for n, (o, g) in enumerate(given) if n in at)
    grads = torch.autograd.grad(
        value, [x, *rest], allow_unused=True, materialize_grads=True
    )
    return list(outputs), list(grads)


def reported(mode, x, hidden, weights, layout, at=(0, 1, 2)):
    """The same by `recurrent_net`, weights' gradients made of what it reports.

    Those of the weights are for each sequence, [N, *shape].
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

    anchor = torch.zeros((), dtype=x.dtype, requires_grad=True)
    options = {"anchor": anchor, **layout}
    outputs = recurrent.recurrent_net(mode, x, hidden, weights, report, **options)
    given = [(o, g) for o, g in zip(outputs, cotangents(outputs), strict=True)]
    value = sum((o * g).sum() for n, (o, g) in enumerate(given) if n in at)
    grads = torch.autograd.grad(value, [x, *hidden])
    assert sorted(found) == list(range(len(weights)))
    return list(outputs), list(grads), [found[place] for place in sorted(found)]


def by_reports(mode, *given, at=(0, 1, 2)):
    """Outputs and gradients as `differentiated` lists them, summed over sequences."""
    found, own, of_weights = reported(mode, *given, at=at)
    return found, [*own, *(each.sum(0) for each in of_weights)]


assert_equal = partial(oracle.assert_exact, tolerance=1e-11)


@every_mode
@pytest.mark.parametrize("name", LAYOUTS)
def test_steps_and_reported_sides_have_the_numbers_and_gradients_of_torch(name, mode):
    given = problem(mode, **LAYOUTS[name])
    expected = differentiated(by_torch, mode, *given)
    assert_equal(differentiated(by_steps, mode, *given), expected)
    assert_equal(by_reports(mode, *given), expected)


@every_mode
def test_what_is_reported_tells_the_sequences_apart(mode):
    x, hidden, weights, layout = problem(mode, num_layers=2, bidirectional=True)
    _, _, found = reported(mode, x, hidden, weights, layout)
    whole = cotangents(by_torch(mode, x, hidden, weights, layout))
    for n in range(x.shape[1]):
        own, states = leaves(weights), [h[:, n : n + 1] for h in hidden]
        alone = by_torch(mode, x[:, n : n + 1], states, own, layout)
        pairs = zip(alone, whole, strict=True)
        value = sum((one[:, 0] * each[:, n]).sum() for one, each in pairs)
        assert_equal([each[n] for each in found], [*torch.autograd.grad(value, own)])


@every_mode
@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("steps", [1, 4])
def test_gradients_may_come_from_one_output_alone(mode, at, steps):
    at = at if mode == "lstm" else min(at, 1)
    given = problem(mode, steps=steps, num_layers=2, bidirectional=True)
    _, expected = differentiated(by_torch, mode, *given, at=(at,))
    assert_equal(by_reports(mode, *given, at=(at,))[1], expected)
    assert_equal(differentiated(by_steps, mode, *given, at=(at,))[1], expected)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("projected", [2, 4])
def test_steps_project_the_states_of_an_lstm(name, projected):
    given = problem("lstm", projected=projected, **LAYOUTS[name])
    expected = differentiated(by_torch, "lstm", *given)
    assert_equal(differentiated(by_steps, "lstm", *given), expected)


@every_mode
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_dropout_between_layers_draws_what_torch_draws(
    mode, bidirectional, batch_first
):
    sizes = {"bidirectional": bidirectional, "batch_first": batch_first}
    *given, layout = problem(mode, num_layers=3, dropout=0.4, **sizes)

    def seeded(run, *args):
        torch.manual_seed(7)
        return run(*args, mode, *given, layout), torch.get_rng_state()

    expected, state = seeded(differentiated, by_torch)
    for run in ((differentiated, by_steps), (by_reports,)):
        found, after = seeded(*run)
        assert torch.equal(after, state)
        assert_equal(found, expected)
    torch.manual_seed(8)
    assert not torch.equal(by_steps(mode, *given, layout)[0], expected[0][0])
    evaluated = {**layout, "training": False}
    whole = by_torch(mode, *given, {**layout, "dropout": 0.0})
    assert_equal(by_steps(mode, *given, evaluated), whole)
    assert_equal(by_reports(mode, *given, evaluated)[0], [*whole])


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
    given = problem(mode, **sizes)
    expected = differentiated(by_torch, mode, *given, at=at)
    assert_equal(by_reports(mode, *given, at=at), expected)
    assert_equal(differentiated(by_steps, mode, *given, at=at), expected)


def one_layer(mode, *, seen=None, reverse=False, anchor=None, low_state=False, **sizes):
    """Run `recurrent_layer`; `seen` gets what it reports."""
    x, hidden, weights, _ = problem(mode, **sizes)
    x, *hidden = leaves([x, *(each[0] for each in hidden)])
    if low_state:
        hidden[1] = hidden[1].detach().float().requires_grad_()
    anchor = torch.zeros((), requires_grad=True) if anchor is None else anchor
    given = x, tuple(hidden), (*weights, None, None)[:4]
    report = (lambda *found: None) if seen is None else lambda *each: seen.append(each)
    options = {"anchor": anchor, "reverse": reverse}
    return *recurrent.recurrent_layer(mode, *given, report, **options), *given


def backward_of(output, final, seen):
    """Differentiate some function of everything, and return what was reported."""
    value = output.sin().sum() + sum(each.cos().sum() for each in final)
    value.backward(retain_graph=True)
    return seen


@every_mode
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_in_reverse_is_one_of_flipped_time(mode, bias):
    options = {"seen": [], "reverse": True, "bias": bias}
    output, final, x, hidden, weights = one_layer(mode, **options)
    ((_, _, x, h_prev),) = backward_of(output, final, options["seen"])
    flipped = x.detach().flip(0)
    states = [each.detach()[None] for each in hidden]
    flat = [each for each in weights if each is not None]
    expected = by_torch(mode, flipped, states, flat, LAYOUT)
    assert_equal((output.flip(0), *(each[None] for each in final)), expected)
    # What every step began with, in the order of time of x.
    torch.testing.assert_close(x, flipped.flip(0))
    torch.testing.assert_close(h_prev[:-1], output[1:].detach())
    torch.testing.assert_close(h_prev[-1], states[0][0])


@every_mode
def test_both_sides_share_their_gradients_but_in_a_gru_and_are_found_again(mode):
    seen: list = []
    output, final, x, hidden, _ = one_layer(mode, seen=seen)
    ((d_ih, d_hh, inputs, h_prev),) = backward_of(output, final, seen)
    assert (d_ih is d_hh) == (mode != "gru")
    steps, size, features = output.shape
    assert d_ih.shape == d_hh.shape == (steps, size, GATES[mode] * features)
    assert (inputs.shape, h_prev.shape) == (x.shape, output.shape)
    first = [each.grad.clone() for each in (x, *hidden)]
    backward_of(output, final, seen)
    assert_equal([each.grad for each in (x, *hidden)], [2 * each for each in first])
    assert len(seen) == 2
    assert_exact(*seen, 0)


@every_mode
def test_the_report_comes_without_autograd_and_without_autocast(mode):
    modes = []

    def report(*found):
        modes.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        assert not any(each.requires_grad for each in found)

    x, hidden, weights, _ = problem(mode)
    anchor = torch.zeros((), requires_grad=True)
    x, *states = leaves([x, *(each[0] for each in hidden)])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        given = mode, x * 1, states, weights, report
        output, _ = recurrent.recurrent_layer(*given, anchor=anchor)
        output.sum().backward()
    assert modes == [(False, False)]


@every_mode
@pytest.mark.parametrize("wanted", ["x", "h", "nothing"])
def test_gradients_come_only_where_they_are_wanted_and_the_report_always(mode, wanted):
    x, hidden, weights, _ = problem(mode)
    x.requires_grad_(wanted == "x")
    states = tuple(each[0].requires_grad_(wanted == "h") for each in hidden)
    anchor, seen = torch.tensor(3.0, requires_grad=True), []
    given = mode, x, states, weights, lambda *found: seen.append(found)
    output, final = recurrent.recurrent_layer(*given, anchor=anchor)
    output.sum().backward()
    assert len(seen) == 1
    assert anchor.grad == 0
    assert (x.grad is not None) == (wanted == "x")
    assert all((each.grad is not None) == (wanted == "h") for each in states)
    expected = by_torch(mode, x, [each[None] for each in states], weights, LAYOUT)
    assert_equal((output, *(each[None] for each in final)), expected)
    with torch.no_grad():
        output, final = recurrent.recurrent_layer(*given, anchor=anchor)
    assert not any(each.requires_grad for each in (output, *final))
    assert len(seen) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_lstm_on_a_cpu_keeps_its_gates_and_cells(dtype, monkeypatch):
    monkeypatch.setattr(torch, "lstm", None)  # no kernel runs
    seen: list = []
    output, final, x, hidden, *_ = one_layer("lstm", seen=seen, dtype=dtype)
    gates, kept, *_ = output.grad_fn.saved_tensors
    steps, size, features = output.shape
    assert gates.shape == (steps, size, 4, features)
    torch.testing.assert_close(output, gates[:, :, 3] * kept.tanh())
    torch.testing.assert_close(final[1], kept[-1])
    backward_of(output, final, seen)
    assert seen[0][0].dtype == x.grad.dtype == hidden[0].grad.dtype == dtype


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_an_lstm_on_a_cpu_keeps_the_order_of_its_input_in_memory(batch_first, reverse):
    x, hidden, weights, _ = problem("lstm")
    x = x.transpose(0, 1).contiguous().transpose(0, 1) if batch_first else x
    x.requires_grad_()
    anchor, found = torch.zeros((), requires_grad=True), []
    states = tuple(each[0] for each in hidden)
    given = "lstm", x, states, weights, lambda *each: found.extend(each)
    options = {"anchor": anchor, "reverse": reverse}
    output, _ = recurrent.recurrent_layer(*given, **options)
    output.sin().sum().backward()
    for each in (output, x.grad, *found):
        assert each.transpose(0, int(batch_first)).is_contiguous()


def kernel_calls(monkeypatch, mode):
    """Return a list that grows with every call of the kernel."""
    calls, kernel = [], getattr(torch, mode)

    def spy(*args):
        calls.append(mode)
        return kernel(*args)

    monkeypatch.setattr(torch, mode, spy)
    return calls


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("why", ["autocast", "mixed dtypes"])
def test_an_lstm_by_the_kernel_computes_its_gates_again(
    why, reverse, bias, monkeypatch
):
    """In float64, which autocast leaves alone, so that results can be compared."""
    kept, again, options = [], [], {"reverse": reverse, "bias": bias}
    own = one_layer("lstm", seen=kept, **options)
    backward_of(*own[:2], kept)
    calls = kernel_calls(monkeypatch, "lstm")
    options["low_state"] = why == "mixed dtypes"
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=why == "autocast"):
        output, final, x, (h, c), _ = one_layer("lstm", seen=again, **options)
    assert calls == ["lstm"]
    assert output.grad_fn.saved_tensors[:2] == (None, None)
    backward_of(output, final, again)
    tolerance = 1e-11 if why == "autocast" else 1e-6  # of the state in float32
    assert_equal([output, *final], [own[0], *own[1]], tolerance=tolerance)
    assert_equal(again, kept, tolerance=tolerance)
    grads = [own[2].grad, *(each.grad for each in own[3])]
    assert_equal([x.grad, h.grad, c.grad.double()], grads, tolerance=tolerance)
    assert c.grad.dtype == c.dtype


@pytest.mark.parametrize("mode", ["gru", "rnn_tanh", "rnn_relu"])
def test_other_nets_always_take_the_kernel(mode, monkeypatch):
    calls = kernel_calls(monkeypatch, mode)
    output, *_ = one_layer(mode, dtype=torch.float32)
    assert calls == [mode]
    assert output.grad_fn.saved_tensors[:2] == (None, None)


@every_mode
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_goes_back_in_float32(mode, dtype):
    sizes = {"num_layers": 2, "bidirectional": True, "dtype": dtype}
    x, hidden, weights, layout = problem(mode, **sizes)
    wide = [x.double(), [h.double() for h in hidden], [w.double() for w in weights]]
    outputs, grads = differentiated(by_torch, mode, *wide, layout)
    found, sums = by_reports(mode, x, hidden, weights, layout)
    assert {each.dtype for each in (*found, *sums[: 1 + len(hidden)])} == {dtype}
    tolerance = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
    tolerance = tolerance[str(dtype).removeprefix("torch.")]
    for one, other in zip(found, outputs, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=tolerance)
    assert_exact(sums, grads, tolerance)


@every_mode
def test_gradients_are_reported_in_float32_at_least(mode):
    seen: list = []
    output, final, x, hidden, _ = one_layer(mode, seen=seen, dtype=torch.bfloat16)
    ((d_ih, d_hh, inputs, h_prev),) = backward_of(output, final, seen)
    assert d_ih.dtype == d_hh.dtype == torch.float32
    given = (inputs, h_prev, output, x.grad, hidden[0].grad)
    assert {each.dtype for each in given} == {torch.bfloat16}


@pytest.mark.parametrize("mode", ["gru", "rnn_tanh", "rnn_relu"])
def test_autocast_gives_the_dtypes_and_values_of_torch(mode):
    given = problem(mode, dtype=torch.float32, num_layers=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = by_torch(mode, *given)
        found, sums = by_reports(mode, *given)
    assert_exact(found, [*expected], 0)
    _, exact = differentiated(by_torch, mode, *given)
    assert {each.dtype for each in sums} == {torch.float32}
    assert_exact(sums, exact, 0.1)


@every_mode
def test_an_output_that_is_changed_in_place_raises(mode):
    output, *_ = one_layer(mode)
    output.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@every_mode
def test_final_states_may_be_changed_in_place(mode):
    """They share no memory with the output, which is kept."""
    given = problem(mode, num_layers=2)
    expected, *states = run_recurrent(mode, *given)
    output, *final = run_recurrent(mode, *given)
    assert_equal([each.mul_(2) for each in final], [2 * each for each in states])
    assert torch.equal(output, expected)
    (output.sum() + sum(each.sum() for each in final)).backward()


@every_mode
def test_a_second_derivative_raises_and_names_the_steps_which_have_them(mode):
    output, _, x, *_ = one_layer(mode)
    (d_x,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="got a second one. Use steps"):
        d_x.sum().backward()
    x, hidden, weights, layout = problem(mode, steps=2, size=1, features=2)
    count = len(hidden)

    def run(x, *rest):
        return by_steps(mode, x, rest[:count], rest[count:], layout)

    assert torch.autograd.gradgradcheck(run, tuple(leaves([x, *hidden, *weights])))


@every_mode
def test_steps_run_under_vmap_with_weights_of_every_sample(mode):
    scales = torch.linspace(0.5, 1.5, 3, dtype=torch.float64)
    x, hidden, weights, layout = problem(mode, num_layers=2, bidirectional=True)
    stacked = [torch.stack([w * s for s in scales]) for w in weights]

    def value(run, weights):
        outputs = run(mode, x, hidden, weights, layout)
        return sum(each.sin().sum() for each in outputs)

    found = torch.vmap(torch.func.grad(lambda own: value(by_steps, own)))(stacked)
    for member, scale in enumerate(scales):
        own = leaves([w * scale for w in weights])
        expected = torch.autograd.grad(value(by_torch, own), own)
        assert_equal([each[member] for each in found], [*expected])


CELLS = {mode: getattr(cells, f"{mode}_cell") for mode in GATES}


@every_mode
@pytest.mark.parametrize("bias", [False, True])
def test_cells_have_the_numbers_and_gradients_of_torch(mode, bias):
    x, hidden, weights, _ = problem(mode, bias=bias)
    x, hidden = x[0], [each[0] for each in hidden]

    def run(cell):
        own, *rest = leaves([x, *hidden, *weights])
        states, flat = rest[: len(hidden)], rest[len(hidden) :]
        found = cell(own, tuple(states) if mode == "lstm" else states[0], *flat)
        found = found if mode == "lstm" else (found,)
        value = sum(each.sin().sum() for each in found)
        return [*found, *torch.autograd.grad(value, [own, *rest])]

    assert_equal(run(CELLS[mode]), run(getattr(torch, f"{mode}_cell")))


@every_mode
def test_a_cell_refuses_a_state_that_would_broadcast(mode):
    x, hidden, weights, _ = problem(mode)
    states = [each[0, :1] for each in hidden]
    with pytest.raises(
        RuntimeError, match=rf"{mode}_cell\(a state of shapes .*expected"
    ):
        CELLS[mode](x[0], states if mode == "lstm" else states[0], *weights)


def run_recurrent(mode, x, hidden, weights, layout):
    anchor = torch.zeros((), requires_grad=True)
    report = lambda *found: None  # noqa: E731
    options = {"anchor": anchor, **layout}
    return recurrent.recurrent_net(mode, x, hidden, weights, report, **options)


BOTH = {"steps": by_steps, "recurrent_net": run_recurrent}
both = pytest.mark.parametrize("name", BOTH)


@both
def test_a_mode_that_is_none_is_refused(name):
    with pytest.raises(ValueError, match=rf"{name}\(mode='elman'\): expected .*lstm"):
        BOTH[name]("elman", *problem("gru"))
    x, hidden, weights, _ = problem("gru")
    given = "elman", x, (hidden[0][0],), weights, print
    with pytest.raises(ValueError, match=r"recurrent_layer\(mode='elman'\): expected"):
        recurrent.recurrent_layer(*given, anchor=torch.zeros((), requires_grad=True))


@both
@pytest.mark.parametrize("count", [1, 3, 5])
def test_a_wrong_number_of_weights_is_refused(name, count):
    x, hidden, weights, layout = problem("gru")
    weights = [*weights, weights[0]][:count]
    message = rf"{name}\({count} weights\): expected 1 times w_ih, w_hh"
    with pytest.raises(RuntimeError, match=message):
        BOTH[name]("gru", x, hidden, weights, layout)


@both
@pytest.mark.parametrize("shape", [(0, 3, 2), (4, 2), (1, 4, 3, 2)])
def test_an_input_without_time_steps_or_of_other_dimensions_is_refused(name, shape):
    _, *rest = problem("gru")
    message = rf"{name}\(x \({', '.join(map(str, shape))}\)\): expected \[T, N, I\]"
    with pytest.raises(RuntimeError, match=message):
        BOTH[name]("gru", torch.zeros(shape).double(), *rest)


@both
@every_mode
@pytest.mark.parametrize("wrong", ["places", "size", "features", "count"])
def test_a_state_of_another_size_is_refused(name, mode, wrong):
    x, hidden, weights, layout = problem(mode)
    hidden = {
        "places": [each.expand(2, -1, -1) for each in hidden],
        "size": [each[:, :1] for each in hidden],
        "features": [each[..., :1] for each in hidden],
        "count": hidden * 2,
    }[wrong]
    message = rf"{name}\(a state of shapes .*\): expected .*and w_hh"
    with pytest.raises(RuntimeError, match=message):
        BOTH[name](mode, x, hidden, weights, layout)


def test_projections_are_left_to_the_steps():
    given = problem("lstm", projected=2)
    with pytest.raises(NotImplementedError, match="without projections.*Use steps"):
        run_recurrent("lstm", *given)


@every_mode
def test_an_anchor_without_and_weights_with_a_gradient_are_refused(mode):
    message = r"recurrent_layer\(anchor\): expected a scalar that requires grad"
    with pytest.raises(ValueError, match=message):
        one_layer(mode, anchor=torch.zeros(()))
    x, hidden, weights, layout = problem(mode)
    weights[-1].requires_grad_()
    message = r"recurrent_layer\(weights\): expected weights without gradients"
    with pytest.raises(ValueError, match=message):
        run_recurrent(mode, x, hidden, weights, layout)


NETS = {
    "lstm": lambda: nn.LSTM(3, 4),
    "gru": lambda: nn.GRU(3, 4),
    "rnn": lambda: nn.RNN(3, 4),
    "relu": lambda: nn.RNN(3, 4, nonlinearity="relu"),
    "lstm, two layers": lambda: nn.LSTM(3, 4, 2, bidirectional=True, bias=False),
    "gru, two layers": lambda: nn.GRU(3, 4, 2, bidirectional=True, bias=False),
    "lstm, projected": lambda: nn.LSTM(3, 4, 2, proj_size=2, bidirectional=True),
    "rnn, batch first": lambda: nn.RNN(3, 4, 2, batch_first=True),
    "lstm cell": lambda: Cell(nn.LSTMCell(3, 4)),
    "gru cell": lambda: Cell(nn.GRUCell(3, 4, bias=False)),
    "rnn cell": lambda: Cell(nn.RNNCell(3, 4)),
    "relu cell": lambda: Cell(nn.RNNCell(3, 4, nonlinearity="relu")),
}


class Cell(nn.Module):
    """Makes a net of a cell, which starts from zeros."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x):
        state = None
        for each in x:
            state = self.cell(each, state)
        return state if isinstance(state, tuple) else (state,)


def loss_of(net, *, values=lambda x: x):
    """Make a loss of all that a net returns, behind a layer of its own."""
    fmodel, params, buffers = vgrad.make_functional_with_buffers(net.double())
    assert not buffers
    params = {name: value.detach() for name, value in params.items()}
    params["first"] = normal(3, 3, seed=7)

    def loss(params, buffers, x):
        params = {name: values(value) for name, value in params.items()}
        first = params.pop("first")
        found = pytree.tree_leaves(fmodel(params, {}, F.linear(x, first).sin()))
        return sum((n * each).sin().sum() for n, each in enumerate(found, 1))

    return loss, params


@pytest.mark.parametrize("shape", [(5, 3), (5, 2, 3)])
@pytest.mark.parametrize("name", NETS)
def test_recorded_nets_have_every_quantity_of_a_loop(name, shape):
    torch.manual_seed(0)
    loss, params = loss_of(NETS[name]())
    check_rule(loss, params, {}, normal(3, *shape))


@pytest.mark.parametrize("name", ["lstm", "gru", "rnn"])
def test_recorded_nets_may_have_computed_weights(name):
    torch.manual_seed(0)
    loss, params = loss_of(NETS[name](), values=lambda x: 0.5 * x + x.tanh())
    check_rule(loss, params, {}, normal(3, 5, 3), expanded=True)


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

    check_rule(loss, params, {}, normal(3, *x.shape), expanded=True)


@pytest.mark.parametrize("mode", ["lstm", "gru"])
def test_frozen_weights_stand_beside_others(mode):
    x, hidden, weights, layout = problem(mode)

    def loss(params, buffers, x):
        own = [params["w_ih"], weights[1], weights[2], params["b_hh"]]
        return sum(each.sin().sum() for each in by_torch(mode, x, hidden, own, layout))

    params = {"w_ih": weights[0], "b_hh": weights[3]}
    check_rule(loss, params, {}, normal(3, *x.shape))


@every_mode
def test_dropout_of_recorded_nets_draws_for_each_sample_or_once(mode):
    x, hidden, weights, layout = problem(mode, num_layers=2, dropout=0.5)
    params = {str(place): each for place, each in enumerate(weights)}

    def loss(params, buffers, x):
        own = list(params.values())
        return by_torch(mode, x, hidden, own, layout)[0].sin().sum()

    x = x.expand(6, *x.shape)
    found = {}
    for strategy in ("recorded", "vmap", "loop"):
        torch.manual_seed(0)
        options = {"strategy": strategy, "randomness": "same"}
        compute = vgrad.per_sample_grad(loss, **options)
        found[strategy] = compute(params, {}, x)["4"]
        torch.testing.assert_close(found[strategy][0], found[strategy][-1])
        torch.testing.assert_close(found[strategy], found["recorded"])
    options = {"strategy": "recorded", "randomness": "different"}
    different = vgrad.per_sample_grad(loss, **options)(params, {}, x)["4"]
    assert len(different.flatten(1).unique(dim=0)) == 6
    with pytest.raises(RuntimeError, match='randomness="different"'):
        vgrad.per_sample_grad(loss, strategy="recorded")(params, {}, x)
