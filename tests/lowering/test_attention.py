"""Attention under transforms: the same numbers as torch, sample by sample."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.examples import examples
from vgrad.lowering import fold, scaled_dot_product_attention

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.cuda,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        ],
    ),
]


def normal(*shape, seed=0, dtype=torch.float64, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=dtype).to(device)


def inputs(*shape, keys=6, device="cpu", dtype=torch.float64):
    """Make a query of `shape` and keys and values with `keys` positions."""
    *lead, _, features = shape
    rows = [shape, (*lead, keys, features), (*lead, keys, features)]
    return [
        normal(*row, seed=seed, device=device, dtype=dtype)
        for seed, row in enumerate(rows)
    ]


def one(tensors, in_dims, sample):
    """Select one sample from tensors of which some have an axis of samples."""
    return [
        x if dim is None else x.select(dim, sample)
        for x, dim in zip(tensors, in_dims, strict=True)
    ]


def loop(tensors, in_dims, cotangents, **options):
    """Attend sample by sample: outputs and the gradients of all float inputs."""
    outs, grads = [], []
    for sample, cotangent in enumerate(cotangents):
        leaves = [x.detach().clone() for x in one(tensors, in_dims, sample)]
        floats = [x.requires_grad_() for x in leaves if x.is_floating_point()]
        out = F.scaled_dot_product_attention(*leaves, **options)
        outs.append(out.detach())
        grads.append(torch.autograd.grad(out, floats, cotangent))
    return torch.stack(outs), [torch.stack(x) for x in zip(*grads, strict=True)]


def vjp_of(options, floats):
    """Return a function of one cotangent and inputs: output and gradients."""

    def pulled(cotangent, *tensors):
        def attend(*chosen):
            return scaled_dot_product_attention(*chosen, *tensors[floats:], **options)

        out, pull = vjp(attend, *tensors[:floats])
        return out, pull(cotangent)

    return pulled


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


@given(problems(), st.sampled_from([torch.float64, torch.float32]))
@examples(100)
def test_outputs_and_gradients_equal_those_of_a_loop(problem, dtype):
    size, tensors, in_dims, options = problem
    tensors = [x.to(dtype) if x.is_floating_point() else x for x in tensors]
    floats = sum(x.is_floating_point() for x in tensors)
    shape = F.scaled_dot_product_attention(*one(tensors, in_dims, 0), **options).shape
    cotangents = normal(size, *shape, dtype=dtype)
    out, grads = loop(tensors, in_dims, cotangents, **options)
    bounds = {torch.float64: (1e-10, 1e-10), torch.float32: (1e-4, 1e-4)}[dtype]

    def same(actual, expected):
        close = {"atol": bounds[0], "rtol": bounds[1]}
        torch.testing.assert_close(actual, expected, **close)

    # Each sample with its gradients.
    pulled = vjp_of(options, floats)
    own_out, own_grads = vmap(pulled, in_dims=(0, *in_dims))(cotangents, *tensors)
    same(own_out, out)
    same(list(own_grads), grads)

    # All samples as one function: what samples share receives the sum.
    def together(*chosen):
        def attend(*sample):
            return scaled_dot_product_attention(*sample, **options)

        return vmap(attend, in_dims=tuple(in_dims))(*chosen, *tensors[floats:])

    summed = [
        x.sum(0) if dim is None else x.movedim(0, dim)
        for x, dim in zip(grads, in_dims, strict=False)
    ]
    all_out, pull = vjp(together, *tensors[:floats])
    same(all_out, out)
    same(list(pull(cotangents)), summed)
    leaves = [x.clone().requires_grad_() for x in tensors[:floats]]
    found = torch.autograd.grad(together(*leaves), leaves, cotangents)
    same(list(found), summed)


@pytest.mark.parametrize("in_dims", [(0, 1, 0), (0, None, 0), (None, 0, 1)])
def test_gradients_of_nested_vmaps_equal_those_of_a_loop(in_dims):
    outer = [(0, None, 0, 0), (None, 0, 1, 0), (0, 0, 0, 0)]
    for dims in outer:
        tensors, shapes = [], [(2, 5, 4), (2, 6, 4), (2, 6, 4), (5, 6)]
        for seed, (shape, a, b) in enumerate(
            zip(shapes, (*in_dims, 0), dims, strict=True)
        ):
            shape = list(shape)
            if a is not None:
                shape.insert(a, 3)
            if b is not None:
                shape.insert(b, 2)
            tensors.append(normal(*shape, seed=seed))
        cotangents = normal(2, 3, 2, 5, 4, seed=9)
        inner = vmap(vjp_of({}, 4), in_dims=(0, *in_dims, 0))
        out, grads = vmap(inner, in_dims=(0, *dims))(cotangents, *tensors)
        for sample in range(2):
            expected = loop(
                one(tensors, dims, sample), (*in_dims, 0), cotangents[sample]
            )
            torch.testing.assert_close(out[sample], expected[0])
            torch.testing.assert_close([x[sample] for x in grads], expected[1])


@pytest.mark.parametrize("argument", range(4))
def test_jacobian_equals_that_of_a_loop(argument):
    tensors = [*inputs(2, 5, 3), normal(5, 6)]

    def jacobian(attend):
        def chosen(x):
            return attend(*tensors[:argument], x, *tensors[argument + 1 :])

        return chosen

    expected = torch.autograd.functional.jacobian(
        jacobian(F.scaled_dot_product_attention), tensors[argument]
    )
    actual = jacrev(jacobian(scaled_dot_product_attention))(tensors[argument])
    torch.testing.assert_close(actual, expected)


def test_what_no_sample_varies_is_attended_once_for_all():
    query, key, value = inputs(2, 5, 4)
    out = vmap(lambda x: scaled_dot_product_attention(query, key, value) + x)(
        torch.zeros(3, dtype=torch.float64)
    )
    expected = F.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(out, expected.expand(3, 2, 5, 4))


def test_forward_and_backward_call_no_kernel_per_sample():
    tensors = inputs(7, 1, 2, 5, 4)

    def total(attend):
        return grad(lambda *x: attend(*x).sum(), argnums=(0, 1, 2))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vmap(total(scaled_dot_product_attention))(*tensors)
    with pytest.warns(UserWarning, match="batching rule"):  # what this module is for
        vmap(total(F.scaled_dot_product_attention))(*tensors)


def kernels(function, *tensors):
    """List the attention kernels that a call runs."""
    with torch.profiler.profile() as profile:
        function(*tensors)
    return [
        event.name
        for event in profile.events()
        if event.name.startswith("aten::_scaled_dot_product")
    ]


@pytest.mark.parametrize("shape", [(7, 5, 4), (7, 2, 5, 4), (7, 3, 2, 5, 4)])
def test_all_samples_share_one_fused_kernel(shape):
    called = kernels(vmap(scaled_dot_product_attention), *inputs(*shape))
    assert called == ["aten::_scaled_dot_product_flash_attention_for_cpu"]


def test_fold_copies_neither_contiguous_inputs_nor_shared_ones():
    query, key, value = inputs(7, 2, 5, 4)
    mask = normal(5, 6)
    *folded, unfold = fold((0, None, 0, None), 7, query, key[0], value, mask)
    shapes = [(7, 2, 5, 4), (7, 2, 6, 4), (7, 2, 6, 4), (1, 1, 5, 6)]
    assert [tuple(x.shape) for x in folded] == shapes
    for given_, own in zip((query, key, value, mask), folded, strict=True):
        assert given_.data_ptr() == own.data_ptr()
    out = unfold(F.scaled_dot_product_attention(*folded))
    expected, _ = loop(
        (query, key[0], value, mask),
        (0, None, 0, None),
        torch.ones(7, 2, 5, 4, dtype=torch.float64),
    )
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("shape", [(7, 5, 4), (7, 2, 5, 4), (7, 3, 2, 2, 5, 4)])
def test_unfold_restores_the_axes_of_a_sample(shape):
    *folded, unfold = fold((0, 0, 0, None), 7, *inputs(*shape))
    assert folded[0].dim() == 4
    expected = F.scaled_dot_product_attention(*inputs(*shape))
    torch.testing.assert_close(
        unfold(F.scaled_dot_product_attention(*folded)), expected
    )


@pytest.mark.parametrize("float_mask", [False, True])
def test_rows_masked_altogether_give_what_torch_gives(float_mask):
    tensors = inputs(3, 2, 5, 4)
    mask = normal(3, 5, 6) > 0
    mask[1] = False
    if float_mask:
        mask = torch.zeros(3, 5, 6, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    cotangents = normal(3, 2, 5, 4, seed=8)
    tensors.append(mask)
    out, grads = loop(tensors, (0,) * 4, cotangents)
    assert not out[1].any()
    own_out, own_grads = vmap(vjp_of({}, len(grads)))(cotangents, *tensors)
    torch.testing.assert_close(own_out, out)
    torch.testing.assert_close(list(own_grads), grads)


@pytest.mark.parametrize("batch", [0, 3])
@pytest.mark.parametrize(("heads", "length", "keys"), [(2, 0, 6), (2, 5, 0), (0, 5, 6)])
def test_empty_axes_give_empty_or_zero_results(batch, heads, length, keys):
    tensors = [
        *inputs(batch, heads, length, 4, keys=keys),
        normal(batch, length, keys),
    ]
    cotangents = normal(batch, heads, length, 4)
    out, grads = vmap(vjp_of({}, 4))(cotangents, *tensors)
    assert out.shape == (batch, heads, length, 4)
    assert not out.any()
    assert [x.shape for x in grads] == [x.shape for x in tensors]
    assert not any(x.any() for x in grads)


def test_a_batch_of_no_samples_has_no_gradients():
    tensors = inputs(0, 2, 5, 4)
    out, grads = vmap(vjp_of({}, 3))(normal(0, 2, 5, 4), *tensors)
    assert [x.shape for x in (out, *grads)] == [
        (0, 2, 5, 4),
        *(x.shape for x in tensors),
    ]


def test_shapes_alone_need_no_device():
    tensors = [x.to("meta") for x in inputs(3, 2, 5, 4)]
    out, grads = vmap(vjp_of({}, 3))(tensors[0], *tensors)
    assert out.shape == (3, 2, 5, 4)
    assert [x.shape for x in grads] == [x.shape for x in tensors]


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("mask", [False, True])
def test_autocast_gives_the_dtypes_and_numbers_of_torch(inside, mask):
    tensors = inputs(3, 2, 5, 4, dtype=torch.float32)
    if mask:
        tensors.append(normal(3, 5, 6, dtype=torch.float32))
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
    for sample in range(3):
        leaves = [x[sample].unsqueeze(0).requires_grad_() for x in tensors]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected = F.scaled_dot_product_attention(*leaves)
        torch.testing.assert_close(out[sample], expected[0])
        wanted = torch.autograd.grad(expected, leaves, cotangents[sample][None])
        wanted = [x[0] for x in wanted]
        close = {"atol": 2e-2, "rtol": 2e-2}
        torch.testing.assert_close([x[sample] for x in own], wanted, **close)
        torch.testing.assert_close([x[sample] for x in per_sample], wanted, **close)


def test_backward_in_autocast_keeps_full_precision_of_the_forward_pass():
    tensors = inputs(3, 2, 5, 4, dtype=torch.float32)
    cotangents = normal(3, 2, 5, 4, dtype=torch.float32)
    _, expected = loop(tensors, (0, 0, 0), cotangents)

    def pulled(cotangent, *x):
        _, pull = vjp(scaled_dot_product_attention, *x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return pull(cotangent)

    torch.testing.assert_close(list(vmap(pulled)(cotangents, *tensors)), expected)


def masks(randomness, samples=4, p=0.25):
    """Read the dropped weights off the attention to the unit vectors."""
    query, key, _ = inputs(2, 5, 3)
    value = torch.eye(6, dtype=torch.float64).expand(2, 6, 6)
    plain = F.scaled_dot_product_attention(query, key, value)

    def dropped(query):
        return scaled_dot_product_attention(query, key, value, dropout_p=p)

    torch.manual_seed(0)
    out = vmap(dropped, randomness=randomness)(query.expand(samples, 2, 5, 3))
    return out / plain


def test_dropout_zeroes_weights_and_scales_the_others():
    kept = masks("different", samples=50)
    values = torch.tensor([0.0, 1 / 0.75], dtype=torch.float64)
    distance = (kept[..., None] - values).abs().amin(-1)
    assert distance.max() < 1e-12
    assert (kept == 0).double().mean() == pytest.approx(0.25, abs=0.04)  # 5 sigma


def test_dropout_draws_one_mask_per_sample_or_one_for_all_as_vmap_says():
    same, different = masks("same"), masks("different")
    assert torch.equal(same, same[:1].expand_as(same))
    assert same.unique().numel() > 1
    for sample in range(1, 4):
        assert not torch.equal(different[0], different[sample])


def test_dropout_in_autocast_has_the_dtype_of_autocast():
    tensors = inputs(3, 2, 5, 4, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = vmap(
            lambda *x: scaled_dot_product_attention(*x, dropout_p=0.5),
            randomness="different",
        )(*tensors)
    assert out.dtype == torch.bfloat16


def test_dropout_refuses_a_vmap_that_forbids_randomness():
    attend = vmap(lambda *x: scaled_dot_product_attention(*x, dropout_p=0.5))
    with pytest.raises(RuntimeError, match="randomness error mode"):
        attend(*inputs(3, 2, 5, 4))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("randomness", ["same", "different"])
def test_gradients_see_the_dropout_of_the_forward_pass(device, randomness):
    tensors = inputs(3, 2, 5, 4, device=device)
    steps = [x.flip(0) for x in tensors]
    cotangents = normal(3, 2, 5, 4, seed=7, device=device)

    def attend(*x):
        return scaled_dot_product_attention(*x, dropout_p=0.5)

    def pulled(cotangent, *x):
        out, pull = vjp(attend, *x)
        return out, pull(cotangent)

    torch.manual_seed(1)
    out, grads = vmap(pulled, randomness=randomness)(cotangents, *tensors)

    def value(*x):
        torch.manual_seed(1)
        return (vmap(attend, randomness=randomness)(*x) * cotangents).sum((1, 2, 3))

    # The output is linear in the values, so that gradient times value is the output.
    linear = (grads[2] * tensors[2]).sum((1, 2, 3))
    torch.testing.assert_close(linear, (out * cotangents).sum((1, 2, 3)))
    for argument in range(3):
        shifted = []
        for sign in (1e-6, -1e-6):
            moved = list(tensors)
            moved[argument] = tensors[argument] + sign * steps[argument]
            shifted.append(value(*moved))
        slope = (grads[argument] * steps[argument]).sum((1, 2, 3))
        torch.testing.assert_close(
            slope, (shifted[0] - shifted[1]) / 2e-6, atol=1e-7, rtol=1e-6
        )


def second(query, key, value):
    return grad(lambda x: scaled_dot_product_attention(x, key, value).sin().sum())(
        query
    )


@pytest.mark.parametrize(
    "derive",
    [
        lambda q, k, v: grad(lambda x: second(x, k, v).sin().sum())(q),
        lambda q, k, v: vmap(jacrev(second))(q, k, v),
        lambda q, k, v: vmap(second)(q.requires_grad_(), k, v).sum().backward(),
        lambda q, k, v: jacfwd(second)(q, k, v),
        lambda q, k, v: jvp(
            lambda x: scaled_dot_product_attention(x, k, v), (q,), (q,)
        ),
    ],
)
def test_other_derivatives_are_refused_with_the_way_out(derive):
    with pytest.raises(
        NotImplementedError, match=r"inside torch.nn.attention.sdpa_ker"
    ):
        derive(*inputs(3, 2, 5, 4))


def test_outside_of_transforms_it_is_torchs_function():
    query, key, value = (x.requires_grad_() for x in inputs(3, 2, 5, 4))
    out = scaled_dot_product_attention(query, key, value)
    expected = F.scaled_dot_product_attention(query, key, value)
    assert torch.equal(out, expected)
    assert out.grad_fn.name() == expected.grad_fn.name()
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.autograd.gradgradcheck(
            scaled_dot_product_attention, (query, key, value)
        )


def test_a_mask_and_is_causal_exclude_each_other():
    attend = vmap(lambda *x: scaled_dot_product_attention(*x, is_causal=True))
    with pytest.raises(RuntimeError, match="expected one of the two, got both"):
        attend(*inputs(3, 2, 5, 4), normal(3, 5, 6))


@pytest.mark.parametrize(
    "shapes",
    [
        [(3, 5, 4), (3, 6, 4), (3, 6, 4), (3, 2, 5, 6)],  # a mask with too many axes
        [(3, 2, 5, 4), (3, 2, 6, 4), (3, 2, 6, 4), (3, 7, 2, 5, 6)],
        [(3, 2, 5, 4), (3, 4, 6, 4), (3, 4, 6, 4)],  # heads that do not broadcast
        [(3, 2, 5, 4), (3, 2, 6, 3), (3, 2, 6, 4)],  # features that differ
        [(3, 5, 4), (3, 6, 4), (3, 5, 4)],  # fewer values than keys
    ],
)
def test_shapes_that_torch_refuses_are_refused(shapes):
    tensors = [normal(*shape) for shape in shapes]
    with pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(*(x[0] for x in tensors))
    with pytest.raises(RuntimeError):
        vmap(scaled_dot_product_attention)(*tensors)


def test_keys_without_values_are_refused():
    with pytest.raises(RuntimeError, match="expected as many values as keys"):
        vmap(scaled_dot_product_attention)(*inputs(3, 2, 5, 4)[:2], normal(3, 2, 5, 4))


def test_groups_of_heads_that_do_not_divide_are_refused():
    tensors = [normal(3, heads, 5, 4) for heads in (1, 2, 2)]
    attend = vmap(lambda *x: scaled_dot_product_attention(*x, enable_gqa=True))
    with pytest.raises(RuntimeError, match="heads in key and value must divide"):
        attend(*tensors)


def test_integers_are_refused_as_torch_refuses_them():
    tensors = [x.long() for x in inputs(3, 2, 5, 4)]
    with pytest.raises(RuntimeError, match="scalar type"):
        vmap(scaled_dot_product_attention)(*tensors)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["none", "causal", "bool", "float"])
def test_low_precision_agrees_with_a_loop_in_high_precision(device, dtype, kind):
    tensors = inputs(3, 2, 40, 16, keys=40, device=device, dtype=dtype)
    if kind in ("bool", "float"):
        mask = normal(3, 40, 40, device=device, dtype=dtype)
        tensors.append(mask > 0 if kind == "bool" else mask)
    options = {"is_causal": kind == "causal"}
    cotangents = normal(3, 2, 40, 16, seed=5, device=device, dtype=dtype)
    double = [x.double() if x.is_floating_point() else x for x in tensors]
    out, grads = loop(double, (0,) * len(tensors), cotangents.double(), **options)
    own_out, own_grads = vmap(vjp_of(options, len(grads)))(cotangents, *tensors)
    close = (
        {"atol": 2e-5, "rtol": 2e-5}
        if dtype == torch.float32
        else {"atol": 5e-2, "rtol": 5e-2}
    )
    assert {x.dtype for x in (own_out, *own_grads)} == {dtype}
    torch.testing.assert_close(own_out.double(), out, **close)
    torch.testing.assert_close([x.double() for x in own_grads], grads, **close)
