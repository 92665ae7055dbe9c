"""The way that `strategy="auto"` takes: the cheapest, and the same in a resumed run."""

import pytest
import torch
from torch.nn import functional as F

import vgrad
from tests.losses import assert_quantities, randn
from vgrad import explain

B = 4
PARAMS = {"w": randn(3, 5), "v": randn(3, seed=1)}
X = randn(B, 5, seed=2)


def net(params, x):
    return F.linear(x, params["w"], params["v"]).tanh().square().sum()


def inner_step(params, buffers, x):
    """A step by torch.func inside of the loss, which no function mode sees."""
    slopes = torch.func.grad(lambda params: net(params, x))(params)
    return net({name: params[name] - slopes[name] for name in params}, x)


def in_numpy(params, buffers, x):
    return net(params, x * float(x.detach().numpy().max()))


class Runs:
    """A loss of batches, and how often it ran."""

    def __init__(self, loss):
        self.loss, self.count = loss, 0

    def __call__(self, *given):
        self.count += 1
        return self.loss(*given)

    def during(self, compute, *given):
        before = self.count
        result = compute(*given)
        return self.count - before, result


@pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning")
@pytest.mark.parametrize(
    ("loss", "first", "later"), [(inner_step, 2, 1), (in_numpy, 3 + B, B)]
)
def test_a_loss_that_was_refused_takes_its_way_at_once(loss, first, later):
    runs = Runs(loss)
    compute = vgrad.per_sample_grad(runs, verify=False)
    calls = [runs.during(compute, PARAMS, {}, X) for _ in range(3)]
    counts, results = zip(*calls, strict=True)
    assert counts == (first, later, later)
    for name, value in results[0].items():
        assert all(torch.equal(value, each[name]) for each in results)
    assert_quantities(loss, PARAMS, (X,))


LONG = X[:, None].expand(B, 2, 5)
FLOATS = {name: value.float() for name, value in PARAMS.items()}


@pytest.mark.parametrize(
    ("params", "given", "casts", "runs"),
    [
        (PARAMS, (LONG, 0), False, 2),
        (PARAMS, (X.float(), 0), False, 2),
        (PARAMS, (X, 1), False, 2),
        (FLOATS, (X, 0), False, 2),
        (PARAMS, (X, 0), True, 2),
        (PARAMS, (X[:2], 0), False, 1),
    ],
    ids=["shapes", "dtypes", "values", "parameters", "autocast", "sizes of batches"],
)
def test_other_shapes_are_recorded_again(params, given, casts, runs):
    loss = Runs(lambda p, b, x, kind: inner_step(p, b, x.to(p["w"].dtype)))
    compute = vgrad.per_sample_grad(loss, verify=False)
    compute(PARAMS, {}, X, 0)
    with torch.autocast("cpu", torch.bfloat16, enabled=casts):
        assert loss.during(compute, params, {}, *given)[0] == runs


def refuses_some(params, buffers, x):
    return (inner_step if x.sum() > 0 else lambda p, b, x: net(p, x))(
        params, buffers, x
    )


def test_a_loss_that_reads_values_and_a_passing_error_are_not_remembered():
    """So that a run that is resumed at any batch has the same bits."""
    compute, failing = vgrad.per_sample_grad(refuses_some), [True]

    def fails_once(params, buffers, x):
        if failing:
            failing.clear()
            raise RuntimeError("a disk is full")
        return net(params, x)

    for batch in (X.abs(), -X.abs()):
        fresh = vgrad.per_sample_grad(refuses_some)(PARAMS, {}, batch)
        found = compute(PARAMS, {}, batch)
        assert all(torch.equal(found[name], fresh[name]) for name in fresh)
    assert explain(compute)(PARAMS, {}, -X.abs()).strategy == "recorded"
    passing = vgrad.per_sample_grad(fails_once, verify=False)
    with pytest.warns(vgrad.FallbackWarning, match="a disk is full"):
        passing(PARAMS, {}, X)
    passing(PARAMS, {}, X)
    assert explain(passing)(PARAMS, {}, X).strategy == "recorded"


def of_words(params, buffers, x, length):
    return net(params, x[: length.item()])


WORDS = randn(B, 6, 5, seed=3), torch.tensor([2, 5, 1, 3])


def way(params=PARAMS, batch=WORDS, **options):
    compute = vgrad.per_sample_norm(of_words, **options)
    return explain(compute)(params, {}, *batch).strategy


def test_a_part_of_one_sample_runs_by_plain_autograd():
    assert_quantities(of_words, PARAMS, WORDS)
    assert way() == "loop"
    pairs = WORDS[0], torch.tensor([2, 2, 1, 1])
    assert way(batch=pairs) == "recorded"
    assert way(batch=(WORDS[0][:1], WORDS[1][:1])) == "recorded"
    assert way(randomness="different") == "recorded"  # a loop draws others
    assert way(strategy="recorded") == "recorded"
    large = {"w": torch.randn(2**18, 5).double(), "v": torch.randn(2**18).double()}
    assert way(large) == "recorded"
    wanted = {name: value.clone().requires_grad_() for name, value in PARAMS.items()}
    assert way(wanted) == "recorded"  # a loop would keep its graphs
    found = explain(vgrad.per_sample_norm(of_words))(PARAMS, {}, *WORDS)
    assert found.parts == (1,) * B
    assert [tuple(each) for each in found.costs] == [("loop", B, 8 * 18)]


def test_one_sample_that_runs_again_is_no_part():
    def writes(params, buffers, x):
        out = torch.zeros(2, dtype=x.dtype)
        out[0] = net(params, x)
        return out.sum()

    found = explain(vgrad.per_sample_norm(writes))(PARAMS, {}, X[:1])
    assert (found.strategy, found.parts) == ("recorded", (1,))


def test_parts_of_compiled_functions_are_recorded_as_their_graphs_are():
    compute = vgrad.compile(vgrad.per_sample_norm(of_words))
    assert compute.options.singly is compute.execute.plain.options.singly is False
    assert explain(compute)(PARAMS, {}, *WORDS).eager.strategy == "recorded"
