"""Ops of all members at once: the numbers of torch's ops, one member at a time."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._C._functorch import current_level
from torch.autograd import forward_ad
from torch.nn import functional as F

from tests.examples import examples
from vgrad.lowering import FORMS, Members, Truth

E = 3
CONVOLUTIONS = [F.conv1d, F.conv2d, F.conv3d]


def mapped(function, dims, *tensors, told=None, chosen=True):
    """Run under a vmap over members."""

    def one(*tensors):
        truth = Truth(current_level(), "member", "a loop")
        with Members(told, truth=truth, chosen=chosen):
            return function(*tensors)

    return torch.vmap(one, in_dims=dims)(*tensors)


def looped(function, dims, *tensors):
    """Run the op itself for one member after the other."""
    size = next(
        t.shape[dim] for t, dim in zip(tensors, dims, strict=True) if dim is not None
    )
    rows = [
        [t if dim is None else t.select(dim, i) for t, dim in zip(tensors, dims)]  # noqa: B905
        for i in range(size)
    ]
    return torch.stack([function(*row) for row in rows])


def random(*shape, seed=0):
    made = torch.Generator().manual_seed(seed + sum(shape) + 31 * len(shape))
    return torch.randn(shape, dtype=torch.float64, generator=made)


def check(function, dims, *tensors, chosen=True):
    """Values and gradients of everything are those of the loop."""
    leaves = [each.clone().requires_grad_() for each in tensors]
    found = mapped(function, dims, *leaves, chosen=chosen)
    expected = looped(function, dims, *leaves)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weights = random(*expected.shape, seed=7)
    grads = torch.autograd.grad((found * weights).sum(), leaves)
    for grad, wanted in zip(
        grads, torch.autograd.grad((expected * weights).sum(), leaves), strict=True
    ):
        torch.testing.assert_close(grad, wanted, rtol=1e-11, atol=1e-11)


def form(function, dims, *tensors):
    told = []
    mapped(function, dims, *tensors, told=lambda *each: told.append(each))
    return told


@pytest.mark.parametrize("bias", ["own", "shared", "none"])
@pytest.mark.parametrize("weight", ["own", "shared"])
@pytest.mark.parametrize("input", ["own", "shared"])
@pytest.mark.parametrize("chosen", [True, False])
def test_linear_equals_the_loop_whatever_members_share(input, weight, bias, chosen):
    kinds = [input, weight] + [bias] * (bias != "none")
    if "own" not in kinds:
        return  # nothing to map over
    shapes = [(5, 4), (2, 4), (2,)][: len(kinds)]
    dims = tuple(0 if kind == "own" else None for kind in kinds)
    tensors = [
        random(*([E] if kind == "own" else []), *shape)
        for kind, shape in zip(kinds, shapes, strict=True)
    ]
    check(F.linear, dims, *tensors, chosen=chosen)


@given(
    members=st.integers(1, 4),
    rows=st.lists(st.integers(0, 3), max_size=3),
    width=st.integers(0, 3),
    outputs=st.integers(0, 3),
    shared=st.booleans(),
    dim=st.integers(0, 1),
)
@examples(60)
def test_linear_takes_all_shapes(members, rows, width, outputs, shared, dim):
    x = random(*rows, width) if shared else random(members, *rows, width)
    weight = random(members, outputs, width).movedim(0, dim)
    dims = (None if shared else 0, dim, -1)
    bias = random(members, outputs).mT
    found = mapped(F.linear, dims, x, weight, bias)
    expected = looped(F.linear, dims, x, weight, bias)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_bias_of_one_number_is_added_everywhere():
    """One number a member must not become one number a row."""
    x, weight, bias = random(E, E, 4), random(E, 2, 4), random(E)
    check(F.linear, (0, 0, 0), x, weight, bias)
    check(F.linear, (0, 0, 0), x, weight, bias.unsqueeze(1))


def test_arguments_may_have_names():
    tensors = random(E, 5, 4), random(E, 2, 4), random(E, 2)

    def named(x, weight, bias):
        return F.linear(input=x, bias=bias, weight=weight)

    check(named, (0, 0, 0), *tensors)
    assert form(named, (0, 0, 0), *tensors) == [("linear", "baddbmm")]


OPTIONS = {
    "plain": {},
    "strided": {"stride": 2},
    "padded": {"padding": 1},
    "dilated": {"dilation": 2},
    "same": {"padding": "same"},
    "same, even and dilated": {"padding": "same", "dilation": 2},
    "valid": {"padding": "valid"},
    "groups": {"groups": 2},
    "all": {"stride": 2, "padding": 2, "dilation": 2, "groups": 2},
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("plain", CONVOLUTIONS, ids=lambda each: each.__name__)
def test_convolutions_take_every_option(plain, options):
    space = CONVOLUTIONS.index(plain) + 1
    groups = options.get("groups", 1)
    x = random(E, 2, 4, *[5] * space)
    weight = random(E, 6, 4 // groups, *[2] * space)
    bias = random(E, 6)

    def convolve(x, weight, bias=None):
        return plain(x, weight, bias, **options)

    check(convolve, (0, 0, 0), x, weight, bias)
    check(convolve, (0, 0), x, weight)


@pytest.mark.parametrize("plain", CONVOLUTIONS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("chosen", [True, False])
@pytest.mark.parametrize(
    "dims", [(0, 0, 0), (None, 0, 0), (0, None, None), (0, 0, None), (0, None, 0)]
)
def test_convolutions_equal_the_loop_whatever_members_share(plain, chosen, dims):
    space = CONVOLUTIONS.index(plain) + 1
    shapes = (2, 4, *[4] * space), (6, 2, *[3] * space), (6,)
    tensors = [
        random(*([] if dim is None else [E]), *shape)
        for dim, shape in zip(dims, shapes, strict=True)
    ]

    def convolve(x, weight, bias):
        return plain(x, weight, bias, 1, 1, 1, 2)

    check(convolve, dims, *tensors, chosen=chosen)


@pytest.mark.parametrize("plain", CONVOLUTIONS, ids=lambda each: each.__name__)
def test_convolutions_of_one_sample_have_no_batch_dimension(plain):
    space = CONVOLUTIONS.index(plain) + 1
    x, weight, bias = (
        random(E, 2, *[4] * space),
        random(E, 3, 2, *[3] * space),
        random(E, 3),
    )
    check(plain, (0, 0, 0), x, weight, bias)
    check(plain, (None, 0, 0), x[0], weight, bias)


@given(
    members=st.integers(1, 3),
    batch=st.integers(1, 3),
    groups=st.integers(1, 2),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    dilation=st.integers(1, 2),
    dim=st.integers(0, 3),
)
@examples(30)
def test_convolutions_take_all_sizes(
    members, batch, groups, kernel, stride, padding, dilation, dim
):
    x = random(members, batch, 2 * groups, 5, 6).movedim(0, dim)
    weight = random(members, 3 * groups, 2, *kernel).movedim(0, dim)
    check(
        lambda x, w: F.conv2d(x, w, None, stride, padding, dilation, groups),
        (dim, dim),
        x,
        weight,
    )


@pytest.mark.parametrize("chosen", [True, False])
def test_samples_mapped_inside_of_members_are_right(chosen):
    x, weight, bias = random(E, 5, 4), random(E, 2, 4), random(E, 2)

    def each(x, weight, bias):
        return torch.vmap(lambda row: F.linear(row, weight, bias))(x)

    check(each, (0, 0, 0), x, weight, bias, chosen=chosen)
    check(each, (None, 0, 0), x[0], weight, bias, chosen=chosen)
    image, kernel = random(E, 5, 4, 6), random(E, 6, 2, 3)

    def convolved(x, kernel):
        run = lambda one: F.conv1d(one, kernel, padding="same", groups=2)  # noqa: E731
        return torch.vmap(run)(x)

    check(convolved, (0, 0), image, kernel, chosen=chosen)


def test_ensembles_of_ensembles_are_right():
    x, weight, bias = random(2, E, 5, 4), random(2, E, 3, 4), random(2, E, 3)
    found = torch.vmap(lambda *each: mapped(F.linear, (0, 0, 0), *each))(
        x, weight, bias
    )
    expected = torch.einsum("aebi,aeoi->aebo", x, weight) + bias.unsqueeze(2)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    found = torch.vmap(
        lambda x, w: mapped(F.linear, (0, 0, 0), x, w, bias[0]), in_dims=(None, 0)
    )(x[0], weight)
    expected = torch.einsum("ebi,aeoi->aebo", x[0], weight) + bias[0].unsqueeze(1)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("argument", [0, 1, 2])
@pytest.mark.parametrize("plain", [F.linear, F.conv1d], ids=["linear", "conv1d"])
def test_a_member_may_differentiate_inside(plain, argument):
    """Gradient penalties differentiate by the input, learned optimizers by weights."""
    shapes = {F.linear: ((5, 4), (2, 4), (2,)), F.conv1d: ((2, 4, 5), (3, 4, 3), (3,))}
    tensors = [random(E, *shape) for shape in shapes[plain]]

    def penalty(*given):
        grad = torch.func.grad(
            lambda *each: plain(*each).pow(3).sum(), argnums=argument
        )(*given)
        return grad.square().sum()

    check(penalty, (0, 0, 0), *tensors)


@pytest.mark.parametrize("plain", [F.linear, F.conv1d], ids=["linear", "conv1d"])
def test_forward_mode_and_second_derivatives_around_are_right(plain):
    shapes = {F.linear: ((5, 4), (2, 4), (2,)), F.conv1d: ((2, 4, 5), (3, 4, 3), (3,))}
    x, weight, bias = (random(E, *shape) for shape in shapes[plain])
    direction = random(*weight.shape, seed=3)

    def by(run):
        return lambda w: run(plain, (0, 0, 0), x, w, bias).pow(3)

    _, found = torch.func.jvp(by(mapped), (weight,), (direction,))
    _, expected = torch.func.jvp(by(looped), (weight,), (direction,))
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)

    def product(run):
        inner = torch.func.grad(lambda w: by(run)(w).sum())
        return torch.func.grad(lambda w: (inner(w) * direction).sum())(weight)

    torch.testing.assert_close(product(mapped), product(looped), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("plain", [F.linear, F.conv1d], ids=["linear", "conv1d"])
def test_autograd_may_differentiate_twice_and_for_many_vectors_at_once(plain):
    shapes = {F.linear: ((5, 4), (2, 4), (2,)), F.conv1d: ((2, 4, 5), (3, 4, 3), (3,))}
    x, *others = (random(*shape) for shape in shapes[plain])
    tensors = [x, *(torch.stack([each, 2 * each, -each]) for each in others)]

    def derivatives(run):
        leaves = [each.clone().requires_grad_() for each in tensors]
        value = run(plain, (None, 0, 0), *leaves).pow(3)
        grads = torch.autograd.grad(value.sum(), leaves, create_graph=True)
        squares = sum((grad * grad).sum() for grad in grads)
        twice = torch.autograd.grad(squares, leaves, retain_graph=True)
        many = random(4, *value.shape)
        return *twice, *torch.autograd.grad(value, leaves, many, is_grads_batched=True)

    for found, expected in zip(derivatives(mapped), derivatives(looped), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_forward_mode_of_autograd_goes_through_a_linear_layer():
    x, weight, bias = random(5, 4), random(E, 2, 4), random(E, 2)
    direction = random(*weight.shape, seed=3)

    def tangent(run):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(weight.clone().requires_grad_(), direction)
            out = run(F.linear, (None, 0, 0), x, dual, bias)
            return forward_ad.unpack_dual(out).tangent

    torch.testing.assert_close(tangent(mapped), tangent(looped))


def test_what_is_told_is_the_form_that_ran():
    x, weight, bias = random(E, 5, 4), random(E, 2, 4), random(E, 2)
    assert form(F.linear, (0, 0, 0), x, weight, bias) == [("linear", "baddbmm")]
    assert form(F.linear, (0, 0), x, weight) == [("linear", "torch")]
    assert form(F.linear, (0, None, None), x, weight[0], bias[0]) == [
        ("linear", "torch")
    ]
    image, kernel = random(E, 2, 4, 5), random(E, 3, 4, 2)
    told = {
        (0, 0): "one call a member",
        (None, 0): "one convolution with the channels of all members",
        (0, None): "one convolution of all members' batches",
    }
    for dims, name in told.items():
        given = [
            t if dim == 0 else t[0]
            for t, dim in zip((image, kernel), dims, strict=True)
        ]
        assert form(F.conv1d, dims, *given) == [("conv1d", name)]
    assert set(FORMS) == {F.linear, *CONVOLUTIONS}


def test_without_a_choice_nothing_is_told():
    told = []
    mapped(
        F.linear,
        (0, 0, 0),
        random(E, 5, 4),
        random(E, 2, 4),
        random(E, 2),
        told=lambda *each: told.append(each),
        chosen=False,
    )
    assert told == []


@pytest.mark.parametrize("chosen", [True, False])
def test_padding_of_an_embedding_holds_for_every_member(chosen):
    """Torch's own rule pads in the table of the first member only."""
    table = random(E, 5, 3)
    made = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, (E, 4, 6), generator=made)

    def look_up(table, tokens):
        return F.embedding(tokens, table, padding_idx=1).pow(2)

    leaf = table.clone().requires_grad_()
    found = mapped(look_up, (0, 0), leaf, tokens, chosen=chosen)
    (grad,) = torch.autograd.grad(found.sum(), leaf)
    expected = looped(look_up, (0, 0), leaf, tokens)
    (wanted,) = torch.autograd.grad(expected.sum(), leaf)
    torch.testing.assert_close(grad, wanted, rtol=1e-12, atol=1e-12)
    assert not grad[:, 1].any()


@pytest.mark.parametrize("chosen", [True, False])
def test_ops_inside_of_torchs_python_functions_have_their_forms_too(chosen):
    """Multi-head attention is Python, and calls an attention that vmap loops over."""
    torch.manual_seed(0)
    layers = [nn.MultiheadAttention(4, 2, dtype=torch.float64) for _ in range(E)]
    params = {
        name: torch.stack([layer.get_parameter(name).detach() for layer in layers])
        for name, _ in layers[0].named_parameters()
    }
    x = random(5, 2, 4)

    def attend(params):
        return torch.func.functional_call(layers[0], params, (x, x, x))[0]

    told = []
    found = mapped(
        attend, (0,), params, told=lambda *each: told.append(each), chosen=chosen
    )
    expected = torch.stack([layer(x, x, x)[0] for layer in layers])
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    assert [op for op, _ in told] == (["linear", "linear"] if chosen else [])


def test_errors_of_an_op_are_torchs_own():
    x, weight, bias = random(E, 5, 4), random(E, 2, 3), random(E, 2)
    with pytest.raises(RuntimeError, match="size"):
        mapped(F.linear, (0, 0, 0), x, weight, bias)
    image, kernel = random(E, 2, 4, 5), random(E, 3, 3, 2)
    with pytest.raises(RuntimeError, match="expected input"):
        mapped(F.conv1d, (0, 0), image, kernel)
