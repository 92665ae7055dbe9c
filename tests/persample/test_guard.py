import contextlib
import gc
import re
import statistics
import threading
import time
import warnings
import weakref

import pytest
import torch
from torch.nn import functional as F

import vgrad
from tests import oracle

PARAMS = {"w": torch.tensor([0.5, -1.0, 2.0])}
X = torch.tensor([[1.0, 2.0, 3.0], [-1.0, 0.5, 0.0]])


def product(p, x):
    return (p["w"] * x).sum()


def sets_item(p, b, x):
    fresh = torch.zeros(3)
    fresh[1] = product(p, x)
    return fresh.square().sum()


REFUSED = {
    "numpy": ("numpy", lambda p, b, x: (p["w"] * x).sum() * x.numpy().item(0)),
    "add_": ("add_", lambda p, b, x: torch.zeros(3).add_(p["w"] * x).sum()),
    "an item is set": ("__setitem__", sets_item),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_vmap_cannot_run_names_the_op_and_a_loop_runs_it(name):
    op, loss = REFUSED[name]
    expected = oracle.loss_gradients(loss, PARAMS, {}, (X,), len(X))
    for strategy in ("recorded", "vmap"):
        with pytest.raises(vgrad.UnsupportedOp, match=f'^{op}: .*strategy="loop"'):
            vgrad.per_sample_grad(loss, strategy=strategy)(PARAMS, {}, X)
    found = vgrad.per_sample_grad(loss, strategy="loop")(PARAMS, {}, X)
    oracle.assert_exact(found, expected, 1e-6)
    compute = vgrad.per_sample_grad(loss, chunk_size=1)
    with pytest.warns(
        vgrad.FallbackWarning, match=f"one sample after.*: {op}:"
    ) as seen:
        found = compute(PARAMS, {}, X)
    assert [each.filename for each in seen] == [__file__]  # one for both chunks
    oracle.assert_exact(found, expected, 1e-6)


def leaves_torch_in_the_end(p, b, x):
    with contextlib.ExitStack() as stack:
        stack.callback(x.numpy)
    return product(p, x)


def takes_the_median(p, b, x):
    return statistics.median(list(p["w"] * x))


def test_lines_are_those_of_the_loss_and_not_of_the_standard_library():
    def line(loss, after):
        return f"{re.escape(__file__)}:{loss.__code__.co_firstlineno + after}"

    match = f"It stopped at {line(leaves_torch_in_the_end, 1)}: numpy: "
    with pytest.warns(vgrad.FallbackWarning, match=match):
        vgrad.per_sample_grad(leaves_torch_in_the_end)(PARAMS, {}, X)
    compute = vgrad.per_sample_norm(takes_the_median)
    ((where, _),) = vgrad.explain(compute)(PARAMS, {}, X).splits
    assert re.fullmatch(line(takes_the_median, 1), where)


def test_parameters_on_meta_are_refused_where_samples_have_values():
    params = {"w": PARAMS["w"].to("meta")}
    compute = vgrad.per_sample_grad(lambda p, b, x: product(p, x))
    with pytest.raises(ValueError, match="'w' on the device meta and a batch on cpu"):
        compute(params, {}, X)
    assert compute(params, {}, X.to("meta"))["w"].shape == X.shape


@pytest.mark.parametrize("strategy", ["auto", "recorded", "vmap"])
def test_other_errors_stay_as_they_are_with_a_note(strategy):
    def loss(p, b, x):
        return (p["w"] @ torch.ones(4)) * x.sum()

    with pytest.raises(RuntimeError, match="size") as caught:
        vgrad.per_sample_grad(loss, strategy=strategy)(PARAMS, {}, X)
    assert not isinstance(caught.value, vgrad.UnsupportedOp)
    if strategy != "auto":  # which has seen that this does not help
        assert 'strategy="loop"' in caught.value.__notes__[0]

    class OwnError(Exception):
        pass

    def raises(p, b, x):
        raise OwnError

    with pytest.raises(OwnError):
        vgrad.per_sample_grad(raises, strategy=strategy)(PARAMS, {}, X)


def multiplies_pairs(p, b, x):
    w = p["w"]
    return F.bilinear(x[None], x[None], w.outer(w)[None]).square().sum()


def test_a_loop_inside_torch_becomes_one_warning_that_names_the_op():
    compute = vgrad.per_sample_grad(multiplies_pairs, strategy="vmap")
    with pytest.warns(vgrad.FallbackWarning) as caught:
        found = compute(PARAMS, {}, X)["w"]
    assert len(caught) == 1
    assert "trilinear" in str(caught[0].message)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = compute(PARAMS, {}, X)["w"]
        loop = vgrad.per_sample_grad(multiplies_pairs, strategy="loop")
        looped = loop(PARAMS, {}, X)["w"]
    assert torch.equal(found, again)
    torch.testing.assert_close(found, looped)


def test_warnings_of_the_loss_itself_come_through():
    def loss(p, b, x):
        warnings.warn("mine", UserWarning, stacklevel=1)
        return (p["w"] * x).sum()

    compute = vgrad.per_sample_grad(loss)
    for _ in range(2):
        with pytest.warns(UserWarning, match="mine"):
            compute(PARAMS, {}, X)


def test_threads_leave_the_warnings_of_the_process_as_they_are():
    def slow(p, b, x):
        time.sleep(0.05)
        return (p["w"] * x).sum()

    before = list(warnings.filters), warnings.showwarning
    threads = [
        threading.Thread(target=lambda: vgrad.per_sample_grad(slow)(PARAMS, {}, X))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
        time.sleep(0.02)
    for thread in threads:
        thread.join()
    assert (list(warnings.filters), warnings.showwarning) == before


def test_measuring_memory_leaks_none():
    def loss(p, b, x):
        return (p["w"] * x).exp().sum()

    alive = []

    class Spy(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if getattr(func, "__name__", "") == "exp":
                alive.append(weakref.ref(result))
            return result

    with Spy():
        vgrad.per_sample_norm(loss, chunk_size="auto")(PARAMS, {}, X)
    gc.collect()
    assert alive
    assert not any(ref() is not None for ref in alive)


@pytest.mark.parametrize("strategy", ["auto", "recorded", "vmap"])
def test_who_keeps_gradients_of_activations_is_told_so(strategy):
    def loss(p, b, x):
        h = x * p["w"]
        h.retain_grad()
        return h.sin().sum()

    params, x = {"w": torch.rand(4)}, torch.rand(3, 4)
    compute = vgrad.per_sample_grad(loss, strategy=strategy)
    message = "retain_grad: .* leaves the graph"
    if strategy == "auto":
        with pytest.warns(vgrad.FallbackWarning, match=message):
            found = compute(params, {}, x)["w"]
    else:
        with pytest.raises(vgrad.UnsupportedOp, match=f"^{message}"):
            compute(params, {}, x)
        found = vgrad.per_sample_grad(loss, strategy="loop")(params, {}, x)["w"]
    assert torch.allclose(found, x * (x * params["w"]).cos())
