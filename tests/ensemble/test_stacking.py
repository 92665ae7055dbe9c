"""Stacking and taking apart: exact values, and nothing global is touched."""

import copy
import random
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import vgrad
from tests import losses
from tests.examples import examples
from tests.oracle import assert_exact
from vgrad import ensemble, make_functional_with_buffers
from vgrad.ensemble import (
    axes,
    combine_state_for_ensemble,
    init_ensemble,
    matching,
    member,
    member_seed,
    share,
    stack,
    unstack,
)
from vgrad.training import EnsembleState


def mlp(width=4, p=0.1):
    return nn.Sequential(
        nn.Linear(3, width), nn.BatchNorm1d(width), nn.Dropout(p), nn.Linear(width, 2)
    )


def models(count=3, build=mlp):
    torch.manual_seed(0)
    return [build() for _ in range(count)]


def same_state(a, b):
    a, b = a.state_dict(), b.state_dict()
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


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


def test_two_mlps_stack_on_axis_0_and_run_as_the_modules():
    """Functorch's own example."""
    pair = models(2, lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
    fmodel, params, buffers = stack(pair)
    x = torch.randn(5, 3)
    outputs = torch.vmap(fmodel, (0, 0, None))(params, buffers, x)
    assert_exact(outputs, torch.stack([each(x) for each in pair]), 1e-6)
    for name, value in params.items():
        assert_exact(value, torch.stack([each.get_parameter(name) for each in pair]), 0)
    assert buffers == {}


def test_functorchs_name_is_the_same_function():
    assert combine_state_for_ensemble is stack


def test_tied_tensors_stay_one_entry_and_drive_every_name():
    pair = models(2, Tied)
    fmodel, params, buffers = stack(pair)
    assert set(params) == {"a.weight", "a.bias", "b.bias"}
    assert set(buffers) == {"one"}
    x = torch.randn(5, 3)
    outputs = torch.vmap(fmodel, (0, 0, None))(params, buffers, x)
    assert_exact(outputs, torch.stack([each(x) for each in pair]), 1e-6)
    outputs.square().sum().backward()
    for i, each in enumerate(pair):
        each(x).square().sum().backward()
        assert_exact(params["a.weight"].grad[i], each.a.weight.grad, 1e-6)
    for each, again in zip(pair, unstack(fmodel, params, buffers), strict=True):
        assert again.b.weight is again.a.weight
        assert again.two is again.one
        assert same_state(each, again)


@pytest.mark.parametrize("name", losses.CASES)
def test_every_model_stacks_and_comes_back_bit_for_bit(name):
    torch.manual_seed(0)
    case = losses.CASES[name]
    given = [case.model() for _ in range(3)]
    fmodel, params, buffers = stack(given)
    expected, *rest = make_functional_with_buffers(given[2])
    found = member(params, 2), member(buffers, 2)
    assert repr(fmodel) == repr(expected)
    for ours, theirs in zip(found, rest, strict=True):
        assert list(ours) == list(theirs)
        assert_exact(ours, theirs, 0)
    for a, b in zip(given, unstack(fmodel, params, buffers), strict=True):
        assert same_state(a, b)
        assert matching.difference(a, b) is None


def test_any_iterable_will_do():
    three = models()
    expected = stack(three)[1]
    for each in (iter(three), tuple(three), nn.ModuleList(three), (m for m in three)):
        assert_exact(stack(each)[1], expected, 0)


def test_parameters_require_grad_and_frozen_ones_are_buffers():
    three = models()
    for each in three:
        each[0].bias.requires_grad_(False)
    _, params, buffers = stack(three)
    assert all(each.requires_grad and each.is_leaf for each in params.values())
    assert "0.bias" in buffers
    assert not any(each.requires_grad for each in buffers.values())
    _, params, _ = stack(three, disable_autograd_tracking=True)
    assert not any(each.requires_grad for each in params.values())


@pytest.mark.parametrize("count", [1, 3])
def test_nothing_is_shared_with_the_modules(count):
    given = models(count)
    before = [copy.deepcopy(each) for each in given]
    fmodel, params, buffers = stack(given)
    outside = {
        tensor.untyped_storage().data_ptr()
        for each in given
        for tensor in each.state_dict().values()
    }
    stacked = [*params.values(), *buffers.values()]
    assert not outside & {each.untyped_storage().data_ptr() for each in stacked}
    again = unstack(fmodel, params, buffers)
    with torch.no_grad():
        for each in stacked:
            each.fill_(7)
    for a, b, c in zip(given, before, again, strict=True):
        assert same_state(a, b)
        assert same_state(c, b)


@examples(20)
@given(
    st.integers(1, 4),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.booleans(),
)
def test_stacking_and_unstacking_gives_the_models_back(count, widths, dtype, bias):
    torch.manual_seed(0)

    def build():
        pairs = zip([2, *widths], widths, strict=False)
        layers = [nn.Linear(a, b, bias=bias) for a, b in pairs]
        return nn.Sequential(*layers).to(dtype)

    given = [build() for _ in range(count)]
    fmodel, params, buffers = stack(given)
    assert axes.members(params, buffers) == count
    again = unstack(fmodel, params, buffers)
    assert all(same_state(a, b) for a, b in zip(given, again, strict=True))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ([], ValueError, r"stack\(models\): expected at least one model, got none"),
        (
            nn.Sequential(nn.ReLU()),
            TypeError,
            "several models, got a single Sequential",
        ),
        ([nn.ReLU(), "a"], TypeError, r"stack\(models\)\[1\]\(str\): expected a plain"),
        ({"a": nn.ReLU()}, TypeError, r"stack\(models\)\[0\]\(str\): expected a plain"),
    ],
)
def test_what_is_no_list_of_models_is_refused(given, error, message):
    with pytest.raises(error, match=message):
        stack(given)


# Made from a factory.


def test_members_are_what_the_factory_gives_under_their_seeds():
    fmodel, params, buffers = init_ensemble(mlp, 4, seed=3)
    for i, found in enumerate(unstack(fmodel, params, buffers)):
        torch.manual_seed(member_seed(3, i))
        assert same_state(found, mlp())


def test_an_ensemble_is_reproducible_and_its_members_do_not_depend_on_their_number():
    _, many, _ = init_ensemble(mlp, 4, seed=3)
    torch.manual_seed(9)
    _, few, _ = init_ensemble(mlp, 2, seed=3)
    assert all(torch.equal(few[name], many[name][:2]) for name in many)


def test_members_and_ensembles_of_neighbouring_seeds_all_differ():
    rows = torch.cat(
        [init_ensemble(mlp, 5, seed=seed)[1]["0.weight"] for seed in range(4)]
    )
    assert len(rows.flatten(1).unique(dim=0)) == 20


@examples(25)
@given(st.integers(0, 2**70), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_no_two_members_have_one_seed(seed, i, j):
    seeds = member_seed(seed, i), member_seed(seed, j)
    assert (seeds[0] == seeds[1]) == (i == j)
    assert all(0 <= each < 2**32 for each in seeds)


def test_seeds_of_neighbouring_ensembles_have_nothing_in_common():
    seeds = [member_seed(seed, i) for seed in range(50) for i in range(50)]
    assert len(set(seeds)) == 2500


def test_torch_reads_32_bits_of_a_seed_on_the_cpu():
    """The reason for seeds below 2**32; a failure means that more can be used."""
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 2**32 + 1)]
    assert torch.equal(*(torch.rand(3, generator=each) for each in generators))


def broken():
    torch.rand(3)
    raise ValueError("no model")


def test_the_generators_are_left_as_they_were():
    torch.manual_seed(5)
    random.seed(5)
    before, plain = torch.get_rng_state(), random.getstate()
    init_ensemble(mlp, 2, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == plain
    with pytest.raises(ValueError, match="no model"):
        init_ensemble(broken, 2, seed=3)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_generators_of_the_device_are_left_as_they_were():
    def factory():
        return nn.Linear(3, 2, device="cuda")

    torch.cuda.manual_seed(5)
    before = torch.cuda.get_rng_state()
    _, params, _ = init_ensemble(factory, 3, seed=3)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    torch.manual_seed(member_seed(3, 2))
    assert torch.equal(params["weight"][2], factory().weight)


def test_a_factory_that_makes_no_new_models_is_refused():
    model = mlp()
    with pytest.raises(ValueError, match="a new model from each call, got one of them"):
        init_ensemble(lambda: model, 2, seed=0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("init_ensemble(mlp, 0, seed=0)", r"\(n=0\): expected a whole number >= 1"),
        ("init_ensemble(mlp, 2, seed=-1)", r"\(seed=-1\): expected a whole"),
        ("member_seed(0, -1)", r"member_seed\(i=-1\): expected a whole"),
        ("member_seed(0, 2**32)", r"\(i=4294967296\): expected i < 2\*\*32"),
        ("member_seed(0.5, 0)", r"\(seed=0.5\): expected a whole"),
    ],
)
def test_seeds_and_numbers_that_are_none_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        eval(call)


# Taken apart.


def test_shared_entries_take_the_values_of_member_0():
    three = models()
    _, params, buffers = stack(three)
    before = {**params, **buffers}
    shared, rest = share(params, buffers, ["0.*", "*.running_var"])
    first = three[0].state_dict()
    for name in ("0.weight", "0.bias"):
        assert torch.equal(shared[name], first[name])
        assert shared[name].requires_grad
        assert shared[name].is_leaf
        assert shared[name].untyped_storage().nbytes() == first[name].nbytes
    assert torch.equal(rest["1.running_var"], first["1.running_var"])
    assert shared["3.weight"] is params["3.weight"]
    assert list(shared) == list(params)
    assert list(rest) == list(buffers)
    assert all({**params, **buffers}[name] is before[name] for name in before)


def test_shared_entries_go_into_every_module():
    three = models()
    fmodel, params, buffers = stack(three)
    patterns = ["0.*", "*.running_var"]
    params, buffers = share(params, buffers, patterns)
    assert axes.members(params, buffers, patterns) == 3
    modules = unstack(fmodel, params, buffers, shared=tuple(patterns))
    for own, found in zip(three, modules, strict=True):
        assert torch.equal(found[0].weight, three[0][0].weight)
        assert torch.equal(found[3].weight, own[3].weight)
    assert modules[0][0].weight is not modules[1][0].weight
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


TWO = {"a": torch.ones(2, 3), "b": torch.ones(2)}
THREE, SCALAR, NONE = (torch.ones(shape) for shape in (3, (), (0, 2)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            "share(TWO, {}, ['c*'])",
            r"^share\('c\*'\): .* matches a parameter or buffer",
        ),
        ("share(TWO, {'c': THREE}, ['a'])", "2 members in 'c' as in 'a', got"),
        ("member(TWO, 2)", r"member\(i=2\): expected i < 2, the number of members"),
        ("member(TWO, -1)", r"member\(i=-1\): expected a whole number >= 0"),
        ("member(TWO, 0, shared=['c'])", r"^member\('c'\): expected a pattern"),
        ("axes.members({}, {})", "expected an entry with a member axis, got none"),
        ("axes.members(TWO, {}, ['*'])", "an entry with a member axis, got n"),
        ("axes.members(TWO, {'c': SCALAR})", "axis in 'c', got a scalar"),
        ("axes.members(TWO, {'c': THREE})", "2 members in 'c' as in 'a', got 3"),
        ("axes.members({'a': NONE}, {})", "at least one member, got none"),
    ],
)
def test_members_that_are_not_there_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        eval(call)


def test_patterns_are_a_list_and_dictionaries_are_dictionaries():
    fmodel, params, buffers = stack(models())
    tx, given = vgrad.optim.sgd(0.1), (params, buffers)
    for name, call in {
        "share": partial(share, *given),
        "member": partial(member, params, 0),
        "unstack": partial(unstack, fmodel, *given),
        "for_members": partial(ensemble.for_members, tx),
        "ensemble_forward": partial(ensemble.ensemble_forward, fmodel),
        "ensemble_per_sample_grad": partial(ensemble.ensemble_per_sample_grad, abs),
        "ensemble_clipped_grad": partial(
            ensemble.ensemble_clipped_grad, abs, max_norm=1.0
        ),
        "EnsembleState.create": partial(EnsembleState.create, tx, *given),
    }.items():
        keyword = "patterns" if name == "share" else "shared"
        with pytest.raises(TypeError, match=rf"^{name}\(\w+='a'\): .* got a string"):
            call(**{keyword: "a"})
        with pytest.raises(TypeError, match=rf"^{name}.*of patterns of names, got a s"):
            call(**{keyword: {"a"}})
    with pytest.raises(TypeError, match="expected a dictionary of tensors by name"):
        axes.members([torch.ones(2)], {})
    with pytest.raises(TypeError, match="expected a dictionary of tensors by name"):
        member([torch.ones(2)], 0)


def test_entries_of_another_model_cannot_be_unstacked():
    fmodel, params, buffers = stack(models())
    del params["0.weight"]
    with pytest.raises(ValueError, match=r"missing: '0.weight'"):
        unstack(fmodel, params, buffers)
