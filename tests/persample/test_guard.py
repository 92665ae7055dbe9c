"""Errors and warnings of ops that cannot run for all samples at once."""

import contextlib
import re
import statistics
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn import functional as F

import vgrad

PARAMS = {"w": torch.tensor([0.5, -1.0, 2.0])}
X = torch.tensor([[1.0, 2.0, 3.0], [-1.0, 0.5, 0.0]])


def product(p, b, x):
    return (p["w"] * x).sum()


def leaves_torch_in_the_end(p, b, x):
    with contextlib.ExitStack() as stack:
        stack.callback(x.numpy)
    return product(p, b, x)


def takes_the_median(p, b, x):
    return statistics.median(list(p["w"] * x))


def test_lines_are_those_of_the_loss_and_not_of_the_standard_library():
    def line(loss, after):
        return f"{re.escape(__file__)}:{loss.__code__.co_firstlineno + after}"

    match = f"It stopped at {line(leaves_torch_in_the_end, 1)}: numpy: "
    with pytest.warns(vgrad.FallbackWarning, match=match) as seen:
        vgrad.per_sample_grad(leaves_torch_in_the_end)(PARAMS, {}, X)
    assert [each.filename for each in seen] == [__file__]
    compute = vgrad.per_sample_norm(takes_the_median)
    ((where, _),) = vgrad.explain(compute)(PARAMS, {}, X).splits
    assert re.fullmatch(line(takes_the_median, 1), where)


def test_parameters_on_meta_are_refused_where_samples_have_values():
    params, compute = {"w": PARAMS["w"].to("meta")}, vgrad.per_sample_grad(product)
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
    with pytest.warns(vgrad.FallbackWarning, match="trilinear") as caught:
        found = compute(PARAMS, {}, X)["w"]
    assert [each.filename for each in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = compute(PARAMS, {}, X)["w"]
        loop = vgrad.per_sample_grad(multiplies_pairs, strategy="loop")
        torch.testing.assert_close(found, loop(PARAMS, {}, X)["w"])
    assert torch.equal(found, again)


def test_warnings_of_the_loss_itself_come_through():
    def loss(p, b, x):
        warnings.warn("mine", UserWarning, stacklevel=1)
        return product(p, b, x)

    compute = vgrad.per_sample_grad(loss)
    for _ in range(2):
        with pytest.warns(UserWarning, match="mine"):
            compute(PARAMS, {}, X)


def test_threads_leave_the_warnings_of_the_process_as_they_are():
    def slow(p, b, x):
        time.sleep(0.05)
        return product(p, b, x)

    before = list(warnings.filters), warnings.showwarning
    with ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            pool.submit(vgrad.per_sample_grad(slow), PARAMS, {}, X)
            time.sleep(0.02)
    assert (list(warnings.filters), warnings.showwarning) == before
