"""Clipped sums of the values of any function, against a float64 loop over samples."""

import itertools
import math
import pickle
from collections import OrderedDict, namedtuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import vgrad
from tests import oracle
from tests.losses import STRATEGIES, every_strategy, randn
from vgrad import dp, optim
from vgrad.distributed import data_parallel, single_process_mesh

SIZE, STEPS, RATE = 6, 3, 0.5
MASK = torch.tensor([True, False, True, True, False, True])
MODEL = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Dropout(0.5), nn.Linear(7, 3))
torch.manual_seed(0)
FMODEL, PARAMS, BUFFERS = vgrad.make_functional_with_buffers(
    nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
)
BATCH = randn(SIZE, 4, 5), torch.arange(4 * SIZE).view(SIZE, 4) % 3
LOSS = vgrad.batch_loss(FMODEL, F.cross_entropy)


def trained(params, buffers, x, y):
    """The change of the parameters after some local steps, of one client."""
    local = params
    for _ in range(STEPS):
        grads = torch.func.grad(LOSS)(local, buffers, x, y)
        local = {name: p - RATE * grads[name] for name, p in local.items()}
    return {name: local[name] - params[name] for name in params}


def trained_by_autograd(params, buffers, x, y):
    """The same, as a loop of torch trains."""
    local = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
    for _ in range(STEPS):
        grads = torch.autograd.grad(LOSS(local, buffers, x, y), [*local.values()])
        pairs = zip(local.items(), grads, strict=True)
        local = {n: (p - RATE * g).detach().requires_grad_() for (n, p), g in pairs}
    return {name: local[name].detach() - params[name] for name in params}


def trained_by_an_optimizer(params, buffers, x, y):
    tx = optim.sgd(RATE)
    local, state = params, tx.init(params)
    for _ in range(STEPS):
        grads = torch.func.grad(LOSS)(local, buffers, x, y)
        local, state = optim.step(tx, grads, state, local)
    return {name: local[name] - params[name] for name in params}


Moments = namedtuple("Moments", "mean square")
x = randn(SIZE, 3)
FUNCTIONS = {
    "trained": (trained, PARAMS, BATCH),
    "by autograd": (trained_by_autograd, PARAMS, BATCH),
    "by an optimizer": (trained_by_an_optimizer, PARAMS, BATCH),
    "one tensor": (lambda p, b, x: x, {}, (x,)),
    "scalars": (lambda p, b, x: Moments(x.mean(), x.square().mean()), {}, (x,)),
    "nested": (lambda p, b, x: (x, [2 * x, {"a": x.sum()}]), {}, (x,)),
    "ordered": (lambda p, b, x: OrderedDict(b=x, a=x[:0]), {}, (x,)),
    "complex": (lambda p, b, x: {"c": torch.fft.fft(x), "r": x}, {}, (x,)),
    "alike": (lambda p, b, x: {"one": x.new_ones(2)}, {}, (x,)),
    "a parameter": (lambda p, b, x: p["w"], {"w": randn(4)}, (x,)),
    "branches": (lambda p, b, x: x * (2 if x[0] > 0 else 3), {}, (x,)),
    "dictionary": (lambda p, b, d: d["x"] * d["k"], {}, ({"x": x, "k": 2},)),
}


def values_of(f, params, batch):
    """The value of each sample, by itself."""
    found = []
    for row in range(SIZE):
        sample = pytree.tree_map_only(torch.Tensor, lambda leaf, i=row: leaf[i], batch)
        found.append(f(params, {}, *sample))
    return found


def clipped(values, max_norm, mask=None):
    """The sum by the definition, norms and how many are clipped."""
    total, norms, counts = None, [], torch.ones(SIZE).bool() if mask is None else mask
    for value, count in zip(values, counts, strict=True):
        leaves = [
            leaf.detach().abs().square().sum() for leaf in pytree.tree_leaves(value)
        ]
        norms.append(math.sqrt(sum(map(float, leaves))))
        if not (count and math.isfinite(norms[-1])):
            continue
        factor = min(1.0, max_norm / norms[-1]) if norms[-1] else 1.0
        scaled = pytree.tree_map(lambda leaf, by=factor: leaf * by, value)
        total = scaled if total is None else pytree.tree_map(torch.add, total, scaled)
    kept = [norm for norm, count in zip(norms, counts, strict=True) if count]
    return total, torch.tensor(kept, dtype=torch.float64)


def assert_clipped(result, f, params, batch, max_norm, mask=None):
    total, norms = clipped(values_of(f, params, batch), max_norm, mask)
    structures = (pytree.tree_structure(each) for each in (result.sum, total))
    assert next(structures) == next(structures)
    oracle.assert_exact(result.norms, norms)
    for found, exact in zip(*map(pytree.tree_leaves, (result.sum, total)), strict=True):
        assert found.dtype == exact.dtype
        if exact.numel():
            oracle.assert_exact(found, exact)
    assert int(result.clipped) == int((norms > max_norm).sum())


@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize(
    ("name", "strategy"),
    sorted({*itertools.product(FUNCTIONS, STRATEGIES)} - {("by autograd", "vmap")}),
)
def test_the_sum_is_the_one_of_a_loop(name, strategy, chunk_size):
    f, params, batch = FUNCTIONS[name]
    _, norms = clipped(values_of(f, params, batch), math.inf)
    bound = 0.9 * float(norms.mean())
    options = {"strategy": strategy, "chunk_size": chunk_size}
    compute = vgrad.clipped_sum(f, max_norm=bound, **options)
    assert_clipped(compute(params, {}, *batch), f, params, batch, bound)
    result = compute(params, {}, *batch, mask=MASK)
    assert_clipped(result, f, params, batch, bound, MASK)


def test_changes_of_a_model_go_where_noise_goes():
    run = {"sampling_rate": 0.06, "noise_multiplier": 1.0, "steps": 5, "delta": 1e-3}
    plan = dp.Plan(dataset_size=100, max_norm=0.3, **run)
    compute = vgrad.clipped_sum(trained, **plan.clipping)
    assert compute.sensitivity.value == 0.3 / 6
    result = compute(PARAMS, BUFFERS, *BATCH)
    total, _ = clipped(values_of(trained, PARAMS, BATCH), 0.3)
    oracle.assert_exact(result.sum, {name: x / 6 for name, x in total.items()})
    key = dp.secret_key(seed=0)
    noisy = plan.add_noise(result.sum, compute.sensitivity, key=key, step=0)
    assert {n: x.shape for n, x in noisy.items()} == {
        n: x.shape for n, x in PARAMS.items()
    }
    groups = {"0.*": 0.1, "2.*": 0.2}
    plan = dp.Plan(dataset_size=100, max_norm=dp.group_clip(groups), **run)
    compute = vgrad.clipped_sum(trained, **plan.clipping)
    result = compute(PARAMS, BUFFERS, *BATCH)
    plan.add_noise(result.sum, compute.sensitivity, key=key, step=0)
    for pattern, bound in groups.items():

        def part(*sample, start=pattern[0]):
            return {n: x for n, x in trained(*sample).items() if n[0] == start}

        total, _ = clipped(values_of(part, PARAMS, BATCH), bound)
        oracle.assert_exact(
            {n: result.sum[n] for n in total}, {n: x / 6 for n, x in total.items()}
        )
    bound = torch.tensor(0.1, dtype=torch.float64)
    adapted = vgrad.clipped_sum(trained, max_norm=1.0).with_max_norm(bound)
    assert_clipped(adapted(PARAMS, {}, *BATCH), trained, PARAMS, BATCH, 0.1)


def test_automatic_clipping_and_layers():
    def f(p, b, x):
        return {"a": {"u": x, "v": 2 * x}, "b": {"u": x.sum()}}

    values = values_of(f, {}, (x,))
    norms = [math.sqrt(5 * float(v["a"]["u"].square().sum())) for v in values]
    layers = vgrad.clipped_sum(f, max_norm=1.0, clipping="per_layer")({}, {}, x)
    bound = math.sqrt(0.5)
    exact = sum(
        v["a"]["u"] * min(1, bound / n) for v, n in zip(values, norms, strict=True)
    )
    oracle.assert_exact(layers.sum["a"]["u"], exact)

    def one(p, b, x):
        return x

    options = {"clipping": "automatic", "rescale": True, "normalize_by": 3.0}
    result = vgrad.clipped_sum(one, max_norm=2.0, **options)({}, {}, x)
    exact = (x / (x.norm(dim=1, keepdim=True) + 0.01)).sum(0) / 3
    oracle.assert_exact(result.sum, exact)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e16])
@every_strategy
def test_samples_that_are_not_finite_add_zero(strategy, value):
    bad = x.float().clone()
    bad[1, 0], bad[4, 2] = value, value
    compute = vgrad.clipped_sum(
        lambda p, b, x: (x, x.sum()), max_norm=1.0, strategy=strategy
    )
    result, rest = compute({}, {}, bad), compute({}, {}, bad[[0, 2, 3, 5]])
    assert int(result.nonfinite) == 2
    assert result.norms[[1, 4]].isinf().logical_or(result.norms[[1, 4]].isnan()).all()
    oracle.assert_exact(result.sum, rest.sum, 1e-6)


@pytest.mark.parametrize("scale", [0.0, 1e-38, 1e-20, 1e-3, 1e3, 1e14])
def test_no_sample_adds_more_than_the_bound(scale):
    """In bfloat16 too: the sum and the norm are of the same values."""
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        batch = (x * scale).to(dtype)
        compute = vgrad.clipped_sum(lambda p, b, x: (x, x * x.sum() * 0), max_norm=1.0)
        one = [
            compute({}, {}, batch[i : i + 1]).sum[0].double().norm()
            for i in range(SIZE)
        ]
        assert max(one) <= 1 + 1e-6
        total = compute({}, {}, batch).sum
        assert total[0].dtype == torch.promote_types(dtype, torch.float32)


def test_an_empty_batch_has_the_tree_of_others():
    def f(p, b, x):
        return {"total": x.sum(), "rows": (2 * x, torch.fft.fft(x))}

    compute = vgrad.clipped_sum(f, max_norm=1.0)
    empty, full = compute({}, {}, x[:0]), compute({}, {}, x)
    assert pytree.tree_structure(empty) == pytree.tree_structure(full)
    for zero, other in zip(
        *map(pytree.tree_leaves, (empty.sum, full.sum)), strict=True
    ):
        assert zero.shape == other.shape
        assert zero.dtype == other.dtype
        assert not zero.any()
    assert empty.norms.shape == (0,)
    nothing = compute({}, {}, x, mask=torch.zeros(SIZE).bool())
    assert not any(leaf.any() for leaf in pytree.tree_leaves(nothing.sum))


def test_autocast_and_low_precision():
    params = {name: p.detach().bfloat16() for name, p in PARAMS.items()}
    batch = BATCH[0].bfloat16(), BATCH[1]
    result = vgrad.clipped_sum(trained, max_norm=0.3)(params, BUFFERS, *batch)
    exact, _ = clipped(values_of(trained, PARAMS, BATCH), 0.3)
    assert result.norms.dtype == torch.float32
    assert oracle.error(result.sum, exact) < 0.1
    params = {name: p.detach().float() for name, p in PARAMS.items()}
    compute = vgrad.clipped_sum(trained, max_norm=0.3)
    for _ in range(4):  # some of which are compared
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = compute(params, BUFFERS, BATCH[0].float(), BATCH[1])
    assert oracle.error(result.sum, exact) < 0.1


def test_random_numbers_are_options():
    def mask(p, b, x):
        return F.dropout(x, 0.5) + 0 * torch.randn(3)

    for strategy in ("auto", "loop"):
        with pytest.raises(RuntimeError, match="a loss without random numbers"):
            vgrad.clipped_sum(mask, max_norm=1.0, strategy=strategy)({}, {}, x)
    ones = torch.ones(64, 40)

    def draw(p, b, x):
        return F.dropout(x, 0.5)

    for randomness, kinds in (("same", 1), ("different", 64)):
        compute = vgrad.clipped_sum(draw, max_norm=1e6, randomness=randomness)
        torch.manual_seed(0)
        total = compute({}, {}, ones).sum
        assert {*total.tolist()} == ({0.0, 128.0} if kinds == 1 else {*total.tolist()})
        assert 48 < float(total.mean()) < 80
        state = torch.get_rng_state()
        vgrad.clipped_sum(lambda p, b, x: x, max_norm=1.0)({}, {}, ones)
        assert torch.equal(state, torch.get_rng_state())


@torch.library.custom_op("clipped_sum::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@twice.register_vmap
def _(info, dims, x):
    return 2 * x + 1, dims[0]


def test_values_that_vmap_gets_wrong_are_found():
    def wrong(p, b, x):
        return twice(x)

    with pytest.warns(vgrad.FallbackWarning, match="its gradient of 'value' differs"):
        result = vgrad.clipped_sum(wrong, max_norm=1e6)({}, {}, x)
    oracle.assert_exact(result.sum, 2 * x.sum(0))
    for strategy in ("recorded", "vmap"):
        with pytest.raises(vgrad.UnsupportedOp, match="expected gradients that agree"):
            vgrad.clipped_sum(wrong, max_norm=1.0, strategy=strategy)({}, {}, x)

    def by_numpy(p, b, x):
        return torch.from_numpy(2 * x.numpy())

    with pytest.warns(vgrad.FallbackWarning, match="one sample after another"):
        result = vgrad.clipped_sum(by_numpy, max_norm=1e6)({}, {}, x)
    oracle.assert_exact(result.sum, 2 * x.sum(0))


def test_values_of_rounding_errors_raise_no_alarm():
    weight = randn(300, 300).float()

    def f(p, b, x):
        return torch.softmax(p["w"] @ x, -1).sum() - 1

    compute = vgrad.clipped_sum(f, max_norm=1.0, strategy="recorded")
    for seed in range(8):
        compute({"w": weight}, {}, randn(SIZE, 300, seed=seed).float())


def test_a_function_is_pure():
    calls = []

    def counts(params, buffers, x):
        calls.append(1)
        return x * len(calls)

    def writes(params, buffers, x):
        params["w"].add_(1)
        return x

    def writes_into_its_sample(params, buffers, x):
        return x.mul_(2)

    def rebinds(params, buffers, x):
        params["w"] = params["w"] + 1
        return x * params["w"]

    with pytest.raises(RuntimeError, match="expected a loss that depends on its arg"):
        vgrad.clipped_sum(counts, max_norm=1.0)({}, {}, x)
    params = {"w": torch.zeros(())}
    for strategy in ("auto", "recorded", "loop"):
        compute = vgrad.clipped_sum(writes, max_norm=1.0, strategy=strategy)
        with pytest.raises(RuntimeError, match="a write into 'params.w'"):
            compute({"w": torch.zeros(())}, {}, x)
        before = x.clone()
        for f, factor in ((writes_into_its_sample, 2), (rebinds, 1)):
            compute = vgrad.clipped_sum(f, max_norm=1e6, strategy=strategy)
            oracle.assert_exact(compute(params, {}, x).sum, factor * x.sum(0))
        assert torch.equal(x, before)
        assert not params["w"]


@pytest.mark.compiled
def test_graphs_pickles_reports_and_ranks():
    compute = vgrad.clipped_sum(trained, max_norm=0.3)
    exact = compute(PARAMS, BUFFERS, *BATCH)
    graphs = vgrad.compile(compute)
    again = pickle.loads(pickle.dumps(compute))
    with single_process_mesh("dp") as mesh:
        ranks = data_parallel(compute, mesh)
        for each in (graphs, graphs, again, ranks, vgrad.compile(ranks)):
            result = each(PARAMS, BUFFERS, *BATCH)
            assert type(result) is vgrad.ClippedValues
            oracle.assert_exact(result, exact)
            assert each.sensitivity == compute.sensitivity
    assert [report.calls for report in graphs.reports()] == [1]
    padded = vgrad.compile(compute, batch_sizes=[8])
    part = compute(PARAMS, BUFFERS, *(each[:5] for each in BATCH))
    oracle.assert_exact(padded(PARAMS, BUFFERS, *(each[:5] for each in BATCH)), part)
    report = vgrad.explain(compute)(PARAMS, BUFFERS, *BATCH)
    assert report.strategy == "recorded"
    assert [row.names for row in report.rows] == [(name,) for name in PARAMS]
    assert report.verified.startswith("verified against plain autograd")


def test_results_are_constants_also_inside_transforms():
    fresh = vgrad.clipped_sum(trained, max_norm=0.3)
    x, y = BATCH
    both = torch.stack([x, 2 * x])
    norms = torch.vmap(lambda x: fresh(PARAMS, BUFFERS, x, y).norms)(both)
    exact = fresh(PARAMS, BUFFERS, x, y)
    oracle.assert_exact(norms[0], exact.norms)
    assert not fresh(PARAMS, BUFFERS, x[:0], y[:0]).sum["0.bias"].any()
    with pytest.raises(RuntimeError, match="is not differentiated again"):
        exact.norms.sum().backward()
    with torch.inference_mode():
        result = fresh(PARAMS, BUFFERS, x.clone(), y)
    oracle.assert_exact(result, exact)


def same(params, buffers, x):
    return x


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: vgrad.clipped_sum(MODEL, max_norm=1.0), TypeError, "got a Sequential"),
        (lambda: vgrad.clipped_sum(None, max_norm=1.0), TypeError, "got a NoneType"),
        (lambda: vgrad.clipped_sum(same, max_norm=0), ValueError, "max_norm > 0"),
        (
            lambda: vgrad.clipped_sum(same, max_norm={"a": 1.0}),
            ValueError,
            r"clipped_sum\(max_norm=.*expected a number",
        ),
        (
            lambda: vgrad.clipped_sum(same, max_norm=1.0, chunk_size="auto"),
            ValueError,
            "pass a number of samples as chunk_size",
        ),
        (
            lambda: vgrad.clipped_sum(
                same, max_norm=1.0, loss_scale=vgrad.precision.StaticLossScale(2.0)
            ),
            ValueError,
            "Scale inside it",
        ),
        (
            lambda: vgrad.clipped_sum(same, max_norm=1.0, has_aux=True),
            TypeError,
            "expected options among max_norm, clipping, normalize_by, rescale",
        ),
    ],
)
def test_options_are_checked(call, error, words):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize(
    ("f", "error", "words"),
    [
        (lambda p, b, x: (x > 0).sum(), TypeError, r"int64 \(\) in 'value'.*\.float"),
        (lambda p, b, x: {"a": x, "b": 1.0}, TypeError, r"got 1.0 in 'b'"),
        (lambda p, b, x: None, TypeError, "got None in 'value'"),
        (lambda p, b, x: {}, ValueError, r"got 0 by the names \[\]"),
        (
            lambda p, b, x: {"a.b": x, "a": {"b": x}},
            ValueError,
            r"got 2 by the names \['a.b'\]. Leave dots out",
        ),
        (
            lambda p, b, x: x[: 1 + int(x[0] > 0)],
            ValueError,
            "expected the same tree from f for all samples",
        ),
        (
            lambda p, b, x: {"a": x} if x[0] > 0 else {"b": x},
            ValueError,
            "expected the same tree from f for all samples",
        ),
        (
            lambda p, b, x: x if x[0] > 0 else torch.fft.fft(x),
            ValueError,
            "expected the same tree from f for all samples",
        ),
    ],
)
def test_trees_are_checked(f, error, words):
    for strategy in ("auto", "loop"):
        with pytest.raises(error, match=words):
            vgrad.clipped_sum(f, max_norm=1.0, strategy=strategy)({}, {}, x)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((None, {}, x), TypeError, r"clipped_sum\(params\): expected a dictionary"),
        (({"w": 1.0}, {}, x), TypeError, "a tensor in params.w, got a float"),
        (({}, {}), ValueError, "got no tensor"),
        (({}, {}, x, x[:2]), ValueError, r"got sizes \[2, 6\]"),
    ],
)
def test_arguments_are_checked(arguments, error, words):
    with pytest.raises(error, match=words):
        vgrad.clipped_sum(same, max_norm=1.0)(*arguments)


def test_patterns_are_of_places():
    options = {"max_norm": {"0.*": 1.0}, "clipping": "per_layer"}
    with pytest.raises(ValueError, match=r"clipped_sum.*but \['1'\] match none"):
        vgrad.clipped_sum(lambda p, b, x: ((x,), x), **options)({}, {}, x)
