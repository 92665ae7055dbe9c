"""What code can ask a tensor of a loss: the answer is that of a loop, or an error.

Under vmap one tensor stands for those of all samples, or of all members. Code that asks
it whether it requires grad, say, and then takes another way must not get other numbers.
"""

import contextlib
import copy
import io
import itertools
import pickle
import weakref
from functools import partial

import numpy
import pytest
import torch
from torch import nn
from torch._C import _functorch as functorch
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

import vgrad
from tests import losses, oracle
from tests.losses import randn
from tests.persample.test_losses import OF_MEMBERS, ROWS, hidden, of_classes, out

pytestmark = pytest.mark.filterwarnings(
    "ignore::vgrad.FallbackWarning",
    "ignore:.*torch.jit.*",
    "ignore:The .grad attribute:UserWarning",
    "ignore:TypedStorage:UserWarning",
    "ignore:There is a performance drop:UserWarning",
)

batched = functorch.is_batchedtensor
X, Y = ROWS[next(iter(OF_MEMBERS))].batch
PARAMS = {"w": randn(5, 4, seed=1), "v": randn(5, 5, seed=2)}


def written(text, **more):
    """Make a loss of statements that change `h`, or set `value`."""
    return losses.written(of_classes(text), globals() | more)


STACKED = {name: torch.stack([p, 2 * p, p + 1]) for name, p in PARAMS.items()}


def of_samples(loss):
    return oracle.loss_gradients(loss, PARAMS, {}, (X, Y))


def of_members(loss):
    """Gradients of every member by plain autograd, of the loss of the first sample."""
    rows = [{n: p[e] for n, p in STACKED.items()} for e in range(3)]
    each = [oracle.loss_gradients(loss, row, {}, (X, Y), 1) for row in rows]
    return {name: torch.cat([grads[name] for grads in each]) for name in STACKED}


def one_sample(loss):
    return lambda params, buffers, x, y: loss(params, buffers, x[0], y[0])


def by_samples(loss, strategy):
    return vgrad.per_sample_grad(loss, strategy=strategy)(PARAMS, {}, X, Y)


def by_members(loss, strategy):
    compute = vgrad.ensemble_grad(one_sample(loss), strategy=strategy)
    return compute(STACKED, {}, X, Y).grads


MEMBERS = ["vmap", "hybrid", "loop"]


@pytest.mark.parametrize("strategy", MEMBERS)
@pytest.mark.parametrize("name", OF_MEMBERS)
def test_members_that_ask_get_exact_gradients_or_an_error(name, strategy):
    loss, *_ = ROWS[name].given()
    if strategy != "loop" and OF_MEMBERS[name]:
        with pytest.raises(vgrad.UnsupportedOp, match='strategy="loop"'):
            by_members(loss, strategy)
        return
    with contextlib.suppress(*[vgrad.UnsupportedOp] * (strategy != "loop")):
        oracle.assert_exact(by_members(loss, strategy), of_members(loss))


SCRIPTED = [  # a function of TorchScript, and how a loss calls it
    ("h.tanh() * k.sigmoid()", "assert h.requires_grad; h = run(h, h * 2)"),
    ("h.tanh() @ k.t()", "value = F.cross_entropy(run(h, p['v']), y)"),
    ("h.tanh() * k.sigmoid()", "h = F.linear(x, run(w, w * 3))"),
    ("h.tanh() * k.sigmoid()", "h = hidden(p, run(x, x * 2))"),
]
scripted = pytest.mark.parametrize("script", SCRIPTED)


def of_script(script):
    """Make the loss with a new function, since it learns from how it runs."""
    body, text = script
    unit = torch.jit.CompilationUnit(f"def run(h, k):\n    return ({body}).sin()\n")
    return written(text, run=unit.run)


@scripted
@pytest.mark.parametrize("optimized", [False, True])
@pytest.mark.parametrize("order", ["auto", "vmap", "loop", "recorded auto vmap loop"])
def test_functions_of_torchscript_are_right_or_refused(script, order, optimized):
    """Called again and again, and by plain autograd before and after."""
    loss, expected = of_script(script), of_samples(of_script(script))
    for _ in range(3 * optimized):
        of_samples(loss)
    for strategy in 5 * order.split():
        refused = strategy == "recorded" or (strategy == "vmap" and optimized)
        with contextlib.suppress(*[vgrad.UnsupportedOp] * refused):
            oracle.assert_exact(by_samples(loss, strategy), expected)
    oracle.assert_exact(of_samples(loss), expected)


@scripted
@pytest.mark.parametrize("strategy", MEMBERS)
def test_members_may_call_functions_of_torchscript(script, strategy):
    loss, expected = of_script(script), of_members(of_script(script))
    for _ in range(5):
        oracle.assert_exact(by_members(loss, strategy), expected)


OUTER = randn(4).requires_grad_()
BACKBONE = nn.Linear(4, 4).double()


def asking(x):
    z = x * 2
    return z.sin() if z.requires_grad else z.cos()


LEADING_AWAY = {
    "x * OUTER": lambda x, s: x * OUTER,
    "a backbone": lambda x, s: BACKBONE(x).tanh(),
    "a view of a closure": lambda x, s: x * OUTER.exp()[None][0],
    "grad": lambda x, s: torch.func.grad(lambda z: (z * OUTER).sin().sum())(x),
    "x * s": lambda x, s: x * s,
    "asking(x)": lambda x, s: asking(x),
    "x * asking(s)": lambda x, s: x * asking(s),
}
"""What a loss makes of its sample, of a buffer and of what it closes over."""


@pytest.mark.parametrize("name", LEADING_AWAY)
@pytest.mark.parametrize("strategy", ["recorded", "auto", "vmap", "loop"])
@pytest.mark.parametrize("grad_mode", [True, False])
def test_what_else_requires_grad_changes_no_gradient(name, strategy, grad_mode):
    """Of samples, buffers and the closure; under no_grad the first two require none."""
    x, s = X.clone().requires_grad_(), OUTER.detach().clone().requires_grad_()

    def loss(p, b, x, y):
        return out(p, hidden(p, LEADING_AWAY[name](x, b["s"])), y)

    def eager(p, row, y):
        value = loss(p, {"s": s if grad_mode else s.detach()}, row, y)
        return torch.autograd.grad(value, [*p.values()])

    leaves = {name: p.clone().requires_grad_() for name, p in PARAMS.items()}
    rows = zip(x if grad_mode else x.detach(), Y, strict=True)
    each = zip(*(eager(leaves, row, y) for row, y in rows), strict=True)
    expected = dict(zip(PARAMS, map(torch.stack, each), strict=True))
    compute = vgrad.per_sample_grad(loss, strategy=strategy)
    with torch.set_grad_enabled(grad_mode):
        found = compute(PARAMS, {"s": s}, x, Y)
    oracle.assert_exact(found, expected)
    assert x.grad is s.grad is OUTER.grad is BACKBONE.weight.grad is None


@pytest.mark.parametrize("leads_on", [True, False])
def test_what_requires_grad_unseen_is_refused_unless_it_leads_nowhere(leads_on):
    def loss(p, b, x, y):
        with torch._C.DisableTorchFunction():
            z = x * OUTER
        h = hidden(p, z)
        return out(p, h if leads_on else hidden(p, x), y)

    if leads_on:
        message = "a function mode sees.*something else"
        with pytest.raises(vgrad.UnsupportedOp, match=message):
            by_samples(loss, "recorded")
    found = by_samples(loss, "auto" if leads_on else "recorded")
    oracle.assert_exact(found, of_samples(loss))


# Code that hides from vmap what it does.
loses_all = written(
    "value = out(p, h, y); value = value.detach() if batched(h) else value"
)
loses_some = written("h = h.detach() if batched(h) else h")
# Zero for every parameter, as accuracy is.
decides = written("value = (F.linear(h, p['v']).argmax() == y).double()")
uses_one = written("value = F.cross_entropy(h, y)")
cuts = written("h = h.detach()")
differentiates_a_parameter = written(
    "grad = torch.autograd.grad(w.square().sum(), w, create_graph=True)[0];"
    "value = F.cross_entropy(F.linear(x, grad), y)"
)


@pytest.mark.parametrize("loss", [loses_all, loses_some])
def test_gradients_that_never_arrive_are_not_taken_for_zero(loss):
    compute = vgrad.per_sample_norm(loss, strategy="recorded")
    members = vgrad.ensemble_grad(one_sample(loss), strategy="hybrid")
    for _ in range(2):
        with pytest.raises(vgrad.UnsupportedOp, match='got none of .*"vmap" or "loop"'):
            compute(PARAMS, {}, X, Y)
        with pytest.raises(vgrad.UnsupportedOp, match='got none of .*strategy="loop"'):
            members(STACKED, {}, X, Y)
    oracle.assert_exact(by_samples(loss, "auto"), of_samples(loss))
    oracle.assert_exact(by_members(loss, "loop"), of_members(loss))
    with pytest.warns(vgrad.FallbackWarning, match="one member .*hides its graph"):
        oracle.assert_exact(by_members(loss, "auto"), of_members(loss))


@pytest.mark.parametrize(
    ("loss", "compute", "strategy"),
    [
        *itertools.product(
            [uses_one, cuts, decides, differentiates_a_parameter],
            [by_samples],
            ["recorded", "vmap", "loop", "auto"],
        ),
        *itertools.product([uses_one, cuts, decides], [by_members], MEMBERS),
    ],
)
def test_what_is_truly_zero_stays_zero(loss, compute, strategy):
    found = compute(loss, strategy)
    assert not found["w" if loss in (cuts, decides) else "v"].any()
    if loss is decides:
        assert not found["v"].any()
        return
    expected = of_samples(loss) if compute is by_samples else of_members(loss)
    oracle.assert_exact(found, expected)


def saved(t):
    buffer = io.BytesIO()
    torch.save(t, buffer)
    return buffer.tell() > 0


KINDS = {
    "activation": lambda p, x: F.linear(x, p["w"]),
    "parameter": lambda p, x: p["v"],
    "view": lambda p, x: p["w"].t()[0],
    "sample": lambda p, x: x,
}
"""What is asked: an activation, a parameter, a view of one, a sample."""

SAME = "==== ==== ===="
ATTRIBUTES = {
    SAME: "requires_grad grad nbytes shape ndim dtype layout device is_sparse is_cuda "
    "is_quantized is_meta is_nested is_cpu __class__ __dict__ name names",
    "R=R= ==== R=R=": "grad_fn _grad_fn is_leaf output_nr retains_grad grad_dtype "
    "_backward_hooks _post_accumulate_grad_hooks",
    "R=RR ==== RRRR": "_version",
}
METHODS = {
    SAME: "is_contiguous stride storage_offset dim_order element_size numel __len__ "
    "type is_complex is_conj is_neg is_floating_point is_inference",
    "R==R ==== RRRR": "_is_view",
    "R==R RRRR RRRR": "is_shared",
    "R==R R==R RRRR": "is_pinned",
    "RRRR RRRR RRRR": "retain_grad",
}
EXPRESSIONS = {
    SAME: "t.detach().requires_grad; t.data.requires_grad; hash(t) == id(t);"
    "isinstance(t, nn.Parameter);"
    "isinstance(t, torch.DoubleTensor); weakref.ref(t)() is t;"
    "(setattr(t, 'mark', 1), t.mark)[1]; torch.is_grad_enabled();"
    "torch.is_inference_mode_enabled();"
    "torch.compiler.is_compiling(); torch.jit.is_tracing(); torch.jit.is_scripting();"
    "t.sum().item() == 0;"
    "bool(t.sum() > 100); float(t.detach().sum()) == 0; t.tolist() == []; 100.0 in t;"
    "torch.equal(t, t); torch.allclose(t, t)",
    # A loop over members has no mode, and what a mode leads to is compared by `verify`.
    "==== ==== dddd": "torch.overrides.has_torch_function((t,))",
    "RRR= ==== RRR=": "t.register_hook(id) is None; get_gradient_edge(t).output_nr;"
    "t.register_post_accumulate_grad_hook(id) is None",
    "==== R=R= RRRR": "setattr(t, 'requires_grad', True)",
    "R=R= RRRR RRRR": "t.requires_grad_().is_leaf",
    "=RR= RRRR RRRR": "t.sum().backward()",
    "RRRR RRRR RRRR": "torch.autograd.backward(t.sum());"
    "setattr(t, 'data', t.detach() * 1)",
    "RRRR ==R= RRRR": "t.detach_().requires_grad",
    "===R ===R RRRR": "torch.autograd.grad(t.sum(), t)[0].shape;"
    "torch.autograd.grad(t, t, torch.ones_like(t))[0].shape",
    "R==R ==== RRRR": "t[None, :, None, None]."
    "is_contiguous(memory_format=torch.channels_last)",
    "RRRR ==== RRRR": "(t * 1).mul_(2)._version",
    "R=RR ==== RRRR": "t._base is None",
    "R==R RRRR RRRR": "t.data_ptr() == 0; t.untyped_storage().nbytes() > 0;"
    "t.storage().size() > 0; t.detach().numpy().shape;"
    "torch.from_dlpack(t.detach()).shape",
    "R==R R==R RRRR": "t.is_set_to(t)",
    "R==R ===R RRRR": "numpy.asarray(t).shape",
    "RR=R =R=R RRRR": "copy.deepcopy(t).shape",
    "R=RR RRRR RRRR": "copy.copy(t).shape; len(pickle.dumps(t)) > 0; saved(t)",
    "dddd dddd dddd": "functorch.maybe_current_level()",
    "d==d ==== dddd": "functorch.is_batchedtensor(t)",
    "d==d dddd dddd": "str(torch._C._dispatch_keys(t)); repr(t)[:6]",
}
IN_SCOPE = {
    each.__name__: each for each in (copy, numpy, pickle, weakref, get_gradient_edge)
}
ASK = {
    form.format(text.strip()): verdicts
    for form, separator, table in [
        ("getattr(t, '{}', None)", " ", ATTRIBUTES),
        ("t.{}()", " ", METHODS),
        ("{}", ";", EXPRESSIONS),
    ]
    for verdicts, texts in table.items()
    for text in texts.split(separator)
}
"""How to ask, and the verdicts for these kinds: recorded, under vmap, and of members.

`=` is the answer of a loop, `R` an error that says what to do instead. `d` differs, and
no number depends on it but that of code which asks for transforms of torch.func.
"""


def asked(context, strategy, ask, kind):
    """Return the first answer to what a loss asks, or what it was refused with."""
    if context == "members":
        params = {"w": STACKED["w"].clone(), "v": STACKED["v"][:, 0].clone()}
        transform = partial(vgrad.ensemble_grad, in_dims=0)
    else:
        params = {"w": PARAMS["w"].clone(), "v": PARAMS["v"][0].clone()}
        transform = vgrad.per_sample_grad
    answers = []

    def loss(p, b, x):
        t = KINDS[kind](p, x)
        answer = ask(t)
        # Nodes of a graph are what they are the gradients of.
        answers.append(type(answer) if hasattr(answer, "next_functions") else answer)
        return (t * t).sum() * x.sum()

    try:
        transform(loss, strategy=strategy)(params, {}, X.clone())
    except vgrad.UnsupportedOp as error:
        if 'strategy="' not in str(error):
            raise
        return "R"
    except Exception:
        return Exception
    return answers[0]


@pytest.mark.parametrize("text", ASK)
@pytest.mark.parametrize("context", ["recorded", "vmap", "members"])
def test_every_answer_is_that_of_a_loop_or_an_error(text, context):
    ask = eval(f"lambda t: {text}", globals() | IN_SCOPE)
    verdicts = ASK[text].split()
    expected = dict(zip(("recorded", "vmap", "members"), verdicts, strict=True))
    strategy, found = "hybrid" if context == "members" else context, ""
    for kind in KINDS:
        truth = asked(context, "loop", ask, kind)
        answer = asked(context, strategy, ask, kind)
        found += "R" if answer == "R" else "=" if answer == truth else "d"
    assert found == expected[context]


def test_hooks_on_what_members_share_are_refused():
    def loss(p, b, x, y):
        p["w"].register_hook(lambda grad: grad.clamp(-0.1, 0.1))
        return out(p, hidden(p, x), y)

    params = {"w": PARAMS["w"], "v": STACKED["v"]}
    options = {"shared": ["w"], "strategy": "hybrid"}
    compute = vgrad.ensemble_grad(one_sample(loss), **options)
    with pytest.raises(vgrad.UnsupportedOp, match='register_hook: .*strategy="loop"'):
        compute(params, {}, X, Y)
    looped = vgrad.ensemble_grad(one_sample(loss), **options | {"strategy": "loop"})
    assert looped(params, {}, X, Y).grads["w"].any()
