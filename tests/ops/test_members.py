"""Ops of all members at once: the numbers of torch's ops, one member at a time."""

from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from tests import oracle
from tests.examples import examples
from tests.losses import randn
from vgrad.loss import grad_flags, mode
from vgrad.ops import OPS
from vgrad.torch_private import modes

E = 3
CONVOLUTIONS = [F.conv1d, F.conv2d, F.conv3d]
LINEAR, CONV1D = ((5, 4), (2, 4), (2,)), ((2, 4, 5), (3, 4, 3), (3,))
by_choice = pytest.mark.parametrize("chosen", [True, False])
by_space = pytest.mark.parametrize("space", [1, 2, 3])
close = partial(oracle.assert_exact, tolerance=1e-12)


def mapped(function, dims, *tensors, told=None, chosen=True):
    """Run under a vmap over members."""

    def one(*tensors):
        level = grad_flags.VmapLevel(modes.current_level(), "member", "a loop")
        handlers = mode.of_members(told, chosen=chosen)
        with mode.LossMode(handlers=handlers, vmap=level):
            return function(*tensors)

    return torch.vmap(one, in_dims=dims)(*tensors)


def looped(function, dims, *tensors):
    """Run the op itself for one member after the other."""
    pairs = list(zip(tensors, dims, strict=True))
    size = next(t.shape[dim] for t, dim in pairs if dim is not None)
    rows = [[t if d is None else t.select(d, i) for t, d in pairs] for i in range(size)]
    return torch.stack([function(*row) for row in rows])


def random(*shape, seed=0):
    return randn(*shape, seed=seed + sum(shape) + 31 * len(shape))


def own(*shapes, dims=(0, 0, 0)):
    """Make tensors, with an axis of members where `dims` has one."""
    pairs = zip(shapes, dims, strict=False)
    return [random(*([] if dim is None else [E]), *shape) for shape, dim in pairs]


def check(function, dims, *tensors, chosen=True):
    """Values and gradients of everything are those of the loop."""
    leaves = [each.clone().requires_grad_() for each in tensors]
    found = mapped(function, dims, *leaves, chosen=chosen)
    expected = looped(function, dims, *leaves)
    close(found, expected)
    seed = random(*expected.shape, seed=7)
    grads = (torch.autograd.grad((y * seed).sum(), leaves) for y in (found, expected))
    close(*grads, tolerance=1e-11)


def forms(function, dims, *tensors, **options):
    told = []
    told_by = lambda *each: told.append(each)  # noqa: E731
    mapped(function, dims, *tensors, told=told_by, **options)
    return told


SHARED = st.sampled_from(
    [d for n in (3, 2) for d in product((0, None), repeat=n) if 0 in d]
)


@given(
    members=st.integers(1, 4),
    rows=st.lists(st.integers(0, 3), max_size=3),
    width=st.integers(0, 3),
    outputs=st.integers(0, 3),
    shared=SHARED,
    last=st.booleans(),
    chosen=st.booleans(),
)
@examples(100)
def test_linear_takes_all_shapes(members, rows, width, outputs, shared, last, chosen):
    shapes = (*rows, width), (outputs, width), (outputs,)
    dims = tuple(None if dim is None else -1 if last else 0 for dim in shared)
    tensors = [
        random(*shape) if dim is None else random(members, *shape).movedim(0, dim)
        for shape, dim in zip(shapes, dims, strict=False)
    ]
    check(F.linear, dims, *tensors, chosen=chosen)


def test_a_bias_of_one_number_is_added_everywhere():
    """One number a member must not become one number a row."""
    x, weight, bias = random(E, E, 4), random(E, 2, 4), random(E)
    check(F.linear, (0, 0, 0), x, weight, bias)
    check(F.linear, (0, 0, 0), x, weight, bias.unsqueeze(1))


@by_space
@by_choice
def test_convolutions_equal_the_loop_whatever_members_share(space, chosen):
    plain = CONVOLUTIONS[space - 1]
    grouped = lambda x, weight, bias: plain(x, weight, bias, 1, 1, 1, 2)  # noqa: E731
    shapes = (2, 4, *[4] * space), (6, 2, *[3] * space), (6,)
    shared = (0, 0, 0), (None, 0, 0), (0, None, None), (0, 0, None), (0, None, 0)
    for dims in shared:
        check(grouped, dims, *own(*shapes, dims=dims), chosen=chosen)
    single = (2, *[4] * space), (3, 2, *[3] * space), (3,)  # without a batch dimension
    for dims in shared[:2]:
        check(plain, dims, *own(*single, dims=dims), chosen=chosen)


sizes = lambda low, high: st.tuples(*[st.integers(low, high)] * 3)  # noqa: E731


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@given(
    members=st.integers(1, 3),
    batch=st.integers(1, 3),
    groups=st.integers(1, 2),
    space=st.integers(1, 3),
    kernel=sizes(1, 3),
    stride=sizes(1, 3),
    padding=st.one_of(sizes(0, 2), st.sampled_from(["same", "valid"])),
    dilation=st.integers(1, 2),
    dim=st.integers(0, 2),
    biased=st.booleans(),
)
@examples(60)
def test_convolutions_take_all_sizes(
    members, batch, groups, space, kernel, stride, padding, dilation, dim, biased
):
    x = random(members, batch, 2 * groups, 5, 6, 5)[..., *[0] * (3 - space)]
    weight = random(members, 3 * groups, 2, *kernel[:space])
    bias = [random(members, 3 * groups)] * biased
    options = {"dilation": dilation, "groups": groups}
    options["padding"] = padding if isinstance(padding, str) else padding[:space]
    options["stride"] = 1 if padding == "same" else stride[:space]
    convolve = partial(CONVOLUTIONS[space - 1], **options)
    tensors = x.movedim(0, dim), weight.movedim(0, dim), *bias
    check(convolve, (dim, dim, 0)[: len(tensors)], *tensors)


@by_choice
def test_samples_mapped_inside_of_members_are_right(chosen):
    def each(x, weight, bias):
        return torch.vmap(lambda row: F.linear(row, weight, bias))(x)

    for dims in ((0, 0, 0), (None, 0, 0)):
        check(each, dims, *own(*LINEAR, dims=dims), chosen=chosen)

    def convolved(x, kernel):
        run = lambda one: F.conv1d(one, kernel, padding="same", groups=2)  # noqa: E731
        return torch.vmap(run)(x)

    check(convolved, (0, 0), *own((5, 4, 6), (6, 2, 3)), chosen=chosen)


# Derivatives.


# Forms.


@pytest.mark.parametrize(
    ("plain", "dims", "name"),
    [
        (F.linear, (0, 0, 0), "baddbmm"),
        (F.linear, (0, 0), "torch"),
        (F.linear, (0, None, None), "torch"),
        (F.conv1d, (0, 0), "one call a member"),
        (F.conv1d, (None, 0), "one convolution with the channels of all members"),
        (F.conv1d, (0, None), "one convolution of all members' batches"),
    ],
)
def test_the_form_that_ran_is_told(plain, dims, name):
    shapes = LINEAR if plain is F.linear else CONV1D
    tensors = own(*shapes, dims=dims)
    assert forms(plain, dims, *tensors) == [(plain.__name__, name)]
    assert forms(plain, dims, *tensors, chosen=False) == []
    known = {op for op, record in OPS.items() if record.per_member}
    assert known == {F.linear, *CONVOLUTIONS}


@by_choice
def test_padding_of_an_embedding_holds_for_every_member(chosen):
    """Torch's own rule pads in the table of the first member only."""
    made = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, (E, 4, 6), generator=made)
    leaf = random(E, 5, 3).requires_grad_()

    def gradient(run, **options):
        look_up = lambda t, i: F.embedding(i, t, padding_idx=1).pow(2)  # noqa: E731
        found = run(look_up, (0, 0), leaf, tokens, **options)
        return torch.autograd.grad(found.sum(), leaf)[0]

    grad = gradient(mapped, chosen=chosen)
    close(grad, gradient(looped))
    assert not grad[:, 1].any()


@by_choice
@pytest.mark.parametrize("table", [0, None])
def test_lookups_of_one_member_are_not_counted_for_another(table, chosen):
    def scaled(table, tokens, weights):
        rows = F.embedding(tokens, table, scale_grad_by_freq=True)
        return rows.pow(2) * weights

    tokens = torch.tensor([[0, 1, 1, 3], [3, 3, 3, 1], [2, 0, 1, 3]])[:E]
    table_and_weights = own((5, 3), (4, 1), dims=(table, 0))

    def gradient(run, **options):
        leaves = [each.clone().requires_grad_() for each in table_and_weights]
        found = run(scaled, (table, 0, 0), leaves[0], tokens, leaves[1], **options)
        return torch.autograd.grad(found.sum(), leaves)

    close(gradient(mapped, chosen=chosen), gradient(looped))


@by_choice
def test_ops_inside_of_torchs_python_functions_have_their_forms_too(chosen):
    """Multi-head attention is Python, and calls an attention that vmap loops over."""
    layers = [nn.MultiheadAttention(4, 2, dtype=torch.float64) for _ in range(E)]
    params, _ = torch.func.stack_module_state(layers)
    x, told = random(5, 2, 4), []

    def attend(params):
        return torch.func.functional_call(layers[0], params, (x, x, x))[0]

    options = {"told": lambda *each: told.append(each), "chosen": chosen}
    found = mapped(attend, (0,), params, **options)
    expected = torch.stack([layer(x, x, x)[0] for layer in layers])
    close(found, expected, tolerance=1e-11)
    assert [op for op, _ in told] == (["linear", "linear"] if chosen else [])
