"""Stacking and taking apart: exact values, and nothing global is touched."""

import copy
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests import losses
from tests.examples import examples
from tests.oracle import assert_exact
from vgrad import make_functional_with_buffers, stack
from vgrad.ensemble import group, member, member_seed, share, unstack


def mlp(width=4, p=0.1):
    return nn.Sequential(
        nn.Linear(3, width), nn.BatchNorm1d(width), nn.Dropout(p), nn.Linear(width, 2)
    )


def models(count=3, build=mlp):
    torch.manual_seed(0)
    return [build() for _ in range(count)]


def assert_same_state(a, b):
    a, b = a.state_dict(), b.state_dict()
    assert list(a) == list(b)
    assert_exact(a, b, 0)


class Tied(nn.Module):
    """Functorch's case: a parameter and a buffer, each under two names."""

    def __init__(self, tied=True):
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)
        self.b.bias = nn.Parameter(torch.randn(3))
        if tied:
            self.b.weight = self.a.weight
        self.register_buffer("one", torch.randn(3))
        self.register_buffer("two", self.one if tied else torch.randn(3))

    def forward(self, x):
        return self.b(self.a(x) + self.one) * self.two


def outputs_for(x):
    def outputs(fmodel, params, buffers):
        return torch.vmap(fmodel, (0, 0, None))(params, buffers, x)

    return outputs


def test_tied_tensors_stay_one_entry_and_drive_every_name():
    pair = models(2, Tied)
    fmodel, params, buffers = stack(pair)
    assert set(params) == {"a.weight", "a.bias", "b.bias"}
    assert set(buffers) == {"one"}
    x = torch.randn(5, 3)
    outputs = outputs_for(x)(fmodel, params, buffers)
    assert_exact(outputs, torch.stack([each(x) for each in pair]), 1e-6)
    outputs.square().sum().backward()
    for i, each in enumerate(pair):
        each(x).square().sum().backward()
        assert_exact(params["a.weight"].grad[i], each.a.weight.grad, 1e-6)
    for each, again in zip(pair, unstack(fmodel, params, buffers), strict=True):
        assert again.b.weight is again.a.weight
        assert again.two is again.one
        assert_same_state(each, again)


@pytest.mark.parametrize("name", losses.CASES)
def test_every_model_stacks_and_comes_back_bit_for_bit(name):
    modules = models(3, losses.CASES[name].model)
    fmodel, params, buffers = stack(modules)
    expected, *rest = make_functional_with_buffers(modules[2])
    assert repr(fmodel) == repr(expected)
    for ours, theirs in zip((params, buffers), rest, strict=True):
        assert list(ours) == list(theirs)
        assert_exact(member(ours, 2), theirs, 0)
    assert all(each.requires_grad and each.is_leaf for each in params.values())
    assert not any(each.requires_grad for each in buffers.values())
    for a, b in zip(modules, unstack(fmodel, params, buffers), strict=True):
        assert_same_state(a, b)
        stack([a, b])
    _, params, _ = stack(iter(modules), disable_autograd_tracking=True)
    assert not any(each.requires_grad for each in params.values())


@pytest.mark.parametrize("count", [1, 3])
def test_nothing_is_shared_with_the_modules(count):
    modules = models(count)
    before = [copy.deepcopy(each) for each in modules]
    fmodel, params, buffers = stack(nn.ModuleList(modules))
    stacked = [*params.values(), *buffers.values()]
    again = unstack(fmodel, params, buffers)
    with torch.no_grad():
        for each in stacked:
            each.fill_(7)
    for a, b, c in zip(modules, before, again, strict=True):
        assert_same_state(a, b)
        assert_same_state(c, b)


# Made by a function.


def test_members_are_made_under_their_seeds():
    seeds = [member_seed(3, i) for i in range(4)]
    fmodel, params, buffers = stack(mlp, seeds=iter(seeds))
    for seed, made in zip(seeds, unstack(fmodel, params, buffers), strict=True):
        torch.manual_seed(seed)
        assert_same_state(made, mlp())


@examples(25)
@given(st.integers(0, 2**70), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_no_two_members_have_one_seed(seed, i, j):
    seeds = member_seed(seed, i), member_seed(seed, j)
    assert (seeds[0] == seeds[1]) == (i == j)
    assert all(0 <= each < 2**32 for each in seeds)


def broken():
    torch.rand(3)
    raise ValueError("no model")


def test_the_generators_are_left_as_they_were():
    torch.manual_seed(5)
    random.seed(5)
    before, plain = torch.get_rng_state(), random.getstate()
    stack(mlp, seeds=[3, 4])
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == plain
    with pytest.raises(ValueError, match="no model"):
        stack(broken, seeds=[3])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_generators_of_the_device_are_left_as_they_were():
    def make():
        return nn.Linear(3, 2, device="cuda")

    torch.cuda.manual_seed(5)
    before = torch.cuda.get_rng_state()
    _, params, _ = stack(make, seeds=range(3))
    assert torch.equal(torch.cuda.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(params["weight"][2], make().weight)


# Taken apart.


def test_shared_entries_take_the_values_of_member_0():
    three = models()
    fmodel, params, buffers = stack(three)
    before = {**params, **buffers}
    patterns = ["0.*", "*.running_var"]
    shared, rest = share(params, buffers, patterns)
    first = three[0].state_dict()
    for name in ("0.weight", "0.bias"):
        assert torch.equal(shared[name], first[name])
        assert shared[name].requires_grad
        assert shared[name].is_leaf
        assert shared[name].untyped_storage().nbytes() == first[name].nbytes
    assert torch.equal(rest["1.running_var"], first["1.running_var"])
    assert shared["3.weight"] is params["3.weight"]
    assert [list(shared), list(rest)] == [list(params), list(buffers)]
    assert all({**params, **buffers}[name] is before[name] for name in before)
    modules = unstack(fmodel, shared, rest, shared=tuple(patterns))
    for model, again in zip(three, modules, strict=True):
        assert torch.equal(again[0].weight, three[0][0].weight)
        assert torch.equal(again[3].weight, model[3].weight)
    assert modules[0][0].weight.data_ptr() != modules[1][0].weight.data_ptr()


def test_a_member_is_a_view_and_gradients_flow_through_it():
    _, params, buffers = stack(models())
    one = member(params, 1)
    one["0.weight"].sum().backward()
    assert params["0.weight"].grad.flatten(1).sum(1).tolist() == [0.0, 12.0, 0.0]
    assert one["0.weight"].data_ptr() == params["0.weight"][1].data_ptr()
    shared, _ = share(params, buffers, ["0.weight"])
    assert member(shared, 2, shared=["0.weight"])["0.weight"] is shared["0.weight"]
    assert member({}, 0) == {}


# Groups.


@examples(15)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=6))
def test_any_mixture_comes_back_in_order(widths):
    torch.manual_seed(0)
    modules = [nn.Sequential(nn.Linear(2, w), nn.Linear(w, 2)) for w in widths]
    groups = group(iter(modules))
    assert len(groups.fmodels) == len(set(widths))
    x = torch.randn(3, 2)
    outputs, expected = groups.map(outputs_for(x)), [each(x) for each in modules]
    assert_exact(outputs, torch.stack(expected), 1e-5)
    weights = torch.randn(outputs.shape)
    (outputs * weights).sum().backward()
    (torch.stack(expected) * weights).sum().backward()
    for params, positions in zip(groups.params, groups.positions, strict=True):
        for row, position in enumerate(positions):
            grad = modules[position].get_parameter("0.weight").grad
            assert_exact(params["0.weight"].grad[row], grad, 1e-5)
