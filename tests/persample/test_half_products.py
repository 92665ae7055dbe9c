"""Products of half precision factors, on a device that multiplies them as such.

No such device need be here: a dispatch mode gives the CPU the ops of one, and rounds
what one rounds. Real ones run `tests/test_cuda.py`.
"""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import vgrad
from tests import oracle
from tests.losses import (
    clipped_lengths,
    errors_of_sums,
    length,
    linear,
    of_images,
    singles,
)
from tests.persample.test_bounds import CLIPPING, made
from vgrad.factors import Conv, Outer, costs, norms, products
from vgrad.precision import StaticLossScale
from vgrad.torch_private import kernels

aten = torch.ops.aten
CUT = {torch.bfloat16: 1.5e-9, torch.float16: 6e-9}
"""Of a sum, for each of its terms, as measured on an H100."""
HALVES = [*CUT]


def cut(numbers):
    """Cut float32 to the 11 bits of TF32, as the units do with what they are given."""
    if numbers is None or numbers.dtype != torch.float32:
        return numbers
    return (numbers.view(torch.int32) & ~0x1FFF).view(torch.float32)


class Units(TorchDispatchMode):
    """Matrix units: products of halves in float32, convolutions in TF32 at best."""

    PRODUCTS = (aten.mm, aten.bmm, aten.addmm, aten.baddbmm)

    def __init__(self, tf32):
        super().__init__()
        self.tf32, self.seen = tf32, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        packet = func.overloadpacket
        if packet in self.PRODUCTS:
            if "dtype" in func._overloadname:
                *args, out_dtype = args
                (dtype,) = {each.dtype for each in args}
                self.seen.append((packet, dtype))
                found = packet(*(each.float() for each in args), **kwargs)
                # Sums are cut, and not rounded.
                return (found * (1 - CUT[dtype] * args[0].shape[-1])).to(out_dtype)
            self.seen.append((packet, args[-1].dtype))
            if self.tf32:
                args = (*args[:-2], *map(cut, args[-2:]))
        if packet in (aten.convolution, aten.convolution_backward):
            self.seen.append((packet, args[1].dtype))
            args = (*map(cut, args[:2]), *args[2:])
        return func(*args, **kwargs)


@contextlib.contextmanager
def device(*, tf32=False, few=0, halves=True):
    """Let products run as on such a device, however few numbers they have."""
    switches = {"matmul": "tf32" if tf32 else "none", "conv": "tf32", "rnn": "tf32"}
    with pytest.MonkeyPatch.context() as patch, Units(tf32) as units:
        patch.setattr(kernels, "multiplies_halves", lambda device: halves)
        patch.setattr(kernels, "fp32_precision", lambda backend, op: switches[op])
        patch.setattr(products, "_FEW", few)
        yield units


def even(dtype, positions=1, size=16):
    """Samples whose numbers, all equal, are all rounded alike."""
    numbers = 1 + torch.rand(size, 2, generator=torch.Generator().manual_seed(0))
    x = numbers[:, :1, None].expand(-1, positions, 8)
    g = numbers[:, 1:, None].expand(-1, positions, 8)
    return x.to(dtype), g.to(dtype)


def cancelling(dtype, positions=64, size=6):
    """Samples most of whose terms cancel."""
    generator = torch.Generator().manual_seed(1)
    numbers = 1 + torch.rand(size, positions // 2, 1, generator=generator)
    x = numbers.repeat(1, 2, 1).expand(-1, -1, 8)
    signs = torch.tensor([1.0, -1.0]).repeat_interleave(positions // 2)[:, None]
    g = 1 + torch.rand(size, positions, 1, generator=generator) / 16
    return x.to(dtype), (signs * g).expand(-1, -1, 8).to(dtype)


BATCHES = {
    "one position": lambda dtype: even(dtype),
    "equal positions": lambda dtype: even(dtype, 4),
    "positions that cancel": cancelling,
}


def in_groups(params, buffers, x, g):
    w = params["w"].unflatten(0, (2, 4)).unflatten(2, (2, 4))[:, :, 0]
    pairs = x.unflatten(1, (2, 4)), g.unflatten(1, (2, 4))
    return (torch.einsum("tgi,goi->tgo", pairs[0], w) * pairs[1]).sum()


def tied(params, buffers, x, g):
    index = torch.arange(len(x)) % 8
    return linear(params, {}, x, g) + (F.embedding(index, params["w"]) * g).sum()


def twice(params, buffers, x, g):
    half = (len(x) + 1) // 2
    first = linear(params, {}, x[:half], g[:half])
    return first + linear(params, {}, x[half:], g[half:])


LOSSES = {"linear": linear, "groups": in_groups, "tied": tied, "twice": twice}
"""All with a weight [8, 8], under samples [T, 8] and gradients [T, 8]."""


def excess(loss, params, batch, bound, **options):
    """How much the longest of clipped samples is above the bound, relative to it."""
    found = clipped_lengths(loss, params, batch, bound, strategy="recorded", **options)
    return float(found.max() / bound) - 1


@pytest.mark.parametrize("kind", ["half", "tf32"])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", LOSSES)
def test_no_sample_adds_more_than_its_bound(name, batch, dtype, kind):
    if (kind, dtype) == ("half", torch.float32):
        pytest.skip("torch rounds nothing there")
    if name == "twice" and batch == "one position":
        pytest.skip("takes two positions at least")
    params = {"w": torch.zeros(8, 8, dtype=dtype)}
    pair = [each[:8] for each in BATCHES[batch](dtype)]
    with device(tf32=kind == "tf32"):
        for clipping in ("flat", "automatic"):
            more = excess(LOSSES[name], params, pair, 0.7, clipping=clipping)
            assert more <= 1e-6
            assert more > -0.05 or clipping == "automatic"
        assert excess(LOSSES[name], params, pair, 0.3, passes=2) <= 1e-6


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("batch", ["one position", "equal positions"])
def test_the_bound_rests_on_the_rounding_of_scaled_factors(batch, dtype, monkeypatch):
    params, pair = {"w": torch.zeros(8, 8, dtype=dtype)}, BATCHES[batch](dtype)
    monkeypatch.setattr(products, "_LOST", 1e-30)
    monkeypatch.setattr(products, "CUT", 0.0)
    with device(tf32=dtype == torch.float32):
        more = excess(linear, params, pair, 0.7)
    if (batch, dtype) != ("equal positions", torch.float32):
        assert more > 2e-6


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("width", [200, 2048])
def test_the_bound_holds_where_units_cut_long_sums(width, dtype):
    x = torch.rand(3, 6, width, generator=torch.manual_seed(0)).to(dtype)
    params = {"w": torch.zeros(width, width, dtype=dtype)}
    with device(few=2**60):
        assert Outer(x[:, None], x[:, None], params["w"].shape).by_gram
        assert -1e-5 < excess(linear, params, (x, x), 1.0) <= 1e-6
        compute = vgrad.per_sample_norm(linear, strategy="recorded")
        found = compute(params, {}, x, x)
    exact = oracle.norms(oracle.loss_gradients(linear, params, {}, (x, x)))
    torch.testing.assert_close(found.double(), exact, rtol=4e-6, atol=0)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("other", [*HALVES, torch.float32])
@pytest.mark.parametrize(
    "options", [{}, {"tf32": True}, {"tf32": True, "halves": False}]
)
@pytest.mark.parametrize("width", [40, 256, 2048])
def test_norms_of_factors_of_two_dtypes(width, options, other, dtype):
    both = torch.rand(2, 3, 1, 1, width, generator=torch.manual_seed(0))
    x, g = both.expand(-1, -1, -1, 6, -1).unbind(0)
    factor = Outer(x.to(dtype), g.to(other), torch.Size([width, width]))
    exact = factor.double().grad().flatten(1).norm(dim=1)
    with device(few=2**60, **options):
        assert factor.by_gram
        (found,) = factor.with_norms()[1]
        (norm,) = norms.computed({"w": [found]})["w"]
    assert (found.cut > 0) == options.get("halves", True)
    torch.testing.assert_close(norm.value, exact, rtol=4e-6, atol=0)
    assert (norm.upper >= exact).all()
    assert (norm.upper <= exact * (1 + 1e-5)).all()


def test_patches_of_half_precision_meet_outputs_of_it(monkeypatch):
    switches = {"matmul": "tf32", "conv": "none"}
    monkeypatch.setattr(kernels, "fp32_precision", lambda backend, op: switches[op])
    loss, params, batch = of_images(*IMAGES["many channels"], torch.bfloat16)
    exact = oracle.norms(oracle.loss_gradients(loss, params, {}, batch))
    found = vgrad.per_sample_norm(loss, strategy="recorded")(params, {}, *batch)
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", CLIPPING)
@pytest.mark.parametrize("scale", [None, 2.0**16, 2.0**-10])
@pytest.mark.parametrize("name", ["linear, products", "conv, products", "in parts"])
def test_the_bound_holds_for_sizes_at_the_ends_of_half_precision(
    name, scale, kind, dtype
):
    small = 6e-8 if dtype == torch.float16 else 1e-38
    sizes = [(1.0, 1.0, 1.0), (small * 50, 1.0, 0.0), (1.0, small * 50, small)]
    sizes += [(100.0, 100.0, 0.0), (1e-3, 1e-4, 1e-5)]
    loss, params, batch = made(name, sizes, dtype)
    options = {"loss_scale": None if scale is None else StaticLossScale(scale)}
    with device():
        for bound in (1e-6,) if kind == "dictionary" else (1.0, 1e-6):
            compute = vgrad.clipped_grad(
                loss, strategy="recorded", **CLIPPING[kind](bound), **options
            )
            for one in singles(batch):
                found = compute(params, {}, *one)
                assert length(found.grads) <= bound * (1 + 1e-6)


def test_scaled_factors_of_float16_do_not_underflow():
    # A weight of 1e-6 takes numbers of 1e-3 below what float16 has.
    x = torch.full((4, 2, 8), 1e-3).half()
    g = torch.full((4, 2, 8), 60.0).half()
    params, weights = {"w": torch.zeros(8, 8).half()}, torch.full((4,), 1e-6)
    exact = oracle.loss_gradients(linear, params, {}, (x, g))
    with device():
        total = vgrad.weighted_grad(linear, strategy="recorded")
        found = total(weights, params, {}, x, g)
    oracle.assert_exact(found, oracle.weighted(exact, weights), 2e-4)


IMAGES = {  # channels, outputs, side, kernel, options
    "few channels": (3, 8, 12, 3, {"padding": 1}),
    "many channels": (32, 32, 3, 3, {"padding": 1}),
    "depthwise": (8, 8, 9, 5, {"groups": 8}),
    "strides": (4, 8, 11, 3, {"stride": 2, "dilation": 2, "groups": 2}),
    "one position": (4, 6, 3, 3, {}),
}


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("name", IMAGES)
def test_convolutions_are_clipped_as_they_are_summed(name, dtype):
    loss, params, (x, g) = of_images(*IMAGES[name], dtype, draw=torch.rand)
    exact = oracle.loss_gradients(loss, params, {}, (x, g))
    bound = 0.5 * float(oracle.norms(exact).min())
    with device() as units:
        assert excess(loss, params, (x, g), bound) <= 1e-6
        options = {"strategy": "recorded", "verify": False}
        compute = vgrad.clipped_grad(loss, max_norm=bound, **options)
        units.seen.clear()
        found = compute(params, {}, x, g).grads
    oracle.assert_exact(found, oracle.clipped(exact, bound), 5e-3)
    # But for channels by themselves, and then for each sample.
    depthwise = name == "depthwise"
    assert (aten.convolution_backward in {op for op, _ in units.seen}) == depthwise


def test_factors_stay_in_half_precision():
    net = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3))
    net = nn.Sequential(net, nn.Flatten(), nn.Linear(32 * 36, 20))
    fmodel, params, buffers = vgrad.make_functional_with_buffers(net)
    loss = vgrad.sample_loss(fmodel, F.cross_entropy)
    x, y = torch.randn(4, 3, 10, 10), torch.arange(4)
    compute = vgrad.clipped_grad(loss, max_norm=0.1, verify=False)
    with device() as units, torch.autocast("cpu", torch.bfloat16):
        compute(params, buffers, x, y)
    large = [dtype for op, dtype in units.seen if op is not aten.addmm or dtype]
    halves = [dtype for dtype in large if dtype == torch.bfloat16]
    # The rest are sums of rows with weights, of biases and formed gradients.
    rest = [op for op, dtype in units.seen if dtype != torch.bfloat16]
    assert len(halves) >= 6
    assert torch.float64 not in large
    assert set(rest) <= {aten.mm, aten.bmm}
    assert len(rest) <= len(params)


@pytest.mark.parametrize("positions", [8, 200])
def test_more_norms_are_products_of_positions_on_matrix_units(positions):
    x, g = torch.randn(2, 1, positions, 512), torch.randn(2, 1, positions, 512)
    shape = torch.Size([512, 512])
    with device():
        assert Outer(x.bfloat16(), g.bfloat16(), shape).by_gram
        assert Outer(x, g, shape).by_gram == (positions == 8)
    assert not costs.outer_by_gram(4096, 256, 256, True)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("tf32", [False, True])
def test_products_of_halves_are_those_of_float32(dtype, tf32):
    a, b = (torch.randn(3, 40, 50, generator=torch.manual_seed(0)).to(dtype),) * 2
    exact = a.double() @ b.double().mT
    with device(tf32=tf32, halves=tf32):
        found = products.times(a, b.mT)
    assert found.dtype == torch.float32
    oracle.assert_exact(found, exact, 1e-6)
    # With derivatives, which these ops lack, factors are widened.
    a.requires_grad_()
    with device(tf32=tf32):
        products.times(a, b.mT).sum().backward()
    assert a.grad is not None


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("sizes", [(30, 20), (20, 30)])
@pytest.mark.parametrize("positions", [1, 300])
@pytest.mark.parametrize("kind", ["samples first", "time first", "groups"])
def test_sums_in_terms_lose_no_more_than_they_say(kind, positions, sizes, dtype):
    generator = torch.Generator().manual_seed(0)
    groups = 3 if kind == "groups" else 1

    def drawn(width):
        if kind == "time first":
            made = torch.randn(positions, 10, width, generator=generator)
            return made.to(dtype).transpose(0, 1)[:, None]
        return torch.randn(10, groups, positions, width, generator=generator).to(dtype)

    a, b = map(drawn, sizes)
    weights = torch.rand(10, generator=generator)
    pair = b.double().mT, a.double()
    column = weights.double().view(-1, 1, 1, 1)
    exact = (pair[0] @ (pair[1] * column)).sum(0)
    most = (pair[0].abs() @ (pair[1].abs() * column)).sum(0)
    with device(tf32=dtype == torch.float32):
        found = products.by_terms(a, b, weights)
        lost = products.rounding(a, b)
    gap = (found - exact).abs() / most
    assert found.dtype == torch.float32
    assert 0 < float(gap.max()) <= lost
    with device():  # where torch rounds nothing, or a device has no such ops
        assert products.rounding(a.float(), b.float()) == 0
    assert products.rounding(a, b) == 0
    oracle.assert_exact(products.scaled(a, b, weights).view_as(exact), exact, 1e-6)


NETS = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 5)),
        (20,),
    ),
    "cnn": (
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU()),
            *(nn.Conv2d(8, 16, 3, stride=2), nn.Flatten(), nn.Linear(16 * 16, 5)),
        ),
        (3, 9, 9),
    ),
    "transformer": (
        lambda: nn.Sequential(
            nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True),
            nn.Flatten(),
            nn.Linear(32 * 12, 5),
        ),
        (12, 32),
    ),
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("clipping", ["flat", "automatic"])
@pytest.mark.parametrize("name", NETS)
def test_clipped_sums_are_as_near_to_float64_as_gradients_of_the_batch(
    name, clipping, dtype
):
    torch.manual_seed(0)
    make, sizes = NETS[name]
    net, batch = make(), (torch.randn(32, *sizes), torch.randint(5, (32,)))
    found, plain = errors_of_sums(net, batch, dtype, device(), clipping)
    assert found <= 1.2 * plain


def test_gradients_of_convolutions_on_a_device_take_the_windows():
    x, g = torch.randn(2, 4, 6, 6), torch.randn(2, 3, 4, 4)
    geometry = (1, 1), (0,) * 4, (1, 1), 1
    factor = Conv(x, g, torch.Size([3, 4, 3, 3]), *geometry)
    expected = factor.double().grad()
    assert factor.plain
    with device():
        assert not factor.plain
        oracle.assert_exact(factor.grad(), expected, 1e-6)
