"""Groups of models of different architectures: order of the models, trees, errors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.examples import examples
from tests.oracle import assert_exact
from vgrad.ensemble import group


def outputs_for(x):
    def outputs(fmodel, params, buffers):
        return torch.vmap(fmodel, (0, 0, None))(params, buffers, x)

    return outputs


def mixed():
    torch.manual_seed(0)
    builds = [nn.Linear, lambda a, b: nn.Sequential(nn.Linear(a, b), nn.Tanh())]
    return [builds[kind](3, 2) for kind in (1, 0, 1, 1, 0)]


def test_groups_answer_in_the_order_of_the_models():
    given = mixed()
    groups = group(iter(given))
    assert groups.positions == ((0, 2, 3), (1, 4))
    x = torch.randn(4, 3)
    expected = torch.stack([each(x) for each in given])
    found = groups.map(outputs_for(x))
    assert_exact(found, expected, 1e-6)
    weights = torch.randn(found.shape)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    for number, position in ((0, 3), (1, 1)):
        name = "0.weight" if number == 0 else "weight"
        i = groups.positions[number].index(position)
        grad = groups.params[number][name].grad[i]
        assert_exact(grad, given[position].get_parameter(name).grad, 1e-6)


def test_groups_join_trees():
    groups = group(mixed())

    def counts(fmodel, params, buffers):
        bias = next(value for name, value in params.items() if name.endswith("bias"))
        return {"bias": bias, "pair": (bias.sum(1), bias[:, :1])}

    found = groups.map(counts)
    biases = [list(each.parameters())[1] for each in mixed()]
    bias = torch.stack(biases)
    assert_exact(found, {"bias": bias, "pair": (bias.sum(1), bias[:, :1].clone())}, 0)


def test_groups_cannot_be_changed():
    groups = group(mixed())
    with pytest.raises(AttributeError):
        groups.params = ()


@examples(15)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=6))
def test_any_mixture_comes_back_in_order(widths):
    torch.manual_seed(0)
    given = [nn.Sequential(nn.Linear(2, w), nn.Linear(w, 2)) for w in widths]
    groups = group(given)
    assert len(groups.fmodels) == len(set(widths))
    x = torch.randn(3, 2)
    expected = torch.stack([each(x) for each in given])
    assert_exact(groups.map(outputs_for(x)), expected, 1e-5)


TWO, THREE, ONE = torch.ones(2), torch.ones(3), torch.ones(())


@pytest.mark.parametrize(
    ("results", "error", "message"),
    [
        ([THREE, (TWO,)], ValueError, "expected results of one struct"),
        ([THREE, THREE], ValueError, "axis of 2 members from group 1"),
        ([ONE, TWO], ValueError, "axis of 3 members from group 0"),
        ([THREE, 2.0], TypeError, "expected tensors, got a float from group 1"),
        ([torch.ones(3, 2), TWO[:, None]], ValueError, r"axis only, got \(2, 1\)"),
        ([THREE, TWO.double()], ValueError, r"axis only, got \(2,\), .*float64"),
    ],
)
def test_results_that_do_not_fit_together_are_refused(results, error, message):
    groups, rest = group(mixed()), iter(results)
    with pytest.raises(error, match=message):
        groups.map(lambda fmodel, params, buffers: next(rest))


def test_a_group_of_nothing_is_refused():
    message = r"group\(models\): expected at least one model"
    with pytest.raises(ValueError, match=message):
        group([])
