"""Chains of transformations, and what their numbers are made of."""

import shutil

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.optim.problems import gradients, perceptron, train
from tests.oracle import assert_exact
from vgrad import optim


def test_a_chain_of_nothing_is_the_identity():
    grads = {"a": torch.ones(2, dtype=torch.bfloat16), "b": None}
    updates, state = optim.chain().update(grads, optim.chain().init({}))
    assert updates == grads
    assert state == ()


def test_a_chain_applies_its_transformations_in_order():
    params = {"w": torch.tensor([2.0])}
    decay, scale = optim.add_decayed_weights(1.0), optim.scale_by_learning_rate(0.5)
    for tx, expected in [
        (optim.chain(decay, scale), -1.5),
        (optim.chain(scale, decay), 1.5),
        (optim.chain(optim.chain(decay), scale), -1.5),
    ]:
        updates, _ = tx.update({"w": torch.ones(1)}, tx.init(params), params)
        assert updates["w"].item() == expected


def test_each_transformation_counts_its_steps_once_for_all_parameters():
    tx = optim.adam(lambda count: 0.1)
    params, loss = perceptron()
    _, state = train(tx, params, loss, 3)
    counts = [leaf for leaf in pytree.tree_leaves(state) if leaf.dtype == torch.int64]
    assert [count.shape for count in counts] == [(), ()]
    assert [int(count) for count in counts] == [3, 3]


def test_optimizers_without_decay_need_no_parameters():
    params, loss = perceptron()
    grads = gradients(loss, params)
    for tx in (optim.sgd(0.1, momentum=0.9), optim.adam(), optim.adamw(weight_decay=0)):
        state = tx.init(params)
        assert_exact(tx.update(grads, state), tx.update(grads, state, params), 0)


def test_slots_have_the_names_of_torch_and_one_tensor_for_each_parameter():
    params = {"w": torch.zeros(2, 2)}
    for make, slots in [
        (optim.scale_by_amsgrad, ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]),
        (optim.scale_by_lion, ["exp_avg"]),
        (optim.scale_by_rprop, ["prev", "step_size"]),
    ]:
        state = make().init(params)
        assert isinstance(state, optim.State)
        assert list(state.slots) == slots
        assert all(tensors.keys() == params.keys() for tensors in state.slots.values())


@pytest.mark.parametrize("transformation", [
    optim.scale_by_amsgrad(eps=0.0),
    optim.scale_by_nadam(eps=0.0),
    optim.scale_by_radam(eps=0.0),
    optim.scale_by_adamax(eps=0.0),
    optim.scale_by_adam(eps=0.0),
    optim.scale_by_rss(eps=0.0),
    optim.scale_by_rms(eps=0.0),
    optim.scale_by_stddev(eps=0.0),
    optim.scale_by_adadelta(eps=0.0),
    optim.scale_by_rprop(),
])  # fmt: skip
def test_entries_without_gradient_stay_for_any_eps_and_have_finite_slopes(
    transformation,
):
    def outcome(size):
        state = transformation.init({"w": torch.ones(2)})
        updates = {"w": torch.ones(2)}
        for _ in range(7):
            grads = {"w": size * torch.tensor([0.0, 1.0])}
            updates, state = transformation.update(grads, state)
        return updates["w"].sum(), updates["w"]

    slope, updates = torch.func.grad(outcome, has_aux=True)(torch.tensor(0.3))
    assert updates[0] == 0
    assert updates[1].isfinite()
    assert slope.isfinite()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="Inductor needs a compiler")
@pytest.mark.filterwarnings("ignore")
def test_inductor_steps_with_the_rate_it_is_given():
    params, grads = {"w": torch.zeros(20)}, {"w": torch.ones(20)}
    state = optim.adamw(0.1).init(params)

    def step(base):
        rates = base * 2  # of which one is a view
        tx = optim.adamw(rates[1], betas=(0.9, 0.99))
        return optim.step(tx, grads, state, params)

    torch.compiler.reset()
    base = torch.tensor([1.0, 0.25])
    found, expected = torch.compile(step, fullgraph=True)(base), step(base)
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[1][0].slots, expected[1][0].slots)
