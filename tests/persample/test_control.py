"""Control flow of torch, compiled parts, and hooks on gradients and saved tensors.

The reference is the float64 loop of plain autograd: over the module itself, or over the
same loss, in which ops of control flow are the Python that torch documents.
"""

import re
import textwrap
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch._higher_order_ops as hops
from torch import nn
from torch.autograd import graph
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import vgrad
from tests import losses, oracle
from tests.losses import assert_quantities, randn

NODE_HOOKS = hasattr(graph, "node_creation_hook")  # since torch 2.14
B, D = 5, 3
P = {"w": randn(4, D, seed=1), "b": randn(4, seed=2), "v": randn(4, 4, seed=3)}
P |= {"u": randn(4, seed=4)}
X = randn(B, D, seed=6)
OUTER = randn(4, seed=7).requires_grad_()


def clip(g, bound=0.3):
    return g * (bound / g.norm()).clamp(max=1)


def in_place(g):
    g.mul_(2)


def parts(x, w):
    return F.linear(x, w) if x.sum() > 0 else F.linear(x, w).sin()


def smooth(x, w):
    return F.linear(x, w).sin()


whole = torch.compile(smooth, backend="eager", fullgraph=True)
compiled = torch.compile(parts, backend="eager")

# The semantics that torch documents.


def while_loop_(test, body, carried):
    while test(*carried):
        carried = body(*carried)
    return carried


def scan_(function, carry, xs, dim=0, reverse=False):
    rows = []
    for row in xs.flip(dim).unbind(dim) if reverse else xs.unbind(dim):
        carry, output = function(carry, row)
        rows.append(output)
    rows = torch.stack(rows, dim)
    return carry, rows.flip(dim) if reverse else rows


def associative_scan_(function, xs, dim, combine_mode):
    rows = [*xs.unbind(dim)]
    for number in range(1, len(rows)):
        rows[number] = function(rows[number - 1], rows[number])
    return torch.stack(rows, dim)


TORCH = {
    **dict(cond=torch.cond, while_loop=hops.while_loop, scan=hops.scan),
    **dict(associative_scan=hops.associative_scan, map_rows=hops.map),
    **dict(checkpoint=partial(checkpoint, use_reentrant=False), graph=graph),
}
PYTHON = {
    "cond": lambda test, yes, no, operands: (yes if test else no)(*operands),
    "while_loop": while_loop_,
    "scan": scan_,
    "associative_scan": associative_scan_,
    "map_rows": lambda f, xs, *others: torch.stack([f(row, *others) for row in xs]),
    "whole": smooth,
    "compiled": parts,
}

TABLE = """
cond, one test for all: 1
    h = cond(w.sum() > 0, torch.sin, torch.exp, (h,))
cond, a test of each sample, branches with parameters: 2
    h = cond(x.sum() > 0, lambda x: x @ w.t(), lambda x: F.linear(x, w, b), (x,))
cond inside of cond: 3
    deep = lambda h: cond(h[0] > h[2], torch.sin, torch.exp, (h,))
    h = cond(h.sum() < 0, deep, lambda h: h * u, (h,))
while_loop, as often for all: 1
    step = lambda i, h: (i + 1, (v @ h).sin())
    _, h = while_loop(lambda i, h: i < 3, step, (torch.zeros(()), h))
while_loop, as often as a sample needs, or never: 3
    h, = while_loop(lambda h: h.norm() > 1.5, lambda h: ((v @ h).sin(),), (h,))
scan: 1
    step = lambda c, e: ((c := (v @ c * e + b).sin()), c * u)
    h, rows = scan(step, torch.ones(4, dtype=x.dtype), x)
    h = h + rows.sum(0)
scan, backwards over another axis: 1
    step = lambda c, e: ((c := (v @ c * e).sin()), c + e)
    h, rows = scan(step, b.exp(), torch.outer(b, x), dim=1, reverse=True)
    h = h + rows.square().sum()
associative_scan: 1
    rows = torch.outer(x, b)
    rows = associative_scan(lambda a, b: a * b + a, rows, 0, combine_mode="generic")
    h = rows.sum(0)
map over rows: 1
    h = map_rows(lambda e, b: (e * b).sin(), x, b).sum(0)
a compiled function: 1
    h = whole(x, w)
a compiled function that reads a value: 2
    h = compiled(x, w)
a hook that clips: 1
    h.register_hook(clip)
a hook that reads values: loop since ... looks at values
    h.register_hook(lambda g: clip(g) if g.sum() > 0 else None)
a hook that closes over the sample and parameters: 1
    closed = [h.detach(), x @ x * w[:, 0]]
    h.register_hook(lambda g, closed=closed: g * closed[0].norm() + clip(closed[1]))
hooks, one after another, and one that is removed: 1
    h.register_hook(clip)
    h.register_hook(in_place).remove()
    h.register_hook(lambda g: g + 1)
hooks on a view, and on samples along another axis: 1
    h = (x[:, None] * w.t()).movedim(0, 1)
    h.register_hook(clip)
    y = h.sum(1)[1:3].exp()
    y.register_hook(clip)
    h = F.layer_norm(h.sum(1), (4,), b) * y[0]
a hook in a checkpoint: 1
    f = lambda x: ((h := F.linear(x, w, b)), h.register_hook(clip), h.sin())[2]
    h = checkpoint(f, x)
a hook on a parameter that is used twice: 1
    v.register_hook(clip)
    h = v @ h.sin()
a hook on what is computed from a parameter: 1
    e = v.exp()
    e.register_hook(clip)
    h = e @ h
a hook on what all samples share: loop since ... one that all samples share
    o = OUTER * 2
    o.register_hook(clip)
    h = h * o
a hook inside of a derivative inside: 1
    x = x.detach().requires_grad_()
    h = F.linear(x, w, b)
    h.register_hook(lambda g, h=h: clip(g) * h.norm())
    g, = torch.autograd.grad(h.sin() @ u, x, create_graph=True)
    h = h * g.sum()
a hook that writes in place: vmap since ... writes in place
    h.register_hook(in_place)
a hook in front of a write in place: loop since ... into a tensor with a hook
    h.register_hook(clip)
    h.relu_()
a hook that uses a gradient which another one has kept: 1
    kept = []
    y = h.sin()
    y.register_hook(lambda g: kept.append(g * 2))
    h.register_hook(lambda g: g * kept[0].norm())
    h = y * y
a hook that returns a gradient which another one has kept: loop since ... at values
    kept = torch.zeros(4, dtype=x.dtype)
    y = h.sin()
    y.register_hook(lambda g: None if kept.copy_(g) is kept else 0)
    h.register_hook(lambda g: kept)
    h = y * y
a hook that adds to what the loss holds: 1
    shift, seen = b.detach().new_ones(4), []
    h.register_hook(lambda g: seen.append(g) or g * shift.to(g).norm())
hooks on saved tensors, which keep them: 1
    pack = lambda t: (t.detach().numpy().copy(),)
    with graph.saved_tensors_hooks(pack, lambda t: torch.from_numpy(t[0])):
        h = (x @ w.t()).exp()
        with graph.save_on_cpu():
            h = F.linear(h.sin(), v.exp()).exp()
hooks on saved tensors, which round them: loop since ... that return the values they get
    with graph.saved_tensors_hooks(torch.Tensor.float, torch.Tensor.double):
        h = F.linear(x, w).exp()
hooks on saved tensors, which round one shape: loop since ... the values they get
    pack = lambda t: t.round() if t.shape == (4,) else t
    with graph.saved_tensors_hooks(pack, lambda t: t):
        h = F.linear(x, w).exp()
hooks on tensors of parameters, which round them: loop since ... the values they get
    with graph.saved_tensors_hooks(torch.Tensor.float, torch.Tensor.double):
        e = v.exp().sin()
    h = e @ (w @ x)
"""
"""Losses, each with the number of parts that are recorded, or another route."""

if NODE_HOOKS:
    TABLE += """\
a hook on the creation of nodes, which divides by norms: loop since ... tensors or nodes
    def divide(grads): return tuple(g if g is None else g / g.norm() for g in grads)
    def made(node): node.register_prehook(divide)
    with graph.node_creation_hook(made):
        h = F.linear(h.exp(), v)
"""


def rows(table):
    """Map the heads of a table to routes, split at "since", and dedented code."""
    found = re.findall(r"^(\w.*): (.*)\n((?: .*\n)+)", table, re.MULTILINE)
    return {n: (r.partition(" since ... "), textwrap.dedent(c)) for n, r, c in found}


ROWS = rows(TABLE)


def written(code, **ops):
    text = f"h = F.linear(x, w, b)\n{code}\nvalue = (h.sin() @ v).cos() @ u"
    run = losses.written(text, globals() | TORCH | ops, "x")
    return lambda p, b, *sample: run(p, b, *sample)


def loss_of(name, **ops):
    return written(ROWS[name][1], **ops)


def gradients(loss):
    """Gradients of samples that do not see each other's hooks."""
    rows = oracle.rows((X,), B)
    found = [oracle.loss_gradients(loss, P, {}, each) for each in rows]
    return {name: torch.cat([each[name] for each in found]) for name in P}


@pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning")
@pytest.mark.parametrize("name", ROWS)
def test_losses_are_exact_by_the_route_that_is_named(name):
    loss, ((route, _, why), code) = loss_of(name), ROWS[name]
    exact = gradients(loss_of(name, **PYTHON))
    assert oracle.norms(exact).all()
    assert_quantities(loss, P, (X,), expected=exact)
    report = vgrad.explain(vgrad.per_sample_grad(loss))(P, {}, X)
    assert why in report.why
    assert report.strategy == (route if why else "recorded")
    if not why:
        assert len(report.parts) == int(route)
        assert bool(report.hooks) == ("register_hook" in code)
        assert all(hook in str(report) for hook in report.hooks)


# Modules.


class Net(nn.Module):
    def __init__(self, part, run):
        super().__init__()
        self.start, self.part, self.end = nn.Linear(D, 4), part, nn.Linear(4, 3)
        self.run, self.free = run, nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.end(self.run(self.part, self.start(x) * self.free))


class Two(nn.Bilinear):
    def forward(self, x, y, times, *, shift):
        return super().forward(x, y).sin() * times, y + shift


def hook(module, *grads):
    """Clip inputs by outputs, or outputs alone; whole numbers have no gradient."""
    scale = 1 if len(grads) == 1 else grads[1][0].norm()
    return tuple(None if g is None else clip(g) * scale for g in grads[0])


def hooked(part, full=hook, pre=hook):
    for each in part.modules():
        each.register_full_backward_hook(full)
        each.register_full_backward_pre_hook(pre)
    return part


def keeping():
    kept = []
    keep = lambda _, out: kept.__setitem__(slice(None), out)  # noqa: E731
    return lambda _, into, out: (into[0] * kept[0].norm(),), keep


def of_old(part):
    part[1].register_backward_hook(lambda module, into, out: (into[0] * 2,))
    return part


def layers():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4))


MODULES = """
hooks in each other: recorded
    hooked(layers()), lambda part, h: part(h)
hooks on a module that is called twice: recorded
    hooked(nn.Linear(4, 4)), lambda part, h: part(part(h).sin())
hooks on two inputs and outputs: recorded
    hooked(Two(4, 4, 4)), lambda part, h: sum(part(h, h.exp(), 2, shift=h))
hooks on an input that all samples share: recorded
    hooked(Two(4, 4, 4)), lambda part, h: sum(part(h, SHARED, 2, shift=1))
hooks in a checkpoint: recorded
    hooked(layers()), partial(checkpoint, use_reentrant=False)
hooks that read values: loop since ... looks at values
    hooked(layers(), lambda _, g, o: g if o[0][0, 0] > 0 else None), nn.Module.__call__
hooks that write in place: loop since ... writes in place
    hooked(layers(), lambda _, into, out: in_place(out[0])), nn.Module.__call__
hooks that use gradients which others keep: recorded
    hooked(nn.Linear(4, 4), *keeping()), nn.Module.__call__
hooks of old: loop since ... leaves the graph, the hooks
    of_old(layers()), nn.Module.__call__
a compiled part: recorded
    torch.compile(layers(), backend="eager"), nn.Module.__call__
"""
SHARED = torch.ones(1, 4, dtype=torch.float64)


@pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning")
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("name", rows(MODULES))
def test_modules_are_exact_by_the_route_that_is_named(name):
    torch.manual_seed(0)
    (strategy, _, why), code = rows(MODULES)[name]
    model, y = Net(*eval(code)).double(), torch.arange(B) % 3
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    loss = vgrad.sample_loss(fmodel, F.cross_entropy)
    run = lambda model, x, y: F.cross_entropy(model(x), y)  # noqa: E731
    exact = oracle.model_gradients(model, run, (X, y), B)
    assert_quantities(loss, params, (X, y), buffers=buffers, expected=exact)
    report = vgrad.explain(vgrad.per_sample_grad(loss))(params, buffers, X, y)
    assert report.strategy == strategy
    assert bool(report.hooks) == (name.startswith("hooks") and not why)
    assert not report.foreign
    assert why in report.why


# Hooks.


def with_hook(hook):
    return written("h.register_hook(hook)", hook=hook)


def test_a_hook_that_draws_random_numbers_is_not_recorded():
    loss = with_hook(lambda g: g * torch.rand(()))
    recorded = vgrad.per_sample_grad(loss, strategy="recorded", randomness="different")
    with pytest.raises(RuntimeError, match="random"):
        recorded(P, {}, X)


def test_a_hook_that_returns_another_shape_is_refused():
    loss = with_hook(lambda g: g[None].expand(B, -1))
    with pytest.raises(vgrad.UnsupportedOp, match="hook: .* returns others"):
        vgrad.per_sample_grad(loss, strategy="recorded")(P, {}, X)


@pytest.mark.parametrize("strategy", ["vmap", "loop"])
def test_a_hook_that_writes_in_place_changes_no_other_gradient(strategy):
    """As in `.backward()`, which copies gradients as they come to leaves."""
    code = "h = x @ w.t()\nh.register_hook(in_place)\nh = h + b"
    loss, right = written(code), written(code, in_place=lambda g: 2 * g)
    found = vgrad.per_sample_grad(loss, strategy=strategy)(P, {}, X)
    oracle.assert_exact(found, oracle.loss_gradients(right, P, {}, (X,)))


@pytest.mark.skipif(
    torch.__version__ < (2, 15), reason="torch refuses a scan over no rows"
)
@pytest.mark.parametrize("strategy", ["recorded", "vmap", "loop"])
def test_a_scan_over_no_rows_returns_what_it_was_given(strategy):
    def loss(params, buffers, x, scan=hops.scan):
        step = lambda c, e: (c * e + params["b"], c * params["u"])  # noqa: E731
        carry, rows = scan(step, params["w"] @ x, x[:0, None] * params["v"][0])
        assert rows.shape == (0, 4)
        return carry.square().sum() + rows.sum()

    plain = partial(loss, scan=lambda f, carry, xs: (carry, xs))
    expected = oracle.loss_gradients(plain, P, {}, (X,))
    oracle.assert_exact(
        vgrad.per_sample_grad(loss, strategy=strategy)(P, {}, X), expected
    )


@pytest.mark.skipif(not NODE_HOOKS, reason="torch has no node_creation_hook")
@pytest.mark.parametrize("strategy", losses.STRATEGIES)
def test_hooks_on_the_creation_of_nodes_around_a_call_are_refused(strategy):
    def loss(params, buffers, x):
        return (params["w"] @ x).sin().sum()

    nodes, given = [], (P, {}, X)
    functions = [
        vgrad.per_sample_grad(loss, strategy=strategy),
        vgrad.per_sample_norm(loss, strategy=strategy),
        vgrad.gradient_moments(loss, strategy=strategy),
        vgrad.clipped_grad(loss, max_norm=1.0, strategy=strategy),
        partial(vgrad.weighted_grad(loss, strategy=strategy), torch.ones(B)),
    ]
    if strategy != "loop":  # which is not captured
        functions += map(vgrad.compile, functions[:4])
    for function in functions:
        function(*given)
        with graph.node_creation_hook(nodes.append):
            message = r"expected no node_creation_hook around .* inside of the loss"
            with pytest.raises(RuntimeError, match=message):
                function(*given)
            assert not nodes
        function(*given)


@pytest.mark.skipif(not NODE_HOOKS, reason="torch has no node_creation_hook")
@pytest.mark.parametrize("strategy", ["recorded", "vmap"])
def test_hooks_on_the_creation_of_nodes_stop_a_loss_for_all_samples(strategy):
    """One in another thread does not."""

    def loss(params, buffers, x):
        with graph.node_creation_hook(print):
            return (params["w"] @ x).sum()

    def elsewhere(params, buffers, x):
        def run():
            with graph.node_creation_hook(print):
                pass

        with ThreadPoolExecutor(1) as other:
            other.submit(run).result()
        return (params["w"] @ x).sum()

    with pytest.raises(vgrad.UnsupportedOp, match='tensors or nodes.*"loop"'):
        vgrad.per_sample_grad(loss, strategy=strategy)(P, {}, X)
    vgrad.per_sample_grad(elsewhere, strategy=strategy)(P, {}, X)


def captured(params, buffers, x):
    def step(carry, row):
        return (new := (carry * row + params["b"]).sin()), new * params["u"]

    h = whole(x, params["w"])
    h.register_hook(clip)
    carry, rows = hops.scan(step, params["v"] @ h.sin(), x)
    return (carry + rows.sum(0)).sum()


def test_captures_are_those_of_eager_mode():
    replayed = vgrad.compile(vgrad.per_sample_norm(captured), fallback="error")
    for x in (X, X, X.sin()):
        eager = vgrad.per_sample_norm(captured)(P, {}, x)
        oracle.assert_exact(replayed(P, {}, x), eager)


def test_functions_stay_compiled_in_other_threads():
    graphs = []
    backend = lambda graph, _: graphs.append(graph) or graph  # noqa: E731
    double = torch.compile(lambda x: x * 2, backend=backend)

    def loss(params, buffers, x):
        with ThreadPoolExecutor(1) as other:
            other.submit(double, X).result()
        return (double(params["w"]) @ x).sum()

    vgrad.per_sample_grad(loss, strategy="recorded")(P, {}, X)
    assert len(graphs) == 1


def test_attention_by_a_score_of_the_user_s_runs_in_the_loop_alone():
    """Under vmap torch would sum the gradients of `bias` over the samples."""

    def loss(params, buffers, x):
        def score(score, b, h, q, k):
            return score + params["v"][q, k]

        q = (params["w"] @ x).outer(params["u"])[None, None]
        attend, no = torch.ops.higher_order.flex_attention, (None,) * 4
        return attend(q, q, q, score, (*no, 4, 4), 1.0, {})[0].sum()

    with pytest.raises(NotImplementedError, match="by a score_mod"):
        vgrad.per_sample_grad(loss, strategy="recorded")(P, {}, X)
