"""A quantity of an ensemble equals the loop over its members: outputs and gradients."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import vgrad
from tests import losses
from tests.examples import examples
from tests.losses import Case, Net
from tests.oracle import assert_exact
from vgrad.ensemble import ensemble_forward, ensemble_grad

EXACT, MEMBERS = 1e-10, 4
STRATEGIES = ["vmap", "loop", "hybrid", "auto"]
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


def numbers(size):
    return torch.randn(size, 4), torch.randn(size, 2)


def normed():
    """No bias in front of the norm: its gradient is rounding."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 2, stride=2, groups=2),
        nn.Flatten(),
        nn.Linear(4 * 3 * 3, 3),
    )


def pairs():
    """An embedding that pads, an LSTM and attention of its outputs."""

    def forward(self, tokens):
        hidden, _ = self.lstm(self.embed(tokens))
        return self.head(self.attend(hidden, hidden, hidden)[0].mean(1))

    return Net(
        forward,
        embed=nn.Embedding(7, 4, padding_idx=2),
        lstm=nn.LSTM(4, 4, batch_first=True),
        attend=nn.MultiheadAttention(4, 2, batch_first=True),
        head=nn.Linear(4, 3),
    )


def layers(forward):
    """Make models of two layers whose members may take different branches."""
    return lambda: Net(forward, first=nn.Linear(4, 3), last=nn.Linear(3, 2))


def asks_once(self, x):
    h = self.first(x)
    return self.last(h.tanh() if self.first.bias.sum() > 0 else h.relu() * 2)


def asks_twice(self, x):
    h = self.first(x)
    if h.sum() > 0:
        h = h * 2 if h[0, 0] > h[0, 1] else h.exp()
    return self.last(h)


def repeats(self, x):
    h = self.first(x)
    for _ in range(1 + int(h.abs().mean() * 3)):
        h = F.linear(h, self.first.weight[:, :3]).sin()
    return self.last(h)


def weighs(self, x):
    h = self.first(x)
    return self.last(h * h.sum().item()) + float(h[0, 0]) * h[:, :2]


def by_lists(self, x):
    chosen = [n for n, bias in enumerate(self.first.bias.tolist()) if bias > 0]
    return self.last(self.first(x).tanh()) + self.first.weight[:, chosen].sum()


def catches(self, x):
    try:
        positive = bool(self.first.bias.sum() > 0)
    except Exception:
        positive = True
    return self.last(self.first(x) * (2 if positive else 3))


def recomputes(self, x):
    inner = lambda h: F.linear(h.tanh(), self.first.weight[:, :3]).sin()  # noqa: E731
    return self.last(checkpoint(inner, self.first(x), use_reentrant=False))


def counts():
    """Leaves in its buffers which way it went."""

    def forward(self, x):
        way = int(self.first.bias.sum() > 0)
        self.ways = self.ways + F.one_hot(torch.tensor(way), 2)
        return self.last(self.first(x) * (1 + way))

    model = layers(forward)()
    model.register_buffer("ways", torch.zeros(2))
    return model


FORWARDS = (asks_once, asks_twice, repeats, weighs, by_lists, catches, recomputes)
CASES = losses.CASES | {
    "normed": Case(normed, losses.images(2, 6)),
    "pairs": Case(pairs, losses.tokens(7, 5)),
    "counts": Case(counts, numbers, F.mse_loss),
    **{f.__name__: Case(layers(f), numbers, F.mse_loss) for f in FORWARDS},
}


def build(case, count=MEMBERS, seed=0, dtype=torch.float64):
    """Return modules, and the same ones stacked."""
    torch.manual_seed(seed)
    models = [case.model().to(dtype) for _ in range(count)]
    return models, *vgrad.stack(copy.deepcopy(models))


def batch_of(case, size=5, seed=0):
    torch.manual_seed(seed)
    return pytree.tree_map_only(
        Tensor,
        lambda leaf: leaf.double() if leaf.is_floating_point() else leaf,
        case.batch(size),
    )


def named(models, kind="parameters"):
    """Stack the values of modules by name."""
    each = [dict(getattr(model, f"named_{kind}")()) for model in models]
    return {n: torch.stack([one[n].detach() for one in each]) for n in each[0]}


def gradients(models, run, batches, weights=None):
    """Plain autograd on one module after the other."""
    losses, grads = [], []
    for number, (model, batch) in enumerate(zip(models, batches, strict=True)):
        loss = run(model, *batch)
        params = {n: p for n, p in model.named_parameters() if p.requires_grad}
        weight = 1.0 if weights is None else weights[number]
        own = torch.autograd.grad(
            weight * loss, [*params.values()], allow_unused=True, materialize_grads=True
        )
        losses.append(loss.detach())
        grads.append(dict(zip(params, own, strict=True)))
    grads = {name: torch.stack([own[name] for own in grads]) for name in grads[0]}
    return grads, torch.stack(losses)


@pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning")
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("in_dims", [None, 0])
@every_strategy
@pytest.mark.parametrize("name", CASES)
def test_outputs_buffers_and_gradients_are_those_of_the_modules(
    name, strategy, in_dims
):
    case = CASES[name]
    models, fmodel, params, buffers = build(case)
    before = {n: value.clone() for n, value in {**params, **buffers}.items()}
    batch = batch_of(case)
    batches = [batch] * MEMBERS
    if in_dims == 0:
        batches = [batch_of(case, seed=member) for member in range(MEMBERS)]
        leaves = zip(*map(pytree.tree_leaves, batches), strict=True)
        joined = [torch.stack(x) if isinstance(x[0], Tensor) else x[0] for x in leaves]
        batch = pytree.tree_unflatten(joined, pytree.tree_structure(batch))
    options = {"strategy": strategy, "in_dims": in_dims}
    outputs = left = None
    if not any(isinstance(item, dict) for item in batch):
        forward = ensemble_forward(fmodel, **options)
        outputs, left = forward.with_buffers(params, buffers, *batch[:-1])
        expected = [
            model(*own[:-1])
            for model, own in zip(copy.deepcopy(models), batches, strict=True)
        ]
        assert_exact(outputs, torch.stack(expected), EXACT)
        grads = torch.autograd.grad(
            outputs.square().sum(), [*params.values()], materialize_grads=True
        )
        run = lambda model, *own: model(*own[:-1]).square().sum()  # noqa: E731
        expected, _ = gradients(copy.deepcopy(models), run, batches)
        assert_exact(dict(zip(params, grads, strict=True)), expected, EXACT)
    loss = vgrad.batch_loss(fmodel, case.criterion)
    compute = ensemble_grad(loss, **options)
    scale = torch.tensor(0.1 if in_dims is None else [0.0, 1.0, 2.0**15, 3.0])
    found = compute(params, buffers, *batch, loss_scale=scale)
    grads, values = gradients(models, case.run, batches, scale.expand(MEMBERS))
    assert_exact((found.grads, found.losses), (grads, values), EXACT)
    assert_exact(found.buffers, left or found.buffers, EXACT)
    modules = named(models, "buffers") | named(models)
    assert_exact(found.buffers, {n: modules[n] for n in found.buffers}, EXACT)
    assert not any(leaf.requires_grad for leaf in pytree.tree_leaves(found))
    assert_exact({**params, **buffers}, before, 0)


@examples(30)
@given(
    count=st.integers(1, 4),
    rows=st.integers(1, 4),
    widths=st.lists(st.integers(1, 4), min_size=1, max_size=2),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.float64, torch.complex128]),
    strategy=st.sampled_from(STRATEGIES),
)
def test_any_sizes_are_right(count, rows, widths, bias, dtype, strategy):
    pairs = list(zip([3, *widths], widths, strict=False))
    options = {"bias": bias, "dtype": dtype}
    make = lambda: nn.Sequential(*(nn.Linear(*w, **options) for w in pairs))  # noqa: E731
    models = [make() for _ in range(count)]
    fmodel, params, buffers = vgrad.stack(models)
    x = torch.randn(rows, 3, dtype=dtype)

    def loss(params, buffers, x):
        return fmodel(params, buffers, x).tanh().abs().square().sum()

    found = ensemble_grad(loss, strategy=strategy)(params, buffers, x)
    run = lambda model, x: model(x).tanh().abs().square().sum()  # noqa: E731
    expected = gradients(models, run, [(x,)] * count)
    assert_exact((found.grads, found.losses), expected, EXACT)
