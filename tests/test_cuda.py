"""What a GPU computes, against the float64 loop."""

import contextlib
import importlib.util

import pytest
import torch
from torch import nn

import vgrad
from tests import losses, oracle, streams
from vgrad.dp import chacha, noise
from vgrad.factors import products
from vgrad.training import TrainState, private_step
from vgrad.tree import tensors

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
    pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning"),
]

STRATEGIES = ("auto", "vmap", "loop")


def build(name, dtype, size=5):
    torch.manual_seed(0)
    case = losses.CASES[name]
    model = case.model().to("cuda", dtype)

    def place(leaf):
        return leaf.to("cuda", dtype if leaf.is_floating_point() else None)

    batch = torch.utils._pytree.tree_map_only(torch.Tensor, place, case.batch(size))
    split = vgrad.make_functional_with_buffers(model, disable_autograd_tracking=True)
    return case, model, split, batch


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", losses.CASES)
def test_quantities_equal_the_reference(name, strategy):
    case, model, (fmodel, params, buffers), batch = build(name, torch.float64)
    expected = oracle.model_gradients(model, case.run, batch, 5)
    loss = vgrad.sample_loss(fmodel, case.criterion)
    options = {"strategy": strategy, "chunk_size": 2}
    grads = vgrad.per_sample_grad(loss, **options)(params, buffers, *batch)
    assert oracle.error(grads, expected) < 1e-9
    norms = vgrad.per_sample_norm(loss, **options)(params, buffers, *batch)
    torch.testing.assert_close(norms, oracle.norms(expected), rtol=1e-9, atol=0)
    compute = vgrad.clipped_grad(loss, max_norm=0.5, **options)
    found = compute(params, buffers, *batch).grads
    assert oracle.error(found, oracle.clipped(expected, 0.5)) < 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("precision", ["highest", "medium"])
def test_the_bound_holds_in_every_precision(dtype, autocast, precision):
    case, _, (fmodel, params, buffers), (x, y) = build("mlp", dtype)
    loss = vgrad.sample_loss(fmodel, lambda out, y: 100 * case.criterion(out, y))
    compute = vgrad.clipped_grad(loss, max_norm=0.1)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        for row in range(5):
            one = slice(row, row + 1)
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                result = compute(params, buffers, x[one], y[one])
            squares = sum(g.double().square().sum() for g in result.grads.values())
            assert float(squares) ** 0.5 <= 0.1 * (1 + 1e-6)
    finally:
        torch.set_float32_matmul_precision(before)


def test_nonfinite_samples_add_nothing():
    _, _, (fmodel, params, buffers), (x, y) = build("mlp", torch.float32)
    loss = vgrad.sample_loss(fmodel, torch.nn.functional.cross_entropy)
    compute = vgrad.clipped_grad(loss, max_norm=0.1)
    bad = x.clone()
    bad[2] = torch.nan
    found = compute(params, buffers, bad, y)
    keep = torch.tensor([0, 1, 3, 4], device="cuda")
    expected = compute(params, buffers, x[keep], y[keep])
    assert int(found.nonfinite) == 1
    assert oracle.error(found.grads, expected.grads) < 1e-5


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_autocast_means_the_same_under_every_strategy(name):
    case, _, (fmodel, params, buffers), batch = build(name, torch.float32)
    loss = vgrad.sample_loss(fmodel, case.criterion)
    found = {}
    for strategy in STRATEGIES:
        with torch.autocast("cuda", torch.bfloat16):
            compute = vgrad.per_sample_grad(loss, strategy=strategy)
            found[strategy] = compute(params, buffers, *batch)
    exact = vgrad.per_sample_grad(loss)(params, buffers, *batch)
    assert oracle.error(found["auto"], exact) > 1e-5
    for strategy in STRATEGIES:
        assert oracle.error(found[strategy], found["loop"]) < 0.03


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_a_donated_step_has_the_numbers_of_a_pure_one(name):
    tx = getattr(vgrad.optim, name)(torch.tensor(0.1, device="cuda"))
    generator = torch.Generator("cuda").manual_seed(0)

    def draw():
        return {"w": torch.randn(3, 4, device="cuda", generator=generator)}

    params, grads = draw(), [draw() for _ in range(5)]
    given = {"w": params["w"].clone()}
    state, given_state = tx.init(params), tx.init(given)
    for grad in grads:
        params, state = vgrad.optim.step(tx, grad, state, params)
        given, given_state = vgrad.optim.step(tx, grad, given_state, given, donate=True)
    torch.testing.assert_close(given["w"], params["w"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "radam", "lamb", "lion"])
def test_a_captured_step_replays_with_the_numbers_of_a_called_one(name):
    tx = getattr(vgrad.optim, name)(0.01)
    torch.manual_seed(0)
    start = {"w": torch.randn(4, 3, device="cuda")}
    grads = {"w": torch.randn(4, 3, device="cuda")}
    params = {"w": start["w"].clone()}
    state = tx.init(params)
    held = tensors((params, state))

    def step():
        new = vgrad.optim.step(tx, grads, state, params)
        for old, value in zip(held, tensors(new), strict=True):
            old.copy_(value)

    before = [each.clone() for each in held]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for old, value in zip(held, before, strict=True):
        old.copy_(value)
    expected, expected_state = start, tx.init(start)
    for _ in range(3):
        grads["w"].normal_()
        graph.replay()
        expected, expected_state = vgrad.optim.step(tx, grads, expected_state, expected)
    torch.testing.assert_close(params["w"], expected["w"])


def test_a_private_run_stays_on_the_device_and_repeats_from_its_state():
    case, _, (fmodel, params, buffers), (x, y) = build("cnn", torch.float32)
    tx = vgrad.optim.adam(0.01)
    step = private_step(vgrad.sample_loss(fmodel, case.criterion), tx, losses.plan())
    state = TrainState.create(tx, params, buffers)
    first, _ = step(state, x, y)
    again, _ = step(state, x, y)
    empty, _ = step(first, x[:0], y[:0])
    for name, value in first.params.items():
        assert value.is_cuda
        assert torch.equal(value, again.params[name])
        assert not torch.equal(value, empty.params[name])


def test_the_main_job_runs_on_the_device(tmp_path):
    pytest.importorskip("matplotlib")
    import vgrad.cli
    from tests.cli import runs
    from vgrad.__main__ import main

    images, out = runs.write_data(tmp_path / "data.npz"), tmp_path / "run"
    assert runs.train(images, out, "--device", "cuda") == 0
    assert main(["evaluate", str(out), "--data", str(images), "--device", "cuda"]) == 0
    assert vgrad.cli.load(out)(torch.zeros(1, 1, 1, 6)).shape == (1, 3)


def test_ensembles_stop_early_and_scale_their_losses_on_the_device():
    models = [torch.nn.Linear(4, 2).to("cuda") for _ in range(3)]
    fmodel, params, buffers = vgrad.stack(models)
    loss = vgrad.batch_loss(fmodel, torch.nn.functional.mse_loss)
    tx = vgrad.optim.sgd(0.1)
    step = vgrad.training.ensemble_train_step(loss, tx, policy="mixed_float16")
    state = vgrad.training.EnsembleState.create(tx, params, buffers)
    x, y = torch.ones(5, 4, device="cuda"), torch.ones(5, 2, device="cuda")
    state, _ = step(state, x, y)
    before = state.params["weight"]
    state = state._replace(active=torch.tensor([True, False, True]))
    state, _ = step(state, x, y)
    same = [
        torch.equal(a, b) for a, b in zip(before, state.params["weight"], strict=True)
    ]
    assert same == [False, True, False]


SLOPE = 2.0


class Sloped(torch.autograd.Function):
    generate_vmap_rule = True
    forward = staticmethod(lambda x: x.clone())
    setup_context = staticmethod(lambda ctx, inputs, output: None)
    backward = staticmethod(lambda ctx, g: g * SLOPE)


def test_a_graph_holds_for_what_a_backward_pass_names(monkeypatch):
    """There torch runs backward passes in threads of its own."""

    def loss(params, buffers, x):
        return Sloped.apply(params["w"] * x).sum()

    compute = vgrad.compile(vgrad.per_sample_norm(loss))
    given = {"w": torch.ones(2, device="cuda")}, {}, torch.ones(3, 2, device="cuda")
    before = [compute(*given) for _ in range(2)][1]
    monkeypatch.setattr(f"{__name__}.SLOPE", 4.0)
    assert torch.equal(compute(*given), 2 * before)
    assert len(compute.reports()) == 2


class Attention(torch.nn.Module):
    """Attention of two heads, by a kernel that keeps no weights."""

    def __init__(self):
        super().__init__()
        self.maps, self.out = torch.nn.Linear(16, 48), torch.nn.Linear(16, 3)

    def forward(self, x):
        q, k, v = self.maps(x).unflatten(-1, (6, 8)).transpose(1, 2).chunk(3, 1)
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(found.transpose(1, 2).flatten(2).mean(1))


class Recurrent(torch.nn.Module):
    """Two layers in both directions, each with a state of its own."""

    def __init__(self, kind):
        super().__init__()
        options = {"num_layers": 2, "bidirectional": True, "batch_first": True}
        self.net, self.out = kind(16, 8, **options), torch.nn.Linear(16, 3)

    def forward(self, x):
        return self.out(self.net(x)[0][:, -1])


NETS = {
    "attention": (Attention, (7, 16)),
    "lstm": (lambda: Recurrent(torch.nn.LSTM), (7, 16)),
    "gru": (lambda: Recurrent(torch.nn.GRU), (7, 16)),
    "convolutions": (
        lambda: torch.nn.Sequential(
            torch.nn.Conv2d(3, 16, 3, padding=1),
            torch.nn.GroupNorm(4, 16),
            torch.nn.ReLU(),
            torch.nn.Conv2d(16, 16, 3, stride=2, groups=2),
            torch.nn.Flatten(),
            torch.nn.Linear(784, 3),
        ),
        (3, 16, 16),
    ),
}


@pytest.mark.filterwarnings("error::vgrad.FallbackWarning")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_kernels_of_cuda_run_in_recorded_passes_and_graphs(name, autocast):
    """Nets of cuDNN, fused attention and convolutions, which a CPU runs otherwise."""
    make, shape = NETS[name]
    model = make().cuda()
    x = torch.randn(8, *shape, device="cuda")
    y, criterion = (
        torch.randint(3, (8,), device="cuda"),
        torch.nn.functional.cross_entropy,
    )
    fmodel, params, buffers = vgrad.make_functional_with_buffers(
        model, disable_autograd_tracking=True
    )
    loss = vgrad.sample_loss(fmodel, criterion)
    eager = vgrad.clipped_grad(loss, max_norm=0.5, strategy="recorded")
    graphs = vgrad.compile(eager, backend="cudagraph", fallback="error")
    exact = oracle.model_gradients(model, lambda m, x, y: criterion(m(x), y), (x, y), 8)
    expected = oracle.clipped(exact, 0.5)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        found = [eager(params, buffers, x, y).grads]
        found += [graphs(params, buffers, x, y).grads for _ in range(2)]
    for each in found:
        assert oracle.distance(each, expected) < (0.05 if autocast else 5e-3)
    assert [each.backend for each in graphs.reports()] == ["cudagraph"]


# Products of half precision factors; tests/persample/test_half_products.py runs more.

HALVES = [torch.bfloat16, torch.float16]


@contextlib.contextmanager
def switched(matmul, few=0):
    """Let torch round float32, or not, and products run in terms however few."""
    backend, before = torch.backends.cuda.matmul, products._FEW
    switch = backend.fp32_precision
    backend.fp32_precision, products._FEW = matmul, few
    try:
        yield
    finally:
        backend.fp32_precision, products._FEW = switch, before


def drawn(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("width", [64, 1000, 3000, 16000])
def test_units_cut_no_more_of_inner_products_than_is_counted(width, dtype):
    x = (drawn(2, 40, width).abs() + 0.5).to(dtype)
    assert products.in_halves(x, x)
    found = products.self_products(x)
    assert found.dtype == torch.float32
    exact = x.double() @ x.double().mT
    gap = (found - exact) / exact
    assert float(gap.abs().max()) <= products.CUT / 2
    long = products.inner(x[0], x[1])
    assert float((long / (x[0].double() @ x[1].double().T) - 1).abs().max()) < 1e-5


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("widths", [(64, 48), (48, 64), (4096, 4100)])
@pytest.mark.parametrize("rows", [100, 8192])
def test_sums_in_terms_lose_no_more_than_they_say(rows, widths, dtype):
    weights = drawn(rows, seed=2).abs()
    for a in (drawn(rows, widths[0]), drawn(rows, widths[0]).abs() + 0.5):
        pair = a.to(dtype), (drawn(rows, widths[1], seed=1).abs() + 0.5).to(dtype)
        exact = pair[1].double().T @ (pair[0].double() * weights.double()[:, None])
        most = pair[1].double().T @ (pair[0].double().abs() * weights[:, None])
        pair = [each[:, None, None] for each in pair]
        with switched("tf32"):
            found = products.by_terms(*pair, weights)[0]
            lost = products.rounding(*pair)
        assert lost > 0
        assert float(((found - exact).abs() / most).max()) <= lost


@pytest.mark.parametrize("clipping", ["flat", "automatic"])
@pytest.mark.parametrize("positions", [1, 64])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("matmul", ["ieee", "tf32"])
def test_no_sample_adds_more_than_its_bound(matmul, dtype, positions, clipping):
    # Numbers that are all rounded alike; of many positions, most terms cancel.
    if (matmul, dtype) == ("ieee", torch.float32) and positions > 1:
        pytest.skip("sums of equal numbers in float32 are another thing")
    sizes = 1 + drawn(12, 2, 1).abs()
    signs = torch.ones(positions, 1, device="cuda")
    signs[: positions // 2] *= -1 - 2**-6
    x = (sizes[:, :1].expand(-1, positions, 1024)).to(dtype)
    g = (sizes[:, 1:] * signs).expand(-1, -1, 512).to(dtype)
    params = {"w": torch.zeros(512, 1024, device="cuda", dtype=dtype)}
    compute = vgrad.clipped_grad(
        losses.linear, max_norm=0.7, clipping=clipping, strategy="recorded"
    )
    with switched(matmul):
        for row in range(12):
            one = slice(row, row + 1)
            found = compute(params, {}, x[one], g[one]).grads["w"]
            norm = float(found.double().norm())
            assert 0.6 < norm <= 0.7 * (1 + 1e-6)


IMAGES = {  # channels, outputs, side, kernel, options
    "few channels": (3, 64, 64, 7, {"stride": 2, "padding": 3}),
    "large maps": (64, 64, 32, 3, {"padding": 1}),
    "small maps": (256, 256, 4, 3, {"padding": 1}),
    "depthwise": (96, 96, 28, 7, {"groups": 96, "padding": 3}),
    "groups": (64, 64, 16, 3, {"groups": 4, "padding": 1}),
}


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("name", IMAGES)
def test_convolutions_are_clipped_as_they_are_summed(name, dtype):
    """Torch's default lets convolutions round float32, by whatever algorithm."""
    loss, params, (x, g) = losses.of_images(*IMAGES[name], dtype, "cuda")
    exact = oracle.loss_gradients(loss, params, {}, (x, g))
    norms = oracle.norms(exact)
    bound = 0.5 * float(norms.min())
    compute = vgrad.clipped_grad(loss, max_norm=bound, strategy="recorded")
    for row in range(6):
        one = slice(row, row + 1)
        found = compute(params, {}, x[one], g[one]).grads["w"]
        norm = float(found.double().norm())
        assert bound * 0.98 < norm <= bound * (1 + 1e-6)
    found = compute(params, {}, x, g)
    half = dtype != torch.float32
    torch.testing.assert_close(found.norms.double(), norms, rtol=1e-3, atol=0)
    assert oracle.error(found.grads, oracle.clipped(exact, bound)) < (
        2e-2 if half else 3e-3
    )


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer"])
def test_clipped_sums_are_as_near_to_float64_as_gradients_of_the_batch(name, dtype):
    torch.manual_seed(0)
    nets = {
        "mlp": (nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 10)), 2),
        "cnn": (
            nn.Sequential(
                *(nn.Conv2d(3, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU()),
                *(nn.Conv2d(32, 64, 3, 2), nn.Flatten(), nn.Linear(64 * 49, 10)),
            ),
            4,
        ),
        "transformer": (
            nn.Sequential(
                nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True),
                nn.Flatten(),
                nn.Linear(256 * 32, 10),
            ),
            3,
        ),
    }
    net, axes = nets[name]
    net = net.to("cuda")
    x = drawn(*{2: (64, 512), 3: (64, 32, 256), 4: (64, 3, 16, 16)}[axes])
    y = torch.arange(64, device="cuda") % 10
    batch, within = (x, y), switched("ieee")
    found, plain = losses.errors_of_sums(net, batch, dtype, within, "flat")
    assert found <= 1.2 * plain


@pytest.mark.parametrize("backend", ["replay", "inductor"])
def test_products_of_halves_are_captured(backend):
    if backend == "inductor" and importlib.util.find_spec("triton") is None:
        pytest.skip("no triton here")
    params = {"w": torch.zeros(512, 512, device="cuda")}
    x, g = drawn(8, 16, 512), drawn(8, 16, 512, seed=1)
    compute = vgrad.clipped_grad(losses.linear, max_norm=0.7)
    captured = vgrad.compile(compute, backend=backend)
    with torch.autocast("cuda", torch.bfloat16), switched("ieee"):
        expected = compute(params, {}, x, g).grads["w"]
        for _ in range(3):
            found = captured(params, {}, x, g).grads["w"]
    assert oracle.error({"w": found}, {"w": expected}) < 1e-4


NOISE = {"noise_multiplier": 1.5, "key": vgrad.dp.secret_key(seed=0)}
SIZE = vgrad.Sensitivity(0.4)


@pytest.mark.parametrize("unrolled", [False, True])
def test_words_of_noise_are_those_of_the_host(unrolled):
    keys = torch.randint(-(2**31), 2**31, (5, 8), dtype=torch.int32)
    steps = chacha.nonces(torch.tensor([0, 1, 2**40 + 7]))
    tiles = torch.tensor([0, 1, 2**20, 2**25, 2**26 - 1])
    theirs = chacha.keystream(keys, steps, tiles)
    where = (each.to("cuda") for each in (keys, steps, tiles))
    found = chacha.keystream(*where, unrolled=unrolled)
    assert torch.equal(found.cpu(), theirs)
    reference = streams.chacha20(
        *(keys[4].numpy().tobytes(), steps[2].numpy().tobytes(), 2**32 - 64, 64)
    )
    assert found[2, 4].cpu().numpy().tobytes() == reference.tobytes()


def noisy_sums(device, dtype, steps, compiled=False):
    """Return sums with the noise of several steps of a run, in float64 and on a CPU."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (1000, 1003), "b": (7,), "c": (), "d": (3, 0), "e": (50, 3, 3)}
    sums = {
        name: torch.randn(shape, generator=generator).to(device, dtype)
        for name, shape in shapes.items()
    }
    held, results = noise.Streams(), []
    for step in steps:
        own = noise.gaussian_noise("f", SIZE, step=step, streams=held, **NOISE)
        if compiled:
            added, _ = torch.compile(noise.Drawn.advanced)(own.drawn(sums), sums)
        else:
            added = own.added(sums)
        assert all(x.device == sums[name].device for name, x in added.items())
        flat = [added[name].flatten().double().cpu() for name in sums]
        results.append(torch.cat(flat))
    return torch.stack(results)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own code
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_noise_is_that_of_the_host_on_the_grid(dtype, compiled):
    """But for numbers at the edge of two values of the grid: one in 10^10 or so."""
    steps = [0, 1, 2, 3, 900]
    found = noisy_sums("cuda", dtype, steps, compiled)
    expected = noisy_sums("cpu", dtype, steps)
    grid = 2.0**-17  # of 0.6
    if dtype == torch.float64:
        assert torch.equal((found / grid).round() * grid, found)
    assert int((found != expected).sum()) <= 1
    assert float((found - expected).abs().max()) <= grid


def test_held_noise_needs_the_host_neither_for_numbers_nor_to_wait():
    sums = {
        "a": torch.zeros(1000, device="cuda"),
        "b": torch.zeros(3, 4, device="cuda"),
    }
    held, results = noise.Streams(), []

    def step(number):
        own = noise.gaussian_noise("f", SIZE, step=number, streams=held, **NOISE)
        return own.added(sums)

    step(0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = [step(number) for number in range(1, 5)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for number, result in enumerate(results, start=1):
        fresh = vgrad.dp.add_gaussian_noise(sums, SIZE, step=number, **NOISE)
        assert all(torch.equal(result[name], fresh[name]) for name in sums)
    torch.cuda.synchronize()
    with torch.profiler.profile() as profile:
        step(5)
        torch.cuda.synchronize()
    copies = [e.name for e in profile.events() if "DtoH" in e.name or "HtoD" in e.name]
    assert not copies


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_noise_has_neither_key_nor_step_in_its_code():
    from torch._inductor.utils import run_and_get_code

    sums = {"a": torch.zeros(1000, device="cuda")}
    step = 0x5EAF00D5EAF00D
    own = noise.gaussian_noise("f", SIZE, step=step, **NOISE)
    drawn = own.drawn(sums)
    _, code = run_and_get_code(torch.compile(noise.Drawn.advanced), drawn, sums)
    numbers = [step, step & 0xFFFFFFFF, step >> 32, *drawn.stream[0].unique().tolist()]
    for number in numbers:
        for text in (str(number), hex(number % 2**32)[2:]):
            assert text not in "".join(code)
