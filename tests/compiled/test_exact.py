"""A replay has the bits of eager mode, for all that can be compiled."""

import contextlib
import warnings

import pytest
import torch
from torch.nn import functional as F

import vgrad
from tests import losses, oracle
from tests.compiled import problems
from tests.compiled.problems import ran, same_calls
from vgrad import optim
from vgrad.precision import DynamicLossScale, StaticLossScale
from vgrad.training import (
    EnsembleState,
    TrainState,
    ensemble_train_step,
    private_step,
    train_step,
)

pytestmark = pytest.mark.compiled
slow = pytest.mark.slow
QUICK = {("mlp", "flat"), ("mlp", "gram, cross"), ("cnn", "norm"), ("inside", "grad")}


def transforms(*quick):
    """Parametrize all transforms; those not named are slow together."""
    marked = [
        name if name in quick else pytest.param(name, marks=slow)
        for name in problems.TRANSFORMS
    ]
    return pytest.mark.parametrize("name", marked)


def matrix():
    for net in ("mlp", "cnn", "lstm", "tied", "transformer", "inside"):
        for name in problems.TRANSFORMS:
            marks = () if (net, name) in QUICK else slow
            yield pytest.param(net, name, marks=marks)


def built(net, dtype=torch.float32):
    if net == "inside":
        return problems.gradient_inside_built(dtype)
    return problems.built(net, dtype)


def compare(net, name, dtype=torch.float32, size=5, around=contextlib.nullcontext, **o):
    """Compare three calls of a transform with eager mode, on batches of their own."""
    loss, params, buffers, draw = built(net, dtype)
    make = problems.TRANSFORMS[name]
    compiled = vgrad.compile(make(loss, **o), fallback="error")
    eager = make(loss, **o)
    calls = [(params, buffers, *draw(size)) for _ in range(3)]

    def run(compute):
        def of(*given):
            with around():
                return problems.call(name, compute, given)

        return of

    # Inputs are read at each call: parameters may have moved.
    calls[2] = ({n: p * 1.5 for n, p in params.items()}, *calls[2][1:])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", vgrad.FallbackWarning)
        same_calls(run(compiled), run(eager), calls)
    return compiled


@pytest.mark.parametrize(("net", "name"), list(matrix()))
def test_every_transform_of_every_net(net, name):
    ran(compare(net, name), calls=2)


@transforms("weighted")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype, name):
    ran(compare("mlp", name, dtype), calls=2)


@transforms("flat")
@pytest.mark.parametrize("randomness", ["different", "same"])
def test_dropout_draws_what_eager_mode_draws(randomness, name):
    if (name, randomness) == ("gram, cross", "same"):
        pytest.skip("draws twice from one state, which no graph can")
    ran(compare("dropout", name, randomness=randomness), calls=2)


@transforms("flat", "moments")
@pytest.mark.parametrize(
    ("net", "randomness"),
    [
        ("mlp", "error"),
        pytest.param("dropout", "different", marks=slow),
        pytest.param("dropout", "same", marks=slow),
        pytest.param("tied", "error", marks=slow),
        pytest.param("lstm, dropout", "different", marks=slow),
        pytest.param("inside", "error", marks=slow),
    ],
)
def test_chunks(net, randomness, name):
    if name.startswith("gram") and randomness == "same":
        pytest.skip("each chunk draws from one state again, which no graph can")
    compiled = compare(net, name, size=7, chunk_size=3, randomness=randomness)
    if not name.startswith("gram"):
        counts = [each.calls for each in compiled.reports()]
        assert counts == [5, 2]  # of three samples, and of the one that is left
    assert all(each.backend == "replay" for each in compiled.reports())


@slow
@pytest.mark.parametrize("name", problems.TRANSFORMS)
def test_chunks_of_a_size_that_suits_the_memory(name):
    compare("mlp", name, chunk_size="auto")


def mixed():
    return torch.autocast("cpu", torch.bfloat16)


@transforms("per_layer")
@pytest.mark.parametrize(
    "net", ["mlp", *(pytest.param(n, marks=slow) for n in ("cnn", "tied", "lstm"))]
)
def test_autocast(net, name):
    ran(compare(net, name, around=mixed), calls=2)


@transforms("automatic")
@pytest.mark.parametrize("chunk_size", [None, pytest.param(3, marks=slow)])
def test_loss_scales(chunk_size, name):
    scale = StaticLossScale(2.0**7)
    compare("mlp", name, torch.float16, loss_scale=scale, chunk_size=chunk_size)


@slow
@pytest.mark.parametrize("name", problems.TRANSFORMS)
@pytest.mark.parametrize("randomness", ["different", "same"])
def test_all_options_together(randomness, name):
    if name.startswith("gram") and randomness == "same":
        pytest.skip("each chunk draws from one state again, which no graph can")
    compare(
        "lstm, dropout",
        name,
        size=7,
        around=mixed,
        chunk_size=3,
        randomness=randomness,
        loss_scale=StaticLossScale(2.0**7),
    )


@pytest.mark.parametrize("name", ["norm", "flat"])
@pytest.mark.parametrize("chunk_size", [None, pytest.param(3, marks=slow)])
def test_aux(chunk_size, name):
    loss, params, buffers, draw = problems.built("mlp")

    def with_aux(params, buffers, x, y):
        return loss(params, buffers, x, y), {"x": x * 2, "y": [y]}

    options = {"has_aux": True, "chunk_size": chunk_size}
    make = problems.TRANSFORMS[name]
    compiled = vgrad.compile(make(with_aux, **options), fallback="error")
    eager = make(with_aux, **options)
    same_calls(
        lambda *given: problems.call(name, compiled, given),
        lambda *given: problems.call(name, eager, given),
        [(params, buffers, *draw(5)) for _ in range(3)],
    )


@transforms("gram, cross", "weighted")
def test_masks(name):
    loss, params, buffers, draw = problems.built("mlp")
    make = problems.TRANSFORMS[name]
    compiled, eager = vgrad.compile(make(loss), fallback="error"), make(loss)
    masks = [torch.arange(5) % 2 == number % 2 for number in range(3)]
    same_calls(
        lambda mask, *given: problems.call(name, compiled, given, mask),
        lambda mask, *given: problems.call(name, eager, given, mask),
        [(mask, params, buffers, *draw(5)) for mask in masks],
    )
    ran(compiled, calls=2)


@pytest.mark.parametrize("strategy", ["recorded", "vmap"])
def test_strategies(strategy):
    ran(compare("mlp", "flat", strategy=strategy), calls=2)


def test_a_scale_that_moves_is_an_input():
    loss, params, buffers, draw = problems.built("mlp")
    eager = vgrad.clipped_grad(loss, max_norm=0.7, loss_scale=StaticLossScale(2.0))
    compiled = vgrad.compile(eager, fallback="error")

    def scaled(compute):
        return lambda scale, *given: compute.with_loss_scale(scale)(*given)

    scales = [StaticLossScale(torch.tensor(2.0**power)) for power in (1, 4, 30)]
    calls = [(scale, params, buffers, *draw(4)) for scale in scales]
    same_calls(scaled(compiled), scaled(eager), calls)
    ran(compiled, calls=2)


def batch_loss(make=problems.mlp, criterion=F.cross_entropy):
    torch.manual_seed(0)
    fmodel, params, buffers = vgrad.make_functional_with_buffers(make())
    return vgrad.batch_loss(fmodel, criterion), params, buffers


def normed():
    nn = torch.nn
    return nn.Sequential(
        nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)
    )


def run_steps(step, state, batches):
    """Take steps, and return all states and metrics."""
    found = []
    for batch in batches:
        state, metrics = step(state, *batch)
        # A donated state is written into by the next step.
        found.append(losses.pytree.tree_map(torch.clone, (state, metrics)))
    return found


def same_steps(make, start, batches):
    """Demand the same bits of all states and metrics of compiled and eager steps."""
    compiled = vgrad.compile(make(), fallback="error")
    oracle.assert_exact(
        run_steps(compiled, start(), batches), run_steps(make(), start(), batches), 0
    )
    return compiled


TRAIN = {
    "plain": {},
    "donated": {"donate": True},
    "bfloat16": {"policy": "bfloat16", "make": problems.mlp},
    "float16": {"policy": "float16", "make": problems.mlp},
    "float16, donated": {"policy": "float16", "make": problems.mlp, "donate": True},
}


@pytest.mark.parametrize(
    "name",
    [n if n.startswith("float16") else pytest.param(n, marks=slow) for n in TRAIN],
)
@pytest.mark.parametrize("optimizer", ["adam", pytest.param("sgd", marks=slow)])
def test_train_step(optimizer, name):
    options = dict(TRAIN[name])
    loss, params, buffers = batch_loss(options.pop("make", normed))
    tx = optim.adam(1e-2) if optimizer == "adam" else optim.sgd(0.1, momentum=0.9)
    scale = DynamicLossScale(2.0**20, period=2)
    scaled = {"loss_scale": scale} if name.startswith("float16") else {}
    draw = losses.vectors(5)
    batches = [draw(6) for _ in range(5)]
    if scaled:
        batches[2][0][0, 0] = 1e9

    def start():
        own = ({n: x.clone() for n, x in each.items()} for each in (params, buffers))
        return TrainState.create(tx, *own, seed=1)

    compiled = same_steps(
        lambda: train_step(loss, tx, **options, **scaled), start, batches
    )
    assert any(each.calls == 4 for each in compiled.reports())
    if scaled:
        taken = run_steps(compiled, start(), batches)
        skipped = [float(metrics["skipped"]) for _, metrics in taken]
        assert 0.0 in skipped
        assert skipped[2] == 1.0


def test_train_step_of_single_samples_on_buckets():
    torch.manual_seed(0)
    model = problems.mlp().double()
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    loss = vgrad.sample_loss(fmodel, F.cross_entropy)
    tx, draw = optim.adam(1e-2), losses.vectors(5)
    step = train_step(loss, tx, loss_scale=StaticLossScale(2.0**8))
    compiled = vgrad.compile(step, batch_sizes=(4, 8))
    state = expected = TrainState.create(tx, params, buffers, seed=1)
    for size in (6, 3, 7, 9):
        x, y = draw(size)
        state, metrics = compiled(state, x.double(), y)
        expected, told = step(expected, x.double(), y)
        oracle.assert_exact(metrics["loss"], told["loss"])
    oracle.assert_exact(state.params, expected.params)
    assert sum(each.calls for each in compiled.reports()) > 1


def test_train_step_with_aux():
    loss, params, buffers = batch_loss()

    def with_aux(params, buffers, x, y):
        return loss(params, buffers, x, y), {"x": x + 1}

    tx = optim.sgd(0.1)
    draw = losses.vectors(5)
    same_steps(
        lambda: train_step(with_aux, tx, has_aux=True),
        lambda: TrainState.create(tx, params, buffers, seed=1),
        [draw(6) for _ in range(3)],
    )


def test_what_a_caller_does_to_results_stays_with_the_caller():
    def loss(params, buffers, x):
        aux = {"two": torch.scalar_tensor(2.0), "three": torch.tensor(3.0)}
        return (params["w"] * x).sum(), aux | {"row": torch.scalar_tensor(2.0)[None]}

    tx = optim.sgd(0.1)
    step = vgrad.compile(train_step(loss, tx, has_aux=True), fallback="error")
    state = TrainState.create(tx, {"w": torch.ones(2)}, {})
    for _ in range(4):
        state, metrics = step(state, torch.ones(2))
        found = [each.item() for each in metrics["aux"].values()]
        assert found == [2.0, 3.0, 2.0]
        for each in metrics["aux"].values():
            each.add_(7)


def plan(**changes):
    fields = {
        "dataset_size": 60,
        "sampling_rate": 0.2,
        "noise_multiplier": 0.8,
        "max_norm": 0.5,
        "steps": 50,
        "delta": 1e-5,
    }
    return vgrad.dp.Plan(**{**fields, **changes})


def padded(batch, total):
    """Fill up a batch as the compiled step does, and say what counts."""
    size = len(batch[0])
    fill = [torch.cat([x, x[:1].expand(total - size, *x.shape[1:])]) for x in batch]
    return tuple(fill), torch.arange(total) < size


class Padded:
    """An eager clipped sum of batches that are filled up to one of a few sizes."""

    def __init__(self, clipped, sizes):
        self.clipped, self.sizes = clipped, sizes
        self.sensitivity = clipped.sensitivity

    def with_loss_scale(self, scale):
        return Padded(self.clipped.with_loss_scale(scale), self.sizes)

    def __call__(self, params, buffers, *batch):
        size = len(batch[0])
        if not size:
            return self.clipped(params, buffers, *batch)
        total = next(each for each in self.sizes if each >= size)
        batch, mask = padded(batch, total)
        return self.clipped(params, buffers, *batch, mask=mask)


def poisson(chosen, draw, state):
    """The batches of a run: those of the plan's sampler, of one data set."""
    torch.manual_seed(3)
    data = draw(chosen.dataset_size)
    indices = [list(each) for each in chosen.sampler(state)]
    return [tuple(x[index] for x in data) for index in indices]


PRIVATE = {
    "plain": ("mlp", {}),
    "donated": ("mlp", {"donate": True}),
    "dropout": ("dropout", {"randomness": "different"}),
    "the same dropout": ("dropout", {"randomness": "same"}),
    "bfloat16": ("mlp", {"policy": "bfloat16"}),
    "float16": ("mlp", {"policy": "float16"}),
    "a dynamic scale": (
        "mlp",
        {"policy": "float16", "loss_scale": DynamicLossScale(2.0**8, period=3)},
    ),
}


@slow
@pytest.mark.parametrize("name", PRIVATE)
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_fifty_poisson_batches_of_a_private_step(optimizer, name):
    import dataclasses

    net, options = PRIVATE[name]
    loss, params, buffers, draw = problems.built(net)
    tx = optim.adam(1e-2) if optimizer == "adam" else optim.sgd(0.1, momentum=0.9)
    chosen, sizes = plan(), (6, 12, 30)
    torch.manual_seed(2)

    def start():
        own = {n: x.clone() for n, x in params.items()}
        return TrainState.create(tx, own, buffers, seed=1)

    batches = poisson(chosen, draw, start())
    batches[7] = tuple(x[:0] for x in batches[7])
    step = private_step(loss, tx, chosen, **options)
    compiled = vgrad.compile(step, batch_sizes=list(sizes), fallback="error")
    eager = dataclasses.replace(step, clipped=Padded(step.clipped, sizes))
    oracle.assert_exact(
        run_steps(compiled, start(), batches), run_steps(eager, start(), batches), 0
    )
    found = [each for each in compiled.reports() if each.name == "clipped_grad"]
    assert {len(batch[0]) for batch in batches} > {0}
    assert len(found) <= len(sizes)
    assert sum(each.calls for each in found) == len(batches) - 1 - len(found)
    # A scale that grows overflows at last.
    assert not sum(each.redos for each in found) or name == "a dynamic scale"
    assert len(compiled.reports()) <= len(sizes) + 1


@slow
def test_sizes_follow_from_the_plan():
    loss, params, buffers, draw = problems.built("mlp")
    chosen, tx = plan(), optim.sgd(0.1)
    start = TrainState.create(tx, params, buffers, seed=1)
    batches = poisson(chosen, draw, start)
    step = private_step(loss, tx, chosen)
    compiled = vgrad.compile(step, fallback="error")
    found = run_steps(compiled, start, batches)
    expected = run_steps(step, start, batches)
    # A batch that is filled up may be rounded in another way than on its own.
    for (state, metrics), (exact, others) in zip(found, expected, strict=True):
        oracle.assert_exact(state.params, exact.params, 1e-5)
        for each in ("samples", "clipped", "nonfinite"):
            oracle.assert_exact(metrics[each], others[each], 0)
    clipped = [each for each in compiled.reports() if each.name == "clipped_grad"]
    assert len(clipped) <= 4


def members(count=3, make=problems.mlp, dtype=torch.float32):
    torch.manual_seed(0)
    models = [make().to(dtype) for _ in range(count)]
    return vgrad.stack(models)


STRATEGIES = ["vmap", *(pytest.param(n, marks=slow) for n in ("hybrid", "loop"))]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("own", [False, True])
def test_ensemble_forward(own, strategy):
    fmodel, params, buffers = members()
    options = {"in_dims": 0 if own else None, "strategy": strategy}
    eager = vgrad.ensemble_forward(fmodel.eval(), **options)
    compiled = vgrad.compile(eager, fallback="error")
    calls = [
        (params, buffers, torch.randn(*([3] if own else []), 4, 5)) for _ in range(3)
    ]
    same_calls(compiled, eager, calls)
    ran(compiled, calls=2)


def test_what_is_detached_requires_no_grad():
    class Own(torch.nn.Linear):
        def forward(self, x):
            detached = self.weight.detach()
            return super().forward(x), detached, detached.view(-1)

    fmodel, params, buffers = vgrad.combine_state_for_ensemble([Own(2, 2)] * 3)
    eager = vgrad.ensemble_forward(fmodel)
    compiled = vgrad.compile(eager, fallback="error")
    assert params["weight"].requires_grad
    with torch.no_grad():
        for _ in range(3):
            for compute in (eager, compiled):
                found = compute(params, buffers, torch.ones(4, 2))
                assert not any(each.requires_grad for each in found)
    ran(compiled, calls=2)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ensemble_forward_in_chunks_and_with_buffers(strategy):
    fmodel, params, buffers = members(make=normed)
    eager = vgrad.ensemble_forward(fmodel, strategy=strategy)
    compiled = vgrad.compile(eager, fallback="error")
    calls = [(params, buffers, torch.randn(4, 5)) for _ in range(3)]
    same_calls(compiled.with_buffers, eager.with_buffers, calls)
    ran(compiled, calls=2)
    fmodel, params, buffers = members()
    eager = vgrad.ensemble_forward(fmodel, strategy=strategy, chunk_size=3)
    compiled = vgrad.compile(eager, fallback="error")
    same_calls(compiled, eager, [(params, buffers, each[2]) for each in calls])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("shared", [(), ("0.*",)])
def test_ensemble_grad(shared, strategy):
    fmodel, params, buffers = members(make=lambda: problems.mlp(0.5))
    params, buffers = vgrad.ensemble.share(params, buffers, shared)
    loss = vgrad.batch_loss(fmodel, F.cross_entropy)
    eager = vgrad.ensemble_grad(loss, strategy=strategy, shared=shared)
    compiled = vgrad.compile(eager, fallback="error")
    draw = losses.vectors(5)
    same_calls(compiled, eager, [(params, buffers, *draw(4)) for _ in range(3)])
    ran(compiled, calls=2)


def test_ensemble_grad_with_aux_and_scales():
    fmodel, params, buffers = members()
    loss = vgrad.batch_loss(fmodel, F.cross_entropy)

    def with_aux(params, buffers, x, y):
        return loss(params, buffers, x, y), {"x": x + 1}

    eager = vgrad.ensemble_grad(with_aux, has_aux=True)
    compiled = vgrad.compile(eager, fallback="error")
    draw = losses.vectors(5)
    calls = [(torch.rand(3), params, buffers, *draw(4)) for _ in range(3)]
    same_calls(
        lambda scale, *given: compiled(*given, loss_scale=scale),
        lambda scale, *given: eager(*given, loss_scale=scale),
        calls,
    )
    ran(compiled, calls=2)


ENSEMBLES = {
    "plain": {},
    "donated": {"donate": True},
    "shared": {"shared": ("0.*",)},
    "bfloat16": {"policy": "bfloat16"},
    "float16": {"policy": "float16"},
    "loop": {"strategy": "loop"},
}


@pytest.mark.parametrize(
    "name", [n if n == "float16" else pytest.param(n, marks=slow) for n in ENSEMBLES]
)
def test_ensemble_train_step(name):
    options = ENSEMBLES[name]
    shared = options.get("shared", ())
    fmodel, params, buffers = members(make=lambda: problems.mlp(0.5))
    params, buffers = vgrad.ensemble.share(params, buffers, shared)
    loss = vgrad.batch_loss(fmodel, F.cross_entropy)
    rates = torch.tensor([0.01, 0.1, 0.2])
    tx = optim.adam(1e-2) if shared else vgrad.for_members(optim.adam, lr=rates)
    draw = losses.vectors(5)
    batches = [[x.expand(3, *x.shape).clone() for x in draw(6)] for _ in range(5)]
    batches[3][0][1] = 1e30  # whose gradients overflow, for the second member alone

    def start():
        own = ({n: x.clone() for n, x in each.items()} for each in (params, buffers))
        state = EnsembleState.create(tx, *own, shared=shared, seed=1)
        return state._replace(active=torch.tensor([True, True, False]))

    compiled = same_steps(
        lambda: ensemble_train_step(loss, tx, in_dims=0, **options), start, batches
    )
    ran(compiled, calls=4)
    _, metrics = run_steps(compiled, start(), batches)[3]
    assert float(metrics["skipped"][0]) == float(metrics["skipped"][2]) == 0


@pytest.mark.parametrize("donate", [False, True])
def test_an_ensemble_of_active_members_is_captured(donate):
    fmodel, params, buffers = members(make=problems.mlp)
    step = ensemble_train_step(
        vgrad.batch_loss(fmodel, F.cross_entropy), optim.adam(1e-2), donate=donate
    )

    def start():
        own = ({n: x.clone() for n, x in each.items()} for each in (params, buffers))
        return EnsembleState.create(optim.adam(1e-2), *own, seed=1)

    draw = losses.vectors(5)
    compiled = same_steps(lambda: step, start, [draw(6) for _ in range(3)])
    ran(compiled, calls=2)


def test_a_model_of_transformers_is_captured():
    """Its classes hold objects that cannot be compared, which no forward pass uses."""
    library = pytest.importorskip(
        "transformers", reason="transformers is not installed"
    )
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = library.BertConfig(vocab_size=20, intermediate_size=16, **sizes)
    torch.manual_seed(0)
    model = library.BertForSequenceClassification(config).eval()
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    criterion = lambda output, y: F.cross_entropy(output.logits, y)  # noqa: E731
    eager = vgrad.clipped_grad(vgrad.sample_loss(fmodel, criterion), max_norm=0.5)
    compiled = vgrad.compile(eager, fallback="error")
    for seed in range(2):
        x = torch.randint(20, (4, 6), generator=torch.Generator().manual_seed(seed))
        given = params, buffers, x, torch.tensor([0, 1, 0, 1])
        oracle.assert_exact(compiled(*given).grads, eager(*given).grads, 0)
    ran(compiled, calls=1)
