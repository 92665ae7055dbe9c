"""Autocast under transforms of `torch.func` computes what it does without them."""

import copy
import dataclasses
from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import wrap_torch_function
from torch.utils import _pytree as pytree

import vgrad
from tests import oracle
from tests.losses import STRATEGIES, Net, Pick, TiedLanguageModel
from tests.precision.autocast_ops import (
    COMPOSITE,
    CPU,
    CUDA,
    LATER,
    MISSING,
    PYTHON,
    STEPPED,
    UNFAKED,
    UNLISTED,
)
from vgrad import ops
from vgrad.precision import KINDS, autocast, autocasting
from vgrad.torch_private import modes

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:.* is deprecated"),
    pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning"),
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight"),
]

BF16 = torch.bfloat16


class Recurrent(nn.Module):
    """The sum over time of a recurrent net's output, by the kernel or by cells."""

    def __init__(self, kind, by_cells=False):
        super().__init__()
        self.net, self.by_cells = kind(3, 4, batch_first=True), by_cells

    def forward(self, x):
        if not self.by_cells:
            return self.net(x)[0].sum(1)
        weights, hidden = list(self.net.parameters()), x.new_zeros(len(x), 4)
        state, total = (hidden, hidden), 0.0
        for step in range(x.shape[1]):
            state = torch.lstm_cell(x[:, step], state, *weights)
            total = total + state[0]
        return total


def attention():
    def forward(self, x):
        return self.attend(x, x, x, need_weights=False)[0].mean(1)

    return Net(forward, attend=nn.MultiheadAttention(4, 2, batch_first=True))


def scaled_dot_product():
    def forward(self, x):
        heads = (each(x).unflatten(-1, (2, 2)).mT for each in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(*heads, is_causal=True).flatten(1)

    return Net(forward, **{name: nn.Linear(4, 4) for name in "qkv"})


def trained_a_little(model):
    """Give norm layers statistics and weights of their own."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.ndim == 1 and tensor.is_floating_point():
                tensor.add_(torch.rand_like(tensor) / 2)
    return model.eval()


def chain(*layers):
    return lambda: nn.Sequential(*(layer() for layer in layers))


def flat(*layers):
    return chain(*layers, nn.Flatten)


def one_hot(output, y):
    return torch.eye(output.shape[-1], device=y.device)[y]


LINEAR, CONV = partial(nn.Linear, 5, 6), partial(nn.Conv2d, 3, 4, 3)
ENCODER = partial(nn.TransformerEncoderLayer, 4, 2, 8, 0.0, batch_first=True)
INSTANCE = partial(nn.Conv1d, 3, 4, 3), partial(nn.InstanceNorm1d, 4, affine=True)
MEAN, IMAGE = partial(Pick, lambda x: x.mean(1)), (3, 6, 6)
MODELS = {
    "linear, layer norm": (chain(LINEAR, partial(nn.LayerNorm, 6)), (5,)),
    "rms norm": (chain(LINEAR, partial(nn.RMSNorm, 6)), (5,)),
    "conv, group norm": (flat(CONV, partial(nn.GroupNorm, 2, 4), nn.ReLU), IMAGE),
    "conv, batch norm": (flat(CONV, partial(nn.BatchNorm2d, 4), nn.ReLU), IMAGE),
    "conv, instance norm": (flat(*INSTANCE, nn.ReLU), (3, 8)),
    "transposed conv": (flat(partial(nn.ConvTranspose2d, 3, 2, 3), nn.GELU), (3, 4, 4)),
    "multihead attention": (attention, (3, 4)),
    "attention": (scaled_dot_product, (3, 4)),
    "encoder layer": (flat(ENCODER), (3, 4)),
    "language model": (chain(TiedLanguageModel, MEAN), (5,)),
    "lstm": (lambda: Recurrent(nn.LSTM), (5, 3)),
    "gru": (lambda: Recurrent(nn.GRU), (5, 3)),
    "rnn": (lambda: Recurrent(nn.RNN), (5, 3)),
}

LOSSES = {
    "cross entropy": F.cross_entropy,
    "mse": lambda output, y: F.mse_loss(output, one_hot(output, y)),
    "bce with logits": lambda output, y: F.binary_cross_entropy_with_logits(
        output, one_hot(output, y)
    ),
    "squares": lambda output, y: output.float().square().mean(),
}

# Kernels for one sample and for several round in other places, once in each op.
ROUNDINGS = 4


def build(name, device="cpu", size=2):
    """Return a model, what the reference runs, and a batch."""
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model = trained_a_little(make()).to(device)
    reference = model
    # Some CPUs refuse to run its kernel in low precision; on a GPU it is the reference.
    if (name, device) == ("lstm", "cpu"):
        reference = Recurrent(nn.LSTM, by_cells=True).to(device)
        reference.load_state_dict(model.state_dict())
    for each in reference.modules():
        if isinstance(each, nn.RNNBase):
            each.train()  # as the backward pass of cuDNN demands
    words = name == "language model"
    x = torch.randint(7, (size, *shape)) if words else torch.randn(size, *shape)
    return model, reference, (x.to(device), torch.arange(size, device=device) % 2)


def eager(model, criterion, batch, low):
    """Outputs and gradients of torch's autocast, sample by sample."""
    params = dict(model.named_parameters())
    outputs, grads = [], []
    for x, y in oracle.rows(batch, len(batch[0])):
        with torch.autocast(x.device.type, low):
            output = model(x)
            value = criterion(output, y)
        outputs.append(output[0].detach())
        grads.append(torch.autograd.grad(value, list(params.values())))
    stacked = (torch.stack(each) for each in zip(*grads, strict=True))
    return torch.stack(outputs), dict(zip(params, stacked, strict=True))


def eps(dtype):
    return torch.finfo(dtype).eps


def check(name, criterion, low, device="cpu"):
    """Compare transforms of torch and of vgrad with the reference."""
    model, reference, batch = build(name, device)
    outputs, expected = eager(reference, criterion, batch, low)
    norms, near = oracle.norms(oracle.in_double(expected)), ROUNDINGS * eps(low)
    split = vgrad.make_functional_with_buffers(model, disable_autograd_tracking=True)
    fmodel, params, buffers = split
    loss, found = vgrad.sample_loss(fmodel, criterion), []

    def forward(params, x):
        return functional_call(model, params, (x[None],))

    def of_torch(params, x, y):
        return criterion(forward(params, x), y[None])

    def inside(*args):
        with torch.autocast(device, low):
            return loss(*args)

    # For recurrent nets on a GPU torch.vmap has no rules.
    if device == "cpu" or not isinstance(model, Recurrent):
        with autocast(device, low):
            mapped = torch.vmap(forward, (None, 0))(params, batch[0])[:, 0]
            single = torch.func.grad(of_torch)(params, *(each[0] for each in batch))
            grad = torch.func.grad(of_torch)
            found.append(torch.vmap(grad, (None, 0, 0))(params, *batch))
        assert mapped.dtype == outputs.dtype
        gap = float((mapped - outputs).abs().max())
        assert gap <= near * float(outputs.abs().max())
        assert oracle.distance(single, {n: e[0] for n, e in expected.items()}) <= near
    for strategy in STRATEGIES:
        if (name, strategy, device) == ("lstm", "loop", "cpu"):
            continue  # it runs the kernel
        compute = vgrad.per_sample_grad(loss, strategy=strategy)
        with autocast(device, low):
            found.append(compute(params, buffers, *batch))
        with torch.autocast(device, low):
            found.append(compute(params, buffers, *batch))
            measure = vgrad.per_sample_norm(loss, strategy=strategy)
            measured = measure(params, buffers, *batch)
        compute = vgrad.per_sample_grad(inside, strategy=strategy)
        found.append(compute(params, buffers, *batch))
        torch.testing.assert_close(measured.double(), norms, rtol=near, atol=0)
    for grads in found:
        assert all(each.dtype == torch.float32 for each in grads.values())
        assert oracle.distance(grads, expected) <= near


FEW = ["conv, batch norm", "encoder layer", "gru"]
CASES = [(name, "cross entropy", BF16) for name in MODELS]
CASES += [(name, "cross entropy", torch.float16) for name in FEW]
CASES += [("linear, layer norm", loss, BF16) for loss in LOSSES]
no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


@pytest.mark.parametrize(("name", "loss", "low"), CASES)
def test_transforms_compute_what_eager_autocast_does(name, loss, low):
    check(name, LOSSES[loss], low)


@pytest.mark.cuda
@no_gpu
@pytest.mark.parametrize("low", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_gpu_computes_what_eager_autocast_does(name, low):
    check(name, F.cross_entropy, low, "cuda")


def test_an_inner_region_counts():
    x, weight = torch.randn(2, 3, 4), torch.randn(4, 5)
    inner = torch.vmap(lambda x: x @ weight)
    off = torch.autocast("cpu", enabled=False)
    half = torch.autocast("cpu", torch.float16)

    def switched(region):
        def run(x):
            before = x @ weight
            with region:
                between = x @ weight
            return before, between, x @ weight

        return torch.vmap(run)(x)

    with autocast("cpu", BF16):
        with off:
            assert torch.equal(inner(x), x @ weight)
        with half:
            assert inner(x).dtype == torch.float16
        with autocast("cpu", torch.float16):
            assert inner(x).dtype == torch.float16
        for region, dtype in ((off, torch.float32), (half, torch.float16)):
            assert [y.dtype for y in switched(region)] == [BF16, dtype, BF16]
        assert inner(x).dtype == BF16


@pytest.mark.parametrize("strategy", ["vmap", "loop"])
def test_transforms_in_a_loss_get_no_stale_cast(strategy):
    x = torch.randn(2, 3, 4)

    def loss(params, buffers, x):
        def inner(v):
            v = F.normalize(v, dim=0)  # in which a mode sees more calls
            return ((x @ params["w"]).float() * v).square().sum()

        ahead = F.normalize(x @ params["w"]).float().sum()
        first = torch.func.grad(inner)(params["v"])
        return ahead + (first * torch.func.grad(inner)(params["v"])).sum()

    params = {"w": torch.randn(4, 4), "v": torch.randn(4)}
    compute = vgrad.per_sample_grad(loss, strategy=strategy)
    wide = compute(params, {}, x)
    with torch.autocast("cpu", BF16):
        low = compute(params, {}, x)
    assert 0 < oracle.distance(low, wide) <= 0.05


def state():
    return (
        modes.function_modes(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.get_autocast_dtype("cpu"),
    )


def product_dtype():
    return torch.vmap(lambda x: x @ torch.ones(4, 5))(torch.ones(2, 3, 4)).dtype


def test_an_exception_leaves_no_mode_and_no_autocast_behind():
    before = state()

    def wrong(x):
        F.normalize(x)
        return x @ torch.ones(7, 7)

    region = autocast("cpu", BF16)
    for _ in range(2):
        with pytest.raises(RuntimeError), region:
            torch.vmap(wrong)(torch.ones(2, 3, 4))
        assert state() == before
    with region:
        with region:  # entered again while it is open
            assert product_dtype() == BF16
        with pytest.raises(RuntimeError):
            torch.vmap(wrong)(torch.ones(2, 3, 4))
        assert torch.is_autocast_enabled("cpu")
        assert product_dtype() == BF16
    assert state() == before


@pytest.mark.parametrize("strategy", ["vmap", "hybrid", "loop"])
@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_low_running_statistics_are_updated(norm, weights, strategy):
    torch.manual_seed(0)
    models = [norm(4, affine=True, track_running_stats=True) for _ in range(2)]
    x = torch.randn(8, 4, 5).bfloat16()
    exact = copy.deepcopy(models[0]).double()
    exact(x.double())
    for model in models:
        low = {name: b.bfloat16() for name, b in model.named_buffers() if b.ndim}
        model.to(weights)
        for name, value in low.items():
            setattr(model, name, value)
    fmodel, params, buffers = vgrad.stack(models)
    loss = vgrad.batch_loss(fmodel, lambda output, y: (output.float() - y).mean())
    grad = vgrad.ensemble_grad(loss, strategy=strategy)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = grad(params, buffers, x, torch.zeros(8, 1, 1)).buffers
    for name in ("running_mean", "running_var"):
        new = found[name][0]
        assert new.dtype == torch.bfloat16
        torch.testing.assert_close(
            new.double(), getattr(exact, name), rtol=0.01, atol=1e-3
        )


# Op by op.


def lstm_by_cells(x, w_ih, w_hh, b_ih, b_hh, h):
    """What `torch.lstm` does, which some CPUs refuse to do in low precision."""
    outputs, state = [], (h[0], h[0])
    for each in x:
        state = torch.lstm_cell(each, state, w_ih, w_hh, b_ih, b_hh)
        outputs.append(state[0])
    return torch.stack(outputs), state[0][None], state[1][None]


def drawn(call):
    """Return 3 samples of the first input of an op, then the others."""
    generator = torch.Generator().manual_seed(0)
    first, *rest = call.shapes
    tensors = [torch.randn(3, *first, generator=generator)]
    return tensors + [torch.randn(*shape, generator=generator) for shape in rest]


def leaves(output):
    return [x for x in pytree.tree_leaves(output) if isinstance(x, torch.Tensor)]


def check_op(call, low, dtype, tolerance, device="cpu"):
    """Compare an op in `vmap` and in `vjp` with torch's autocast, sample by sample."""
    op, (x, *rest) = call.run, drawn(call)
    reference = lstm_by_cells if (call.name, device) == ("lstm", "cpu") else op
    x, rest = x.to(device, dtype), [each.to(device) for each in rest]
    try:
        with torch.autocast(device, low):
            expected = [leaves(reference(one, *rest)) for one in x]
    except RuntimeError:  # torch has no such kernel
        return False
    expected = [torch.stack(each) for each in zip(*expected, strict=True)]
    with autocast(device, low):
        mapped = expected
        if call.name != "chain_matmul":  # for which torch has no batching rule
            mapped = leaves(torch.vmap(lambda one: op(one, *rest))(x))
        *_, alone = torch.func.vjp(
            lambda one: (one.sum(), leaves(op(one, *rest))), x[0], has_aux=True
        )
    for found, exact in ((mapped, expected), (alone, [each[0] for each in expected])):
        assert [each.dtype for each in found] == [each.dtype for each in exact]
        oracle.assert_exact(found, exact, tolerance)
    return True


def check_either(call, low, device="cpu"):
    """Compare an op of the lists for both dtypes of its input, of which one may run."""
    kinds = autocasting.Kind
    kind = KINDS[device].get(call.name, kinds.INSIDE)
    exact = kind in (kinds.FLOAT32, kinds.WIDEST, kinds.OWN)
    if (call.name, device) == ("cross_entropy_loss", "cuda"):
        exact = False  # torch's log-softmax of half precision is rounded to it
    given = 1e-5 if exact else 3 * eps(low), device
    assert any([check_op(call, low, dtype, *given) for dtype in (torch.float32, low)])


in_both = pytest.mark.parametrize("low", [BF16, torch.float16], ids=str)


@in_both
@pytest.mark.parametrize("name", [name for name in CPU if name not in MISSING])
def test_an_op_of_the_table_is_what_torch_makes_of_it(name, low):
    check_either(CPU[name], low)


@in_both
@pytest.mark.parametrize("name", COMPOSITE)
def test_a_composite_op_is_left_to_torch(name, low):
    check_either(COMPOSITE[name], low)


NEW = sorted(autocasting.autocast_ops("cpu") & CPU.keys() - MISSING | LATER.keys())


@in_both
@pytest.mark.parametrize("name", NEW)
def test_an_op_that_is_not_in_the_table_yet_is_cast_as_torch_casts_it(
    name, low, monkeypatch
):
    if name in MISSING:
        pytest.skip("which this torch does not have")
    monkeypatch.delitem(KINDS["cpu"], name, raising=False)
    for func, op in [*ops.OPS.items()]:
        if op.autocast is not None and modes.op_name(func) == name:
            monkeypatch.setitem(ops.OPS, func, dataclasses.replace(op, autocast=None))
    check_either((CPU | LATER)[name], low)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_loss_may_call_an_op_that_is_not_in_the_table(strategy):
    assert "linalg_inv" not in KINDS["cpu"]

    def loss(params, buffers, x):
        return torch.linalg.inv(x @ params["w"] + 4 * torch.eye(3)).square().sum()

    params, x = {"w": torch.randn(3, 3) / 4}, torch.randn(5, 3, 3)
    with torch.autocast("cpu", BF16):
        found = vgrad.per_sample_grad(loss, strategy=strategy)(params, {}, x)["w"]
        for one, each in zip(found, x, strict=True):
            (right,) = torch.autograd.grad(
                loss(leaf := {"w": params["w"].clone().requires_grad_()}, {}, each),
                [*leaf.values()],
            )
            oracle.assert_exact(one, right, 0.02)


@in_both
@pytest.mark.parametrize("name", UNLISTED)
def test_an_op_in_no_list_keeps_its_rules_for_dtypes(name, low):
    check_op(UNLISTED[name], low, torch.float32, 1e-6)
    check_op(UNLISTED[name], low, low, 2 * eps(low))


@pytest.fixture
def in_cuda_autocast():
    """Pretend that there is a GPU: tensors without numbers, which have dtypes."""
    torch.set_autocast_enabled("cuda", True)
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_dtype("cuda", torch.float16)
    torch.autocast_increment_nesting()
    with FakeTensorMode():
        yield
    torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()
    torch.set_autocast_dtype("cuda", before)
    torch.set_autocast_enabled("cuda", False)


@pytest.mark.parametrize(
    "name", [n for n in CUDA | COMPOSITE if n not in {*UNFAKED, *MISSING}]
)
def test_an_op_of_the_table_for_cuda_has_the_dtype_of_torch(name, in_cuda_autocast):
    _, shapes, op = (CUDA | COMPOSITE)[name]
    rest = [torch.empty(shape, device="cuda") for shape in shapes[1:]]
    for dtype in (torch.float32, torch.float16):
        one = torch.empty(*shapes[0], dtype=dtype, device="cuda")
        batch = torch.empty(3, *shapes[0], dtype=dtype, device="cuda")
        expected = [each.dtype for each in leaves(op(one, *rest))]
        with autocasting.AutocastMode():
            found = torch.vmap(op, (0, *(None for _ in rest)))(batch, *rest)
        assert [each.dtype for each in leaves(found)] == expected


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(None, torch.float32), ("LOW", BF16), ((None, "LOW"), torch.float32)],
)
def test_an_op_of_ones_own_is_cast_as_its_record_says(kind, dtype, monkeypatch):
    plus = wrap_torch_function(lambda x, weight: (x, weight))(torch.Tensor.add)
    kinds = ops.Kind.LOW if kind == "LOW" else kind and (None, ops.Kind.LOW)
    monkeypatch.setitem(ops.OPS, plus, ops.Op(autocast=kinds))
    x, weight = torch.randn(3, 2), torch.randn(2)
    with autocast("cpu", BF16):
        found = torch.vmap(lambda x: plus(x, weight))(x)
    oracle.assert_exact(found, x.to(dtype) + weight.to(dtype), 0)
    assert found.dtype == dtype


def test_other_devices_cast_as_cuda_does_but_for_ops_that_they_lack(monkeypatch):
    ops_of_cuda = autocasting.autocast_ops("cuda")
    ops_of = {"cuda": ops_of_cuda, "other": ops_of_cuda - {"linear", "exp"}}
    monkeypatch.setattr(autocasting, "autocast_ops", ops_of.__getitem__)
    functions = F.linear, F.conv1d, torch.exp, torch.log, F.layer_norm
    found = [autocasting._kind("other", each, (), {}) for each in functions]
    kinds = ops.Kind
    assert found == [kinds.OWN, kinds.LOW, None, kinds.FLOAT32, kinds.FLOAT32]
    autocasting._lacking.cache_clear()


def test_what_torch_refuses_to_autocast_is_refused_under_transforms(in_cuda_autocast):
    x = torch.empty(3, 2, device="cuda")
    with (
        autocasting.AutocastMode(),
        pytest.raises(RuntimeError, match="safe to autocast.*takes logits"),
    ):
        torch.vmap(F.binary_cross_entropy)(x, x)


INTERNAL = {
    "cpu": {
        "_addmm_activation": "the fused layers of a TransformerEncoderLayer",
        "_native_multi_head_attention": "the same, which transforms do not take",
        "_convolution": "convolutions, which are cast before",
        "_grid_sampler_2d_cpu_fallback": "grid_sampler_2d, which is cast before",
        "mkldnn_rnn_layer": "lstm, which runs in steps",
        "multilabel_margin_loss_forward": "multilabel_margin_loss, cast before",
    },
    "cuda": {
        "_convolution": "convolutions, which are cast before",
        "cudnn_convolution": "convolutions, which are cast before",
        "cudnn_convolution_transpose": "convolutions, which are cast before",
        "_scaled_dot_product_flash_attention": "attention, which is cast before",
        "_thnn_fused_gru_cell": "gru_cell, which is cast before",
        "_thnn_fused_lstm_cell": "lstm_cell, which is cast before",
    },
}
if torch._C._has_cudnn:  # a build for CUDA, with or without a GPU
    INTERNAL["cuda"]["_cudnn_rnn"] = "lstm, gru and the others, which are cast before"
"""Ops with a kernel of autocast that no function of a model calls, and who does."""


@pytest.mark.parametrize(("device", "key"), [("cpu", "CPU"), ("cuda", "CUDA")])
def test_every_op_that_torch_autocasts_is_tested(device, key):
    kernels = torch._C._dispatch_get_registrations_for_dispatch_key(f"Autocast{key}")
    ops = {each.removeprefix("aten::").split(".")[0] for each in kernels}
    tested = (CPU if device == "cpu" else CUDA).keys() | LATER.keys()
    assert ops - tested - {"binary_cross_entropy"} == INTERNAL[device].keys()


def test_every_op_of_the_tables_is_tested():
    assert CPU.keys() >= KINDS["cpu"].keys()
    assert CUDA.keys() | {"binary_cross_entropy"} >= KINDS["cuda"].keys()


@pytest.mark.parametrize("name", PYTHON)
def test_what_a_python_function_calls_is_what_torch_makes_of_it(name):
    for dtype in (torch.float32, BF16):
        assert check_op(PYTHON[name], BF16, dtype, 3 * 2**-7)


@pytest.mark.cuda
@no_gpu
@in_both
@pytest.mark.parametrize("name", sorted(CUDA.keys() - STEPPED.keys() - MISSING))
def test_a_gpu_makes_of_an_op_what_torch_does(name, low):
    check_either(CUDA[name], low, "cuda")
