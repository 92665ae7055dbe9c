"""What vgrad expects of each thing that it borrows from torch without a promise.

Where one of these fails, a new torch has changed what the name says, and
`vgrad/torch_private/` is the place to mend.
"""

import re
import runpy
import warnings

import pytest
import torch
import torch._higher_order_ops as hops
from torch import Tensor, nn
from torch.autograd import graph
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tests import losses
from vgrad import torch_private
from vgrad.torch_private import (
    NEWEST,
    autograd,
    control,
    kernels,
    modes,
    tensors,
    tracing,
)

X = torch.arange(6.0).reshape(3, 2)


def old(ctx, g):
    return g * 2


Old = losses.old_function(lambda ctx, x: x * 2, old)


class Listing(TorchFunctionMode):
    """Lists the functions that it sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def under_vmap(look, *, randomness="error", grad=False):
    """Return what `look` finds out about a row of X under vmap, or vmap of grad."""
    found = []

    def row(x):
        found.append(look(x))
        return x.sum()

    torch.vmap(torch.func.grad(row) if grad else row, randomness=randomness)(X)
    return found[0]


FACTS = [
    # Levels of transforms.
    "modes.current_level() is None and not modes.inside_transform()",
    "under_vmap(LEVEL, grad=True) == under_vmap(LEVEL) + 1",
    "under_vmap(lambda x: modes.inside_transform())",
    "in_block(torch.autograd.forward_ad.dual_level(), modes.inside_transform)",
    "modes.active_transforms() == ()",
    "under_vmap(lambda x: modes.active_transforms()) == ('Vmap',)",
    "under_vmap(lambda x: modes.active_transforms(), grad=True) == ('Vmap', 'Grad')",
    "under_vmap(lambda x: modes.level_of(x) == LEVEL(x) and modes.batch_axis(x) == 0)",
    "under_vmap(lambda x: modes.is_wrapped(x) and modes.is_batched(x))",
    "under_vmap(lambda x: modes.is_wrapped(x) > modes.is_batched(x), grad=True)",
    "under_vmap(modes.unwrapped).data_ptr() == X.data_ptr()",
    "under_vmap(modes.unwrap_all, grad=True).data_ptr() == X.data_ptr()",
    "modes.level_of(X) == modes.batch_axis(X) == -1 and not modes.is_wrapped(X)",
    "modes.unwrap_all(X) is X",
    "under_vmap(lambda x: modes.innermost().level() == LEVEL(x))",
    "under_vmap(lambda x: modes.innermost().batch_size()) == 3",
    "under_vmap(lambda x: in_block(modes.innermost().lower(), LEVEL, x)) is None",
    "under_vmap(lambda x: in_block(modes.without_innermost(), LEVEL, x)) is None",
    "under_vmap(lambda x: in_block(modes.exit_all(), LEVEL, x), grad=True) is None",
    "modes.load_decompositions() is None",  # before the first vmap
    # Modes.
    "not modes.function_modes() and not modes.autocast_is_on()",
    "in_block(torch.autocast('cpu', dtype=torch.bfloat16), modes.autocast_is_on)",
    "in_block(torch.device('cpu'), lambda: type(modes.function_modes()[0])) "
    "is modes.DeviceMode",
    "modes.is_python(F.multi_head_attention_forward) and not modes.is_python(F.linear)",
    "F.multi_head_attention_forward not in modes.ASKING",
    "all(modes.is_python(func) for func in modes.ASKING)",
    "not in_block(modes.unoptimized_scripts(), torch._C._get_graph_executor_optimize)",
    "torch._C._get_graph_executor_optimize()",
    "modes.op_name(Tensor.mm) == 'mm' and modes.op_name(GRAD_FN) == 'grad_fn'",
    "modes.op_without_rule('something else') == ''",
    # Tensors and modules.
    "tensors.viewed(SINE[:1]) is SINE and tensors.IS_VIEW(SINE[:1])",
    "tensors.viewed(SINE) is None",
    "under_vmap(lambda x: tensors.leaf(X), grad=True).requires_grad",
    "under_vmap(lambda x: tensors.leaf(X), grad=True).is_leaf",
    "under_vmap(lambda x: tensors.memory(modes.unwrap_all(tensors.leaf(X)))) "
    "== tensors.memory(X)",
    "tensors.memory(X) == tensors.memory(X[1:]) != tensors.memory(X.clone())",
    "tensors.storage(X) == tensors.storage(X.T)",
    "{tensors.storage(X)} != {tensors.storage(X.clone())}",
    "tensors.memory(torch.eye(2).to_sparse()) is None",
    "issubclass(nn.BatchNorm1d, tensors.BatchNorm)",
    "issubclass(nn.SyncBatchNorm, tensors.BatchNorm)",
    "issubclass(nn.InstanceNorm2d, tensors.NormBase)",
    "not issubclass(nn.InstanceNorm2d, tensors.BatchNorm)",
    "tensors.with_attributes(torch.ones(1), nn.Buffer(X)).persistent",
    "changed(lambda x: x.view(2).add_(1), tensors.version_of) == 1",
    "changed(lambda x: x.__setitem__(0, 1), tensors.version_of) == 1",
    "not tensors.has_hooks(X) and not tensors.has_hooks(SINE)",
    "changed(lambda x: x.register_hook(print), tensors.has_hooks)",
    "changed(lambda x: x.register_post_accumulate_grad_hook(print), tensors.has_hooks)",
    "not tensors.keeps_parametrized()",
    "in_block(nn.utils.parametrize.cached(), tensors.keeps_parametrized)",
    "[func.__name__ for func in seen(modes.opened(F.cross_entropy), X[0], X[0])] "
    "== ['cross_entropy_loss']",
    "modes.custom_function_call in under_vmap(lambda x: seen(losses.Noisy.apply, x))",
    # A function mode sees the reads of private attributes as their `__get__`.
    "all(modes.op_name(seen(getattr, torch.zeros(1), name)[-1]) == name.lstrip('_') "
    "or modes.op_name(seen(getattr, torch.zeros(1), name)[-1]) == name "
    "for name in (*tensors.GRAPH, *tensors.MEMORY))",
    # Ops.
    "isinstance(ATEN.add_, tensors.OPS) and isinstance(ATEN.add.out, tensors.OPS)",
    "set(tensors.written(ATEN.add_)) == {(0, 'self', False)}",
    "set(tensors.written(ATEN.add.out)) == {(3, 'out', True)}",
    "set(tensors.written(ATEN.add.Tensor)) == set()",
    "tensors.writes(ATEN.bernoulli_.float) and not tensors.writes(ATEN.bernoulli.p)",
    "tensors.makes_memory(ATEN.add.Tensor)",
    "not any(map(tensors.makes_memory, (ATEN.view.default, ATEN.add_.Tensor, len)))",
    "not tensors.may_draw(ATEN.add.Tensor) and not tensors.may_draw(len)",
    "tensors.named(ATEN.bernoulli_.float, (X,), {}) "
    "== {'self': X, 'p': 0.5, 'generator': None}",
    # Kernels.
    "kernels.attention(*[torch.ones(3, 0, 5, 4)] * 3).shape == (3, 0, 5, 4)",
    "{'mm', 'pow', 'norm'} < kernels.autocast_ops('cuda')",
    "'relu' not in kernels.autocast_ops('cuda')",
    "'prod' in kernels.autocast_ops('cpu')",
    "('rms_norm' in kernels.autocast_ops('cuda')) == (torch.__version__ >= (2, 12))",
    "tensors.viewed(kernels.unsafe_view(SINE, (3, 2))) is None",
    "{type(kernels.cpu_multiplies(d)) for d in (torch.bfloat16, torch.float16)} "
    "== {bool}",
    "kernels.cpu_multiplies(torch.float32)",
    # Functions that torch.compile has made, and the ops behind those of control flow.
    "in_block(control.uncompiled(), seen, COMPILED, X)[0] is torch.sin",
    "all(flows(*call) for call in CONTROL)",
    # Checkpoints need help before torch 2.12, and less of it before 2.13.
    "(autograd.SAVES_ARGUMENTS is None) == (torch.__version__ >= (2, 12))",
]
"""Each is true."""

ATEN = torch.ops.aten
SINE = X.clone().requires_grad_().sin()
GRAD_FN = Tensor.grad_fn.__get__


COMPILED = torch.compile(torch.sin, backend=lambda *_: pytest.fail("it compiles"))
CONTROL = [
    (torch.cond, X.sum() > 0, torch.sin, torch.cos, (X,)),
    (hops.while_loop, lambda x: x.sum() < 99, lambda x: (x + 9,), (X,)),
    (hops.scan, lambda x, y: (x + y, x * y), X[0], X),
    (hops.map, torch.sin, X),
]


def flows(function, *args):
    ops = in_block(control.uncompiled(), seen, function, *args)
    return not control.CONTROL_FLOW.keys().isdisjoint(ops)


def LEVEL(x):
    return modes.current_level()


def changed(change, look):
    """Return the result of `look` for a new leaf, changed under no_grad."""
    x = torch.zeros(2).requires_grad_()
    in_block(torch.no_grad(), change, x)
    return look(x)


def seen(function, *args):
    """Return the functions that a mode sees in a call."""
    with Listing() as mode:
        function(*args)
    return mode.seen


def in_block(block, function, *args):
    with block:
        return function(*args)


@pytest.mark.parametrize("fact", FACTS)
def test_torch_has_it_and_it_behaves(fact):
    assert eval(fact)


def test_batch_axes_go_on_and_off():
    with modes.vmap_level(3, "error") as level:
        x = modes.add_batch_axis(X, 0, level)
        assert x.shape == (2,)
        assert modes.split_batch_axis(X, level) == (X, None)
        assert modes.in_front(X, level) is None
        last = modes.add_batch_axis(X.T, 1, level)
        for each in (x, last):
            assert modes.is_wrapped(each)
            assert torch.equal(modes.in_front(each, level), X)
        out = modes.remove_batch_axis(x * 2, level, 3, 1)
    assert torch.equal(out, (X * 2).T)
    with pytest.raises(RuntimeError, match="No wrappers"):
        modes.unwrapped(X)


@pytest.mark.parametrize(
    "other",
    [
        *(torch.zeros(2, 3).t(), torch.zeros(2, 3), torch.zeros(3, 2).double()),
        *(torch.zeros(3, 2, requires_grad=True), nn.Parameter(torch.zeros(3, 2))),
        *(torch._neg_view(torch.zeros(3, 2)), torch.zeros(3, 2).to_sparse()),
        *(torch.zeros(3, 2, device="meta"), torch.zeros(3, 4)[:, ::2]),
    ],
    ids=repr,
)
def test_tensors_of_another_kind_are_not_alike(other):
    like = tensors.like([X, X[0]])
    assert like(torch.ones(3, 2), torch.ones(2))
    assert not like(other, torch.ones(2))
    assert not like(torch.ones(2), torch.ones(3, 2))


def test_backward_hooks_are_set_up_where_they_are_looked_for():
    module, calls = nn.Linear(2, 1), []

    class Noting(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            calls.append(autograd.hooked_call())
            return func(*args, **(kwargs or {}))

    module.register_full_backward_hook(old)
    module.register_full_backward_pre_hook(print)
    in_block(Noting(), module, X)
    assert autograd.hooked_call() is None
    call = calls[0]
    assert call.module is module
    assert (call.user_hooks, call.user_pre_hooks) == ([old], [print])


def test_hooks_at_work_unpack_at_once():
    pairs = []
    with torch.autograd.graph.saved_tensors_hooks(torch.neg, torch.abs):
        autograd.unpack_at_once(lambda *pair: pairs.append(pair))
        result = X.clone().requires_grad_().sin()
    assert autograd.hooks() is None
    assert torch.equal(pairs[0][1], X)
    assert torch.equal(torch.autograd.grad(result.sum(), pairs[0][0])[0], X.cos())


def test_modes_and_subclasses_are_left_out():
    class Refusing(Tensor):
        @classmethod
        def __torch_function__(cls, *_):
            raise AssertionError

    with Listing() as mode:
        assert modes.function_modes() == [mode]
        with modes.without_modes():
            X + 1
        other = Listing()
        other.__enter__()  # and an interrupt, before it is left
        modes.leave(mode)  # which is not the innermost
        for _ in range(2):
            modes.leave(other)
        assert modes.function_modes() == [mode]
    assert not mode.seen
    with modes.without_subclasses():
        assert (X.as_subclass(Refusing) + 1).shape == X.shape


def checkpointed(x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        return x.exp()


def written_data(x):
    x.data = torch.zeros(2)


def own_backward(x):
    y = x.detach().requires_grad_()
    return torch.autograd.grad(y.sum(), y)[0]


REFUSED = [
    ("randomness error mode", lambda x: torch.rand(2) + x, {}),
    ("does not currently support same", torch.bernoulli, {"randomness": "same"}),
    ("setup_context", Old.apply, {}),
    ("saved tensor hooks", checkpointed, {"grad": True}),
    ("backward() called inside", lambda x: x.sum().backward(), {}),
    ("attempting to call Tensor.requires_grad_()", own_backward, {"grad": True}),
    ("vmap:", lambda x: X[:1].clone().add_(0) * x.item(), {}),
    ("vmap:", lambda x: X[0].clone().mul_(x), {}),
    ("vmap:", lambda x: x[x.nonzero()], {}),
    ("Batching rule not implemented", lambda x: torch.equal(x, x), {}),
    ("vmap over", lambda x: torch.allclose(x, x), {}),
    ("under vmap", lambda x: x.data, {}),
    ("inside of vmap", lambda x: x.clone().as_strided((2,), (5,)), {}),
    ("doesn't have storage", lambda x: x.data_ptr(), {}),
    ("Cannot access storage", lambda x: x.untyped_storage(), {}),
    ("mutating directly with `.data`", written_data, {}),
    ("view size is not", lambda x: (x[:, None] * X[:, 0]).mT.view(6), {}),
]


@pytest.mark.parametrize(("text", "function", "options"), REFUSED)
def test_torch_refuses_in_the_words_that_are_matched(text, function, options):
    (kind,) = (k for k, all_of_k in modes.LIMITS.items() if text in str(all_of_k))
    with pytest.raises(RuntimeError) as caught:
        under_vmap(function, **options)
    assert text in str(caught.value)
    assert modes.limit_of(str(caught.value)) == kind


def test_every_text_about_an_op_has_a_case():
    texts = {text for each in modes.LIMITS.values() for text in each}
    cased = {each for each in texts for text, *_ in REFUSED if text in each}
    own = {"node_creation_hook"}  # of vgrad, which the next test raises
    assert texts - cased - own == {"HigherOrderOperator custom_function_call"}


@pytest.mark.skipif(not hasattr(graph, "node_creation_hook"), reason="torch < 2.14")
def test_hooks_on_the_creation_of_nodes_are_seen_and_refused_in_a_block():
    nodes, x = [], X.clone().requires_grad_()
    with graph.node_creation_hook(nodes.append):
        for block in (torch.no_grad(), torch.inference_mode(), graph.save_on_cpu()):
            assert in_block(block, autograd.node_hooks)
        under_vmap(lambda row: nodes.append(autograd.node_hooks()))
        assert nodes == [True]  # and no node
        y = x * 2
        assert y.grad_fn in nodes[1:]  # they are still there
        with autograd.for_all(old_style=False):  # refuses those that come
            with pytest.raises(RuntimeError) as caught:
                in_block(graph.node_creation_hook(print), torch.sin, x)
    assert modes.limit_of(str(caught.value)) == "saved tensors"
    assert not autograd.node_hooks()
    with graph.node_creation_hook(nodes.append):
        assert autograd.node_hooks()


def test_a_warning_of_a_missing_rule_names_the_op():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.vmap(lambda x: F.bilinear(x[None], x[None], torch.ones(1, 2, 2)))(X)
    found = {modes.op_without_rule(str(each.message)) for each in caught}
    assert found == {"aten::bilinear"}


@pytest.mark.parametrize(
    ("version", "warns"),
    [
        ("2.11.0", False),
        (NEWEST, False),
        (f"{NEWEST.rpartition('.')[0]}.9+cu132", False),
        ("2.99.0a0+git0123abc", True),
        ("3.0.1", True),
    ],
)
def test_a_torch_that_no_test_has_seen_is_warned_of(version, warns, monkeypatch):
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        runpy.run_path(torch_private.__file__)
    texts = [f"vgrad: expected torch up to {NEWEST}, .*, got {re.escape(version)}"]
    texts = texts if warns else []
    for text, warning in zip(texts, found, strict=True):
        assert re.match(text, str(warning.message))
        assert "\n" not in str(warning.message)


def test_a_mode_sees_all_ops_and_tensors_are_told_apart_by_identity():
    class Seen(tracing.DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            output = func(*args, **(kwargs or {}))
            seen.append((func, all(each in own for each in args[:1])))
            own[output] = len(seen)
            return output

    seen, own = [], tracing.Tensors()
    own[X] = 0
    with Seen():
        assert tracing.dispatch_modes() == 1
        kept = torch.func.vmap(lambda x: x.sin() + 1)(X)
    assert tracing.dispatch_modes() == 0
    aten = torch.ops.aten
    assert seen == [(aten.sin.default, True), (aten.add.Tensor, True)]
    assert len(own) == 2
    assert X.clone() not in own
    reference = tracing.TensorWeakRef(kept)
    assert reference() is kept
    del kept
    assert reference() is None


def test_switches_of_rounding_are_read():
    backend = torch.backends.mkldnn.matmul
    before = kernels.fp32_precision("mkldnn", "matmul")
    assert before == backend.fp32_precision
    backend.fp32_precision = "bf16"
    try:
        assert kernels.fp32_precision("mkldnn", "matmul") == "bf16"
    finally:
        backend.fp32_precision = before


def test_random_ops_are_tagged_and_their_calls_can_be_read():
    aten = torch.ops.aten
    for name in tensors.SHOWN & set(dir(aten)):
        packet = getattr(aten, name)
        for each in [getattr(packet, overload) for overload in packet.overloads()]:
            assert tensors.may_draw(each), each
            assert tensors.op_name(each) == name
    x, op = torch.ones(3), aten.bernoulli_.float
    assert [*map(id, tensors.shown_results(op, (x,), {}, x))] == [id(x)]
    out = aten.rand.out
    assert tensors.shown_results(out, ([3],), {"out": x}, x)[0] is x
    op, given = aten.rrelu_with_noise.default, (x, out := torch.empty(3), 0.1, 0.3)
    shown, more = tensors.shown_results(op, (*given, True), {}, result := x.clone())
    assert shown is out
    assert more is result


def test_nodes_and_ops_that_are_not_torchs_own_are_named():
    x = X.clone().requires_grad_()
    own = F.layer_norm(torch.sin(x) @ x.t(), (3,)).view(9)[:2].expand(4, 2).sum()
    assert len([*autograd.graph_nodes([own])]) >= 8
    assert autograd.foreign_nodes([own, X]) == []
    assert autograd.foreign_nodes([own + Old.apply(x * 1).sum()]) == ["OldBackward"]

    @torch.library.custom_op("vgrad_nodes::double", mutates_args=())
    def double(x: Tensor) -> Tensor:
        return x * 2

    double.register_autograd(lambda ctx, grad: grad * 2)
    assert len(autograd.foreign_nodes([double(x)])) == 1
    with Listing() as mode:
        torch.ops.vgrad_nodes.double(X)
        torch.ops.aten.mul(X, X)
        torch.ops.aten.mul.Tensor(X, X)
        X + X
    assert [*map(autograd.is_foreign_op, mode.seen)] == [True, False, False, False]
