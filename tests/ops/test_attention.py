"""Attention under transforms: the same numbers as torch, sample by sample."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap

from tests.examples import examples
from tests.losses import DEVICES, randn
from vgrad.ops import OPS

scaled_dot_product_attention = OPS[F.scaled_dot_product_attention].mapped


def normal(*shape, device="cpu", **options):
    return randn(*shape, **options).to(device)


def inputs(*shape, keys=6, **options):
    """Make a query of `shape` and keys and values with `keys` positions."""
    *lead, _, features = shape
    rows = [shape, (*lead, keys, features), (*lead, keys, features)]
    return [normal(*row, seed=seed, **options) for seed, row in enumerate(rows)]


def one(tensors, in_dims, sample):
    """Select one sample from tensors of which some have an axis of samples."""
    pairs = zip(tensors, in_dims, strict=True)
    return [x if dim is None else x.select(dim, sample) for x, dim in pairs]


def loop(tensors, in_dims, cotangents, **options):
    """Attend sample by sample: outputs and the gradients of all float inputs."""
    outs, grads = [], []
    for sample, cotangent in enumerate(cotangents):
        leaves = [x.detach().clone() for x in one(tensors, in_dims, sample)]
        floats = [x.requires_grad_() for x in leaves if x.is_floating_point()]
        out = F.scaled_dot_product_attention(*leaves, **options)
        outs.append(out.detach())
        grads.append(torch.autograd.grad(out, floats, cotangent))
    return torch.stack(outs), tuple(torch.stack(x) for x in zip(*grads, strict=True))


def mapped(tensors, in_dims, cotangents, *, randomness="error", **options):
    """The same at once, under vmap."""
    floats = sum(x.is_floating_point() for x in tensors)

    def pulled(cotangent, *tensors):
        def attend(*chosen):
            return scaled_dot_product_attention(*chosen, *tensors[floats:], **options)

        out, pull = vjp(attend, *tensors[:floats])
        return out, pull(cotangent)

    run = vmap(pulled, (0, *in_dims), randomness=randomness)
    return run(cotangents, *tensors)


def dropped(*tensors, p=0.5):
    return scaled_dot_product_attention(*tensors, dropout_p=p)


@st.composite
def problems(draw):
    """Draw inputs of any rank, with masks, grouped heads and any axis of samples."""
    size = draw(st.integers(1, 3))
    length, keys, features, values = draw(st.tuples(*[st.integers(1, 4)] * 4))
    lead = tuple(draw(st.lists(st.integers(1, 3), max_size=3)))
    options = {"scale": draw(st.sampled_from([None, 0.3]))}
    shapes = []
    groups = draw(st.sampled_from([1, 2])) if lead else 1
    for last in ((length, features), (keys, features), (keys, values)):
        own = tuple(1 if draw(st.booleans()) else n for n in lead)
        own = own[draw(st.integers(0, len(own))) :]
        if groups > 1:  # heads that are grouped neither broadcast nor are left out
            heads = lead[-1] * (groups if not shapes else 1)
            own = (*own[:-1], heads)
        shapes.append((*own, *last))
    options["enable_gqa"] = groups > 1
    kind = draw(st.sampled_from(["none", "causal", "bool", "float"]))
    options["is_causal"] = kind == "causal"
    if kind in ("bool", "float"):
        heads = -3 if groups > 1 else -2
        full = torch.broadcast_shapes(*(x[:heads] for x in shapes[:2]))
        full = (*full, shapes[0][-3]) if groups > 1 else full
        own = tuple(1 if draw(st.booleans()) else n for n in full)
        own = own[draw(st.integers(0, len(own))) :]
        shapes.append((*own, length, keys))
    in_dims = [
        draw(st.integers(0, len(x))) if draw(st.booleans()) else None for x in shapes
    ]
    if set(in_dims) == {None}:
        in_dims[draw(st.integers(0, len(shapes) - 1))] = 0
    seed = draw(st.integers(0, 1000))
    tensors = []
    for number, (shape, dim) in enumerate(zip(shapes, in_dims, strict=True)):
        shape = list(shape)
        if dim is not None:
            shape.insert(dim, size)
        tensor = normal(*shape, seed=seed + number)
        tensors.append(tensor > 0 if number == 3 and kind == "bool" else tensor)
    return size, tensors, in_dims, options


@pytest.mark.slow
@given(problems(), st.sampled_from([(torch.float64, 1e-10), (torch.float32, 1e-4)]))
@examples(100)
def test_outputs_and_gradients_equal_those_of_a_loop(problem, kind):
    (size, tensors, in_dims, options), (dtype, bound) = problem, kind
    tensors = [x.to(dtype) if x.is_floating_point() else x for x in tensors]
    floats = sum(x.is_floating_point() for x in tensors)
    shape = F.scaled_dot_product_attention(*one(tensors, in_dims, 0), **options).shape
    cotangents = normal(size, *shape, dtype=dtype)
    out, grads = loop(tensors, in_dims, cotangents, **options)
    close = {"atol": bound, "rtol": bound}

    # Each sample with its gradients.
    found = mapped(tensors, in_dims, cotangents, **options)
    torch.testing.assert_close(found, (out, grads), **close)

    # All samples as one function: what samples share receives the sum.
    def together(*chosen):
        def attend(*sample):
            return scaled_dot_product_attention(*sample, **options)

        return vmap(attend, in_dims=tuple(in_dims))(*chosen, *tensors[floats:])

    summed = tuple(
        x.sum(0) if dim is None else x.movedim(0, dim)
        for x, dim in zip(grads, in_dims, strict=False)
    )
    all_out, pull = vjp(together, *tensors[:floats])
    torch.testing.assert_close((all_out, pull(cotangents)), (out, summed), **close)
    leaves = [x.clone().requires_grad_() for x in tensors[:floats]]
    found = torch.autograd.grad(together(*leaves), leaves, cotangents)
    torch.testing.assert_close(found, summed, **close)


@pytest.mark.parametrize(
    ("in_dims", "dims"),
    [
        *(((0, 1, 0), dims) for dims in ((0, None, 0, 0), (None, 0, 1, 0))),
        *(((0, None, 0), dims) for dims in ((0, None, 0, 0), (0, 0, 0, 0))),
        *(((None, 0, 1), dims) for dims in ((None, 0, 1, 0), (0, 0, 0, 0))),
    ],
)
def test_gradients_of_nested_vmaps_equal_those_of_a_loop(in_dims, dims):
    tensors, shapes = [], [(2, 5, 4), (2, 6, 4), (2, 6, 4), (5, 6)]
    axes = zip(shapes, (*in_dims, 0), dims, strict=True)
    for seed, (shape, *places) in enumerate(axes):
        shape = list(shape)
        for place, size in zip(places, (3, 2), strict=True):
            if place is not None:
                shape.insert(place, size)
        tensors.append(normal(*shape, seed=seed))
    cotangents = normal(2, 3, 2, 5, 4, seed=9)
    inner = lambda c, *x: mapped(x, (*in_dims, 0), c)  # noqa: E731
    out, grads = vmap(inner, in_dims=(0, *dims))(cotangents, *tensors)
    for sample in range(2):
        chosen = one(tensors, dims, sample)
        expected = loop(chosen, (*in_dims, 0), cotangents[sample])
        found = out[sample], tuple(x[sample] for x in grads)
        torch.testing.assert_close(found, expected)


def test_forward_and_backward_call_no_kernel_per_sample():
    tensors = inputs(7, 1, 2, 5, 4)

    def total(attend):
        return grad(lambda *x: attend(*x).sum(), argnums=(0, 1, 2))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vmap(total(scaled_dot_product_attention))(*tensors)
    with pytest.warns(UserWarning, match="batching rule"):  # what this module is for
        vmap(total(F.scaled_dot_product_attention))(*tensors)


@pytest.mark.parametrize("float_mask", [False, True])
def test_rows_masked_altogether_give_what_torch_gives(float_mask):
    mask = normal(3, 5, 6) > 0
    mask[1] = False
    if float_mask:
        mask = torch.zeros(3, 5, 6, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    tensors, cotangents = [*inputs(3, 2, 5, 4), mask], normal(3, 2, 5, 4, seed=8)
    out, grads = loop(tensors, (0,) * 4, cotangents)
    assert not out[1].any()
    found = mapped(tensors, (0,) * 4, cotangents)
    torch.testing.assert_close(found, (out, grads))


EMPTY = [(b, *sizes) for b in (0, 3) for sizes in ((2, 0, 6), (2, 5, 0), (0, 5, 6))]


@pytest.mark.parametrize(("batch", "heads", "length", "keys"), [*EMPTY, (0, 2, 5, 6)])
def test_empty_axes_give_empty_or_zero_results(batch, heads, length, keys):
    tensors = inputs(batch, heads, length, 4, keys=keys)
    tensors.append(normal(batch, length, keys))
    cotangents = normal(batch, heads, length, 4)
    out, grads = mapped(tensors, (0,) * 4, cotangents)
    assert out.shape == (batch, heads, length, 4)
    assert [x.shape for x in grads] == [x.shape for x in tensors]
    assert not any(x.any() for x in (out, *grads))


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("mask", [False, True])
def test_autocast_gives_the_dtypes_and_numbers_of_torch(inside, mask):
    tensors = inputs(3, 2, 5, 4, dtype=torch.float32)
    tensors += [normal(3, 5, 6, dtype=torch.float32)] * mask
    cotangents = normal(3, 2, 5, 4, dtype=torch.float32).bfloat16()

    def attend(*x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return scaled_dot_product_attention(*x)

    # Whatever surrounds the backward pass, it repeats the dtypes of the forward pass.
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = vmap(attend)(*leaves)
        own = torch.autograd.grad(out, leaves, cotangents)
    per_sample = vmap(lambda c, *x: vjp(attend, *x)[1](c))(cotangents, *tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, wanted = loop(
            [x[:, None] for x in tensors], (0,) * len(tensors), cotangents[:, None]
        )
    torch.testing.assert_close(out, expected[:, 0])
    for found in (own, per_sample):
        close = {"atol": 2e-2, "rtol": 2e-2}
        torch.testing.assert_close(found, tuple(x[:, 0] for x in wanted), **close)


def masks(randomness, samples=4):
    """Read the dropped weights off the attention to the unit vectors."""
    query, key, _ = inputs(2, 5, 3)
    value = torch.eye(6, dtype=torch.float64).expand(2, 6, 6)
    plain = F.scaled_dot_product_attention(query, key, value)
    torch.manual_seed(0)
    attend = vmap(lambda q: dropped(q, key, value, p=0.25), randomness=randomness)
    return attend(query.expand(samples, 2, 5, 3)) / plain


def test_dropout_zeroes_weights_and_scales_the_others():
    kept = masks("different", samples=50)
    values = torch.tensor([0.0, 1 / 0.75], dtype=torch.float64)
    distance = (kept[..., None] - values).abs().amin(-1)
    assert distance.max() < 1e-12
    assert (kept == 0).double().mean() == pytest.approx(0.25, abs=0.04)  # 5 sigma
    same = masks("same")
    assert torch.equal(same, same[:1].expand_as(same))
    assert same.unique().numel() > 1
    assert all(not torch.equal(kept[0], kept[sample]) for sample in range(1, 4))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("randomness", ["same", "different"])
def test_gradients_see_the_dropout_of_the_forward_pass(device, randomness):
    tensors = inputs(3, 2, 5, 4, device=device)
    steps = [x.flip(0) for x in tensors]
    cotangents = normal(3, 2, 5, 4, seed=7, device=device)
    options = {"dropout_p": 0.5, "randomness": randomness}
    torch.manual_seed(1)
    out, grads = mapped(tensors, (0, 0, 0), cotangents, **options)

    def value(*x):
        torch.manual_seed(1)
        return (vmap(dropped, randomness=randomness)(*x) * cotangents).sum((1, 2, 3))

    # The output is linear in the values, so that gradient times value is the output.
    linear = (grads[2] * tensors[2]).sum((1, 2, 3))
    torch.testing.assert_close(linear, (out * cotangents).sum((1, 2, 3)))
    for argument, (grad_, step) in enumerate(zip(grads, steps, strict=True)):
        ahead, behind = list(tensors), list(tensors)
        ahead[argument] = tensors[argument] + 1e-6 * step
        behind[argument] = tensors[argument] - 1e-6 * step
        slope = (value(*ahead) - value(*behind)) / 2e-6
        found = (grad_ * step).sum((1, 2, 3))
        torch.testing.assert_close(found, slope, atol=1e-7, rtol=1e-6)


def second(query, *rest):
    attended = lambda x: scaled_dot_product_attention(x, *rest).sin().sum()  # noqa: E731
    return grad(attended)(query)


WAY_OUT = r"inside torch.nn.attention.sdpa_ker"
GIVEN = inputs(3, 2, 5, 4)
DERIVED = [
    lambda q, k, v: grad(lambda x: second(x, k, v).sin().sum())(q),
    vmap(jacrev(second)),
    lambda q, k, v: vmap(second)(q.requires_grad_(), k, v).sum().backward(),
    jacfwd(second),
    lambda q, k, v: jvp(lambda x: scaled_dot_product_attention(x, k, v), (q,), (q,)),
]
SHAPES = [
    [(3, 5, 4), (3, 6, 4), (3, 6, 4), (3, 2, 5, 6)],  # a mask with too many axes
    [(3, 2, 5, 4), (3, 2, 6, 4), (3, 2, 6, 4), (3, 7, 2, 5, 6)],
    [(3, 2, 5, 4), (3, 4, 6, 4), (3, 4, 6, 4)],  # heads that do not broadcast
    [(3, 2, 5, 4), (3, 2, 6, 3), (3, 2, 6, 4)],  # features that differ
    [(3, 5, 4), (3, 6, 4), (3, 5, 4)],  # fewer values than keys
]
FEWER = "as many values as keys"
HEADS = [normal(3, heads, 5, 4) for heads in (1, 2, 2)]
REFUSED = [
    ([*GIVEN, normal(3, 5, 6)], {"is_causal": True}, "two, got both"),
    ([*GIVEN[:2], normal(3, 2, 5, 4)], {}, FEWER),
    (HEADS, {"enable_gqa": True}, "heads in key and value must divide"),
    ([x.long() for x in GIVEN], {}, "scalar type"),
    *[([normal(*shape) for shape in shapes], {}, None) for shapes in SHAPES],
]


@pytest.mark.parametrize("derive", DERIVED)
def test_other_derivatives_are_refused_with_the_way_out(derive):
    with pytest.raises(NotImplementedError, match=WAY_OUT):
        derive(*inputs(3, 2, 5, 4))


@pytest.mark.parametrize(("tensors", "options", "message"), REFUSED)
def test_refusals_of_torch(tensors, options, message):
    if message != FEWER:  # beyond whose end torch 2.15 reads
        with pytest.raises(RuntimeError):
            F.scaled_dot_product_attention(*(x[0] for x in tensors), **options)
    with pytest.raises(RuntimeError, match=message):
        vmap(lambda *x: scaled_dot_product_attention(*x, **options))(*tensors)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.bfloat16, 5e-2), (torch.float32, 2e-5)]
)
@pytest.mark.parametrize("kind", ["none", "causal", "bool", "float"])
def test_low_precision_agrees_with_a_loop_in_high_precision(device, dtype, bound, kind):
    own = {"device": device, "dtype": dtype}
    tensors = inputs(3, 2, 40, 16, keys=40, **own)
    if kind in ("bool", "float"):
        mask = normal(3, 40, 40, **own)
        tensors.append(mask > 0 if kind == "bool" else mask)
    options = {"is_causal": kind == "causal"}
    cotangents = normal(3, 2, 40, 16, seed=5, **own)
    double = [x.double() if x.is_floating_point() else x for x in tensors]
    expected = loop(double, (0,) * len(tensors), cotangents.double(), **options)
    found = mapped(tensors, (0,) * len(tensors), cotangents, **options)
    assert {x.dtype for x in (found[0], *found[1])} == {dtype}
    close = {"atol": bound, "rtol": bound, "check_dtype": False}
    torch.testing.assert_close(found, expected, **close)
