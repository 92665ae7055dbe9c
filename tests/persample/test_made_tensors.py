"""Losses that make a tensor for all samples, and write numbers of each into it.

`out = torch.zeros(n); out[t] = y` is one tensor for all samples until `y` comes, then
one for each: its views, and all that is read of it, are those of a sample by itself.
"""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import vgrad
from bench.programs import programs
from tests import losses, oracle
from tests.losses import assert_gradients, assert_quantities, randn

pytestmark = pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning")

zeros, ones, empty, full, arange = (
    partial(getattr(torch, name), dtype=torch.float64)
    for name in ("zeros", "ones", "empty", "full", "arange")
)
PARAMS = {"a.w": randn(3, 3), "s.w": randn(3, seed=1), "t.w": randn(4, 3, seed=2)}
BUFFERS = {"c": randn(4, 3, seed=3), "n": torch.tensor([0, 2, 1, 3])}
X = randn(5, 4, 3, seed=4)
K = torch.tensor([[0, 1, 2, 3], [1, 1, 2, 0], [3, 3, 3, 3], [0, 2, 0, 2], [2, 1, 0, 3]])

# `h` are the rows of a layer, and `z` the result of a program.
START = "h = torch.tanh(F.linear(x, a_w)) * s_w\n"
END = "\nvalue = (F.linear(z, a_w) * torch.cos(z)).sum()"

WRITES = {
    # Ways to make a tensor, and ways to write into it.
    "rows": "z = zeros(4, 3)\nfor t in range(4): z[t] = h[t]",
    "a loop that reads its past": """
z = empty(5, 3)
z[0] = s_w
for t in range(4): z[t + 1] = torch.tanh(F.linear(z[t].clone(), a_w) + h[t])""",
    "new_zeros, of a buffer": "z = c.new_zeros(4, 3); z[1:3] += h[:2]",
    "full and add_": "z = full((4, 3), 0.5); z.add_(h, alpha=2)",
    "arange and sub_": "z = arange(3.0); z -= h[0]; z = z * h",
    "a result of an op": "z = c * 2 + 1; z[::2] = h[1::2]",
    "clone of a buffer": "z = c.clone(); z[:, 1].copy_(h[:, 2])",
    "clone of a parameter": "z = t_w.clone(); z[0] = h[0]; z[1:] *= 2",
    "an op of a parameter": "z = t_w * 2; z[2] = 0.0; z = z + h; w = a_w * 3; "
    "w[0] = h[1]; z = z @ w",
    "an op with a rule": "z = F.linear(c, a_w); z += h",
    "an op with a rule, without a graph": "with torch.no_grad(): z = F.linear(c, a_w)\n"
    "z += h",
    "a parameter is written": "z = zeros(4, 3); z[1] = s_w; z[2] = h[0]",
    "a transpose": "z = c.t().clone(); z[0] = h[:, 0]; z = z.t() * 1",
    "a transposed copy": "z = ones(3, 4).t(); z[0] = h[0]; z.reshape(-1)[4:] *= 2",
    "as_strided": "z = c.t().clone(); z[0] = h[:, 0]; z = z.as_strided((4, 3), (3, 1))",
    "index_put_": "z = zeros(4, 3); z.index_put_((k,), h, accumulate=True)",
    "scatter_add_": "z = zeros(4, 3); z.scatter_add_(0, k[:, None].expand(4, 3), h)",
    "scatter_add_ of constants": """
d = zeros(4)
d.scatter_add_(0, k, ones(4))
z = h / (1 + d)[:, None]""",
    "scatter_reduce_": "z = zeros(4, 3); "
    "z.scatter_reduce_(0, k[:, None].expand(4, 3), h, 'amax', include_self=False)",
    "index_add_": "z = zeros(4, 3); z.index_add_(0, k, h, alpha=0.5)",
    "masked_fill_": "z = c * 1; z.masked_fill_(x > 0, 0.25); z = z * h",
    "a mask": "m = zeros(4) > 0; m[k[:2]] = True; z = h * m[:, None]",
    "a mask of each": "z = zeros(4, 3); z[x > 0] = 2.0; z = z * h",
    "an index of each": "z = zeros(4, 3); z[k] = h[:1]; z[k, n % 3] += 1; z = z * h",
    "an index of one number": "z = zeros(4, 3); z[k[1]] = h[0]",
    "a scalar": "z = zeros(4, 3); z[1] = h.sum(); z[2, 1] = h[0, 0]; z.add_(x.sum())",
    "a sum in parts": "z = zeros(3)\nfor t in range(4): z += h[t]",
    "torch.ops": "z = zeros(4, 3); torch.ops.aten.add_(z, h)",
    "inplace=True": "z = F.relu(c.clone().add_(h), inplace=True)",
    "rows that are iterated": "z = zeros(4, 3)\nwith torch.no_grad():\n"
    "  for row, y in zip(z, h): row += y\nz = z * h",
    # Aliases, made before the write and after it.
    "slices of slices": "z = zeros(6, 4); z[1:5][:, 1:][::2] = h[:2]; z = z[1:5, 1:]",
    "views before": """
z = zeros(12)
a, b, first = z.view(4, 3), z[3:], z.narrow(0, 0, 3)
with torch.no_grad():
    a[0] = h[0]
    b += h.flatten()[3:]
z = (a + first + b[:3]) * h""",
    "detach": "z = zeros(4, 3); y = z.detach(); y[0] = h[1]; z = z * h",
    "data": "z = zeros(4, 3); z.data[0] = h[1].detach(); z = z * h",
    "data, of rows": "y = zeros(4, 3); z = y.data; y[1] = h[0]; z = z * h",
    "expand": "y = zeros(3); z = y.expand(4, 3); y += h[0]; z = z * h",
    "overlapping slices": "z = zeros(5, 3); z[:3] += h[:3]; z[1:4] *= h[1:]; z = z[:4]",
    "beside the operands": "z = zeros(4, 3); z += h; z[::2].add_(z[1::2]); z.add_(z)\n"
    "z[1:, 2].sub_(z[:3, 1]); z[:, 0] = z[:, 1]",
    "moves in place": "z = zeros(4, 3); z[1:] = h[1:]; z[:2] = z[2:].clone()",
    # Reads before and after.
    "a version": "z = zeros(4, 3); z[0] = h[0]; z = z * (2 + z._version)",
    "a copy before": "z = ones(4, 3); y = z.clone(); z += h; z = y * z",
    "a value before": """
z = zeros(4, 3)
if z.sum() == 0 and int(z.any()) == 0: z[0] = h[0]
z[1] = 3 if len(z) == 4 else h[2]""",
    "under no_grad": "z = zeros(4, 3)\nwith torch.no_grad(): z[0] = h[0]\nz = z * h",
    "out for all samples": "y = empty(0); torch.sum(c, 0, out=y); z = y * h",
    "a closure of the loss": """
z = zeros(4, 3)
def write(t): z[t] = h[t]
[write(t) for t in range(3)]""",
    "a checkpoint": """
def region(y):
    out = zeros(4, 3)
    out[1:] = F.linear(y, a_w)[1:].sin()
    return out
z = checkpoint(region, h * 1, use_reentrant=False)""",
    "a gradient inside": """
def energy(y):
    out = zeros(4)
    out[1:] = (y * c).sum(1)[1:].sin()
    return out.sum()
z = torch.func.grad(energy)(h) * h""",
}

BY = {"a checkpoint": ("recorded",), "a version": ("vmap",)}


def program(text):
    return losses.written(START + text.strip("\n") + END, globals(), "xk")


UNMADE = (
    *("a result of an op", "an op of a parameter", "an op with a rule"),
    *("an op with a rule, without a graph", "masked_fill_", "as_strided"),
    "a transposed copy",
)
"""Writes into results of other ops than those that make tensors."""


@pytest.mark.parametrize("name", UNMADE)
def test_writes_into_other_results_are_exact_by_some_route(name):
    assert_gradients(program(WRITES[name]), PARAMS, (X, K), buffers=BUFFERS)


@pytest.mark.parametrize("name", [each for each in WRITES if each not in UNMADE])
def test_writes_are_recorded_as_a_loop_runs_them(name):
    loss = program(WRITES[name])
    given = {"buffers": BUFFERS, "expected": None}
    for strategy in BY.get(name, ("recorded", "vmap")):
        given["expected"] = assert_gradients(
            loss, PARAMS, (X, K), strategy=strategy, **given
        )


RAISES = {
    # A version that was saved for the backward pass.
    "y = ones(4, 3); z = y * h; y[0] = h[0]": "modified by an inplace",
    "y = ones(4, 3); z = F.linear(y, a_w) * h; y[0] = x[1]": "modified by an inplace",
    "y = ones(4, 3); y += h; z = y ** 2; y[0] = 0.0": "modified by an inplace",
    "y = ones(4, 3); z = y * h; y.detach()[0] = x[0]": "modified by an inplace",
    "w = ones(3, 3); z = F.linear(h, w); w[0] = h[1]": "modified by an inplace",
    "z = zeros(3); z += h": "doesn't match the broadcast shape",
    "z = zeros(1, 3).expand(4, 3); z += h": "more than one element",
    "z = empty(4, 3); torch.add(h, c, out=z)": "out=... arguments don't support",
}


@pytest.mark.parametrize("text", RAISES)
def test_errors_are_those_of_torch(text):
    loss = program(text)
    for run in (oracle.loss_gradients, oracle_free):
        with pytest.raises(RuntimeError, match=RAISES[text]):
            run(loss, PARAMS, BUFFERS, (X, K))


def oracle_free(loss, params, buffers, batch):
    return vgrad.per_sample_grad(loss)(params, buffers, *batch)


LOOPED = {
    "as_strided_": "z = zeros(4, 3); z[0] = x[0]; z.as_strided_((2, 3), (6, 1))",
    "set_": "z = zeros(4, 3); y = zeros(4, 3); y.set_(z); z[0] = x[0]; z = y",
    "resize_": "z = zeros(4, 3); z[0] = x[0]; z.resize_(2, 3)",
    "resize_as_": "z = zeros(4, 3); z[0] = x[0]; z.resize_as_(c[:2])",
    "data_ptr": "z = zeros(4, 3); q = z.data_ptr() != 0; z[0] = x[0]; z = z * q",
    "numpy": "z = zeros(4, 3); q = z.numpy(); z[0] = x[0]; z = torch.tensor(q)",
    "from_numpy": "q = c.numpy().copy(); z = torch.from_numpy(q); z[0] = x[0]; "
    "z = torch.tensor(q)",
    "as_tensor": "q = c.numpy().copy(); z = torch.as_tensor(q); z[0] = x[0]; "
    "z = torch.tensor(q)",
    "data": "z = zeros(4, 3); z.data = c * 1; z[0] = x[0]",
    "out": "y = empty(4, 3)\nwith torch.no_grad(): torch.add(h, c, out=y)\nz = y * h",
    "out of slices": "d = x.new_zeros(5, 3); torch.cumsum(x, 0, out=d[1:]); "
    "z = h * d[:4]",
    "out of two": "y, j = empty(4), torch.empty(4, dtype=torch.long); "
    "torch.max(x, 1, out=(y, j)); z = h[j] * y[:, None]",
    "out of another size": "z = empty(0, 3)\n"
    "with torch.no_grad(): torch.sum(h, 0, keepdim=True, out=z)",
    "out of another dtype": "z = torch.empty(4, 3)\nwith torch.no_grad(): "
    "torch.add(h, c, out=z)\nz = z.double()",
    "from outside": "z = OUTSIDE[0]; z[0] = x[0]",
    "foreach": "y = [zeros(3), ones(3)]; torch._foreach_add_(y, [h[0], h[1]]); "
    "z = torch.stack(y)",
}
OUTSIDE = [zeros(4, 3)]


@pytest.mark.parametrize("name", LOOPED)
def test_what_is_not_exact_for_all_at_once_runs_in_a_loop(name):
    loss = program(LOOPED[name] + "\nz = z * h[:len(z)]")
    assert_gradients(loss, PARAMS, (X, K), buffers=BUFFERS)
    found = vgrad.explain(vgrad.per_sample_norm(loss))(PARAMS, BUFFERS, X, K)
    assert found.strategy == ("vmap" if name == "as_strided_" else "loop")
    with pytest.raises(vgrad.UnsupportedOp):
        vgrad.per_sample_grad(loss, strategy="recorded")(PARAMS, BUFFERS, X, K)


# Tensors that are kept beyond the call.


def layer(params, x):
    return torch.tanh(F.linear(x, params["a.w"]))


KEPT: list = []
KEEPS = {
    "itself": "KEPT.append(out)",
    "a view": "KEPT.append(out.view(-1)[2:])",
    "a detached view": "KEPT.append(out.detach()[1:])",
    "data": "KEPT.append(out.data)",
    "rows": "KEPT.extend(out)",
    "parts": "KEPT.append(out.split(2))",
    "a closure": "KEPT.append(lambda out=out: out)",
}
ONE = {"a.w": PARAMS["a.w"]}


@pytest.mark.parametrize("name", KEEPS)
def test_what_is_kept_beyond_the_call_changes_no_number(name):
    before = name in ("itself", "a view", "data")

    def loss(p, b, x):
        h, out = layer(p, x), zeros(4, 3)
        if before:
            eval(KEEPS[name], globals(), {"out": out})
        out[0] = h[0]
        if not before:
            eval(KEEPS[name], globals(), {"out": out})
        return (out * h).sum()

    expected = oracle.loss_gradients(loss, ONE, {}, (X,))
    for strategy in ("auto", "recorded", "vmap"):
        compute = vgrad.per_sample_grad(loss, strategy=strategy)
        for _ in range(2):
            KEPT.clear()
            oracle.assert_exact(compute(ONE, {}, X), expected)
    KEPT.clear()


def test_a_tensor_of_another_run_cannot_be_read():
    def loss(p, b, x):
        h, out = layer(p, x), zeros(4, 3)
        with torch.no_grad():
            out += KEPT[-1] if KEPT else 0.0
            out[0] = x[0]
        KEPT.append(out)
        return (out * h).sum()

    KEPT.clear()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="escaped|may keep nothing"):
            vgrad.per_sample_grad(loss)(ONE, {}, X)
    KEPT.clear()


def test_aux_and_cycles_keep_nothing():
    def loss(p, b, x):
        h, out = layer(p, x), zeros(4, 3)
        early = out[1:]

        def write(t):  # which refers to itself
            out[t] = h[t]
            return write(t + 1) if t < 2 else None

        write(0)
        return (out * h).sum(), {"out": out, "early": early, "none": zeros(2)}

    compute = vgrad.per_sample_grad(loss, has_aux=True, strategy="recorded")
    for _ in range(2):
        grads, aux = compute(ONE, {}, X)
        exact = (
            torch.tanh(F.linear(X, ONE["a.w"])) * torch.tensor([1, 1, 1, 0])[:, None]
        )
        oracle.assert_exact(
            aux, {"out": exact, "early": exact[:, 1:], "none": zeros(5, 2)}
        )
    oracle.assert_exact(
        grads, oracle.loss_gradients(lambda *a: loss(*a)[0], ONE, {}, (X,))
    )


# Random numbers, parts, captures and members.


@pytest.mark.parametrize("fill", ["normal_()", "uniform_(-1, 1)", "bernoulli_(0.5)"])
def test_random_numbers_are_those_of_each_sample(fill):
    def loss(p, b, x):
        first, out = torch.rand(3, dtype=x.dtype), zeros(4, 3)
        eval(f"out.{fill}")
        out[0] += first
        return (out * layer(p, x)).sum(), out.detach().clone()

    found = []
    for strategy in ("recorded", "vmap", "loop"):
        options = {"randomness": "different", "has_aux": True, "strategy": strategy}
        compute = vgrad.per_sample_grad(loss, **options).keyed(torch.arange(5))
        grads, drawn = compute(ONE, {}, X)
        weigh = lambda p, b, x, out: (out * layer(p, x)).sum()  # noqa: E731
        oracle.assert_exact(grads, oracle.loss_gradients(weigh, ONE, {}, (X, drawn)))
        found.append(drawn)
    assert all(torch.equal(each, found[0]) for each in found)
    assert not torch.equal(found[0][0], found[0][1])
    plain = vgrad.per_sample_grad(loss, randomness="different", has_aux=True)
    torch.manual_seed(0)
    first = plain(ONE, {}, X)  # runs again from the first number on
    torch.manual_seed(0)
    oracle.assert_exact(plain(ONE, {}, X), first, 0)


def test_numbers_that_cannot_be_noted_are_drawn_again():
    def loss(p, b, x):
        h, out = layer(p, x), zeros(4, 3)
        drop = partial(F.dropout, p=0.5)
        h = checkpoint(drop, h, use_reentrant=False)
        out[0] = h[0]
        return (out * h).sum(), h.detach()

    options = {"randomness": "different", "has_aux": True, "strategy": "recorded"}
    grads, drawn = vgrad.per_sample_grad(loss, **options)(ONE, {}, X)
    keep = (drawn != 0) * 2.0
    weigh = lambda p, b, x, keep: (layer(p, x) * keep)[0].square().sum()  # noqa: E731
    oracle.assert_exact(grads, oracle.loss_gradients(weigh, ONE, {}, (X, keep)))


def test_places_are_found_in_parts_and_chunks_and_named():
    def loss(p, b, x):
        h, out, other = layer(p, x), zeros(4, 3), ones(4, 3)
        out[0] = h[0]
        if x.sum() > 0:
            other[1:] += h[1:]
        copy = p["a.w"].clone()
        copy[0] = other[1]
        return (out * other * F.linear(h, copy)).sum()

    assert_quantities(loss, ONE, (X,), strategy="recorded")
    assert_quantities(loss, ONE, (X,), chunk_size=2)
    found = vgrad.explain(vgrad.clipped_grad(loss, max_norm=1.0))(ONE, {}, X)
    line = loss.__code__.co_firstlineno
    assert found.strategy == "recorded"
    assert found.written == f"{__file__}:{line + 2}"
    assert "Each sample has tensors of its own" in str(found)
    assert "its own, into" not in str(
        vgrad.explain(vgrad.per_sample_norm(lambda p, b, x: layer(p, x).sum()))(
            ONE, {}, X
        )
    )


def test_a_capture_has_the_copies():
    def loss(p, b, x):
        h, out = layer(p, x), x.new_zeros(4, 3)
        counts = torch.zeros(4, dtype=x.dtype)
        counts.index_add_(0, b["n"], x[:, 0])
        for t in range(4):
            out[t] = h[t] + (out[t - 1] if t else 0)
        return (out * counts[:, None]).sum()

    compute = vgrad.compile(vgrad.clipped_grad(loss, max_norm=1.0))
    for shift in (0, 0, 1, 2):
        exact = oracle.loss_gradients(loss, ONE, BUFFERS, (X + shift,))
        found = compute(ONE, BUFFERS, X + shift)
        oracle.assert_exact(found.grads, oracle.clipped(exact, 1.0))
    (report,) = compute.reports()
    assert report.backend != "eager", report


def test_members_write_at_once():
    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.Linear(3, 3)

        def forward(self, x):
            out = torch.zeros(len(x), 4, 3)
            for t in range(4):
                out[:, t] = self.cell(x[:, t]).tanh()
            return out

    models, x = [Decoder() for _ in range(5)], X.float()
    fmodel, params, buffers = vgrad.stack(models)
    forward = vgrad.ensemble_forward(fmodel)
    found = forward(params, buffers, x)
    torch.testing.assert_close(found, torch.stack([each(x) for each in models]))
    assert vgrad.explain(forward)(params, buffers, x).strategy == "hybrid"


# Programs as people write them.

TIMED = programs(3, 4, 5, torch.float64)


@pytest.mark.parametrize(
    "write",
    [
        "torch.mul(q[1:], 2, out=q[:3])",
        "q[1:].add_(q[:3])",
        "q[:3].T.mul_(q[:3])",
    ],
)
def test_a_write_over_a_part_of_an_operand_raises_as_in_torch(write):
    text = f"q = zeros(4, 3); q += h; q = q.detach(); {write}; z = q * h"
    loss = program(text)
    for strategy in ("auto", "loop"):
        with pytest.raises(RuntimeError, match="refer to a single memory location"):
            vgrad.per_sample_grad(loss, strategy=strategy)(PARAMS, BUFFERS, X, K)
    refused = "single memory location|mul: expected ops that vmap can run"
    for strategy in ("recorded", "vmap"):
        with pytest.raises(RuntimeError, match=refused):
            vgrad.per_sample_grad(loss, strategy=strategy)(PARAMS, BUFFERS, X, K)


@pytest.mark.parametrize("name", TIMED)
def test_programs_of_the_benchmark_are_recorded(name):
    timed = TIMED[name]
    assert_quantities(timed.loss, timed.params, timed.batch, strategy="recorded")
    leaves = {n: p.clone().requires_grad_() for n, p in timed.params.items()}
    whole = timed.loss(leaves, {}, *timed.joined(*(x.detach() for x in timed.batch)))
    ones = torch.ones(len(timed.batch[0])).double()
    found = vgrad.weighted_grad(timed.loss)(ones, timed.params, {}, *timed.batch)
    grads = torch.autograd.grad(whole, [*leaves.values()])
    oracle.assert_exact(found, dict(zip(leaves, grads, strict=True)))
