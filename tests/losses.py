"""Models that per-sample engines get wrong, each with a loss and a batch.

Sizes are small; the batch has `size` samples. A case builds everything anew. At the end
stands what tests of per-sample quantities share.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import vgrad
from tests import oracle

STRATEGIES = ("recorded", "vmap", "loop")
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
every_clipping = pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic"])
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.cuda,
            pytest.mark.skipif(
                not torch.cuda.is_available(), reason="no CUDA device here"
            ),
        ],
    ),
]


@dataclass(frozen=True)
class Case:
    """A model, its criterion (None: the model returns its own loss) and its batch."""

    model: Callable[[], nn.Module]
    batch: Callable[[int], tuple]
    criterion: Callable | None = F.cross_entropy
    loops: bool = False
    """Whether torch's vmap loops over samples in one of its ops."""

    def run(self, model: nn.Module, *sample: Any) -> Tensor:
        """Run a module as `sample_loss` does, for the reference."""
        if self.criterion is None:
            inputs, target = sample, None
        else:
            *inputs, target = sample
        args = [item for item in inputs if not isinstance(item, dict)]
        kwargs = {
            k: v for item in inputs if isinstance(item, dict) for k, v in item.items()
        }
        output = model(*args, **kwargs)
        return output if self.criterion is None else self.criterion(output, target)


def images(channels: int, side: int, classes: int = 3) -> Callable[[int], tuple]:
    return lambda size: (
        torch.randn(size, channels, side, side),
        torch.randint(classes, (size,)),
    )


def vectors(width: int, classes: int = 3) -> Callable[[int], tuple]:
    return lambda size: (torch.randn(size, width), torch.randint(classes, (size,)))


def tokens(vocabulary: int, length: int, classes: int = 3) -> Callable[[int], tuple]:
    return lambda size: (
        torch.randint(vocabulary, (size, length)),
        torch.randint(classes, (size,)),
    )


class Net(nn.Module):
    """Modules and parameters by name, and a function of them as the forward pass."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            trained = isinstance(part, Tensor) and not isinstance(part, nn.Parameter)
            setattr(self, name, nn.Parameter(part) if trained else part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


class Pick(nn.Module):
    """Apply a function, so that Sequential can hold it."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class TiedLanguageModel(nn.Module):
    """The embedding is the head; position ids of batch one are broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6, padding_idx=0)
        self.position = nn.Embedding(8, 6)
        self.norm = nn.LayerNorm(6, bias=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("ids", torch.arange(8)[None], persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = self.position(self.ids[:, : tokens.shape[1]])
        return self.head(torch.tanh(self.norm(self.embed(tokens) + positions)))


def next_token(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def flattened() -> nn.Module:
    """Flatten samples and positions into rows, as many language models do."""

    def forward(self: Any, x: Tensor) -> Tensor:
        rows = torch.relu(self.inner(x.reshape(-1, 4)))
        return self.outer(rows).view(x.shape[0], -1, 3).mean(1)

    return Net(forward, inner=nn.Linear(4, 5), outer=nn.Linear(5, 3))


class TwoCalls(nn.Module):
    """Calls one module twice, leaves one unused, and takes keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor, *, scale: Tensor, twice: bool = False) -> Tensor:
        hidden = torch.tanh(self.layer(x))
        hidden = torch.tanh(self.layer(hidden)) if twice else hidden
        return self.head(hidden * scale)


def bare() -> nn.Module:
    """A parameter that no module owns, beside one that is frozen."""
    return Net(
        lambda self, x: self.head(x * self.scale + self.shift),
        scale=torch.randn(4),
        shift=nn.Parameter(torch.randn(4), requires_grad=False),
        head=nn.Linear(4, 3),
    )


def own_loss() -> nn.Module:
    """A model that returns its loss when it is given labels."""
    return Net(
        lambda self, x, labels: F.cross_entropy(self.head(x), labels),
        head=nn.Linear(4, 3),
    )


def batch_norm_evaluated() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten()
    )
    model.append(nn.Linear(4 * 4 * 4, 3))
    model[1].running_mean.normal_()
    model[1].running_var.uniform_(0.5, 2)
    return model.eval()


def weight_normed() -> nn.Module:
    weight_norm = torch.nn.utils.parametrizations.weight_norm
    return nn.Sequential(weight_norm(nn.Linear(5, 4)), nn.PReLU(), nn.Linear(4, 3))


def keyword_batch(size: int) -> tuple:
    options = {"scale": torch.rand(size, 4), "twice": True}
    return torch.randn(size, 4), options, torch.randint(3, (size,))


CASES: dict[str, Case] = {
    "mlp": Case(
        lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)), vectors(5)
    ),
    "linear_4d": Case(
        lambda: nn.Sequential(
            nn.Linear(4, 5), nn.Tanh(), nn.Flatten(), nn.Linear(60, 3)
        ),
        lambda size: (torch.randn(size, 3, 4, 4), torch.randint(3, (size,))),
    ),
    "cnn": Case(
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3, padding="same"),
            nn.GroupNorm(2, 4),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64, 3),
        ),
        images(1, 8),
    ),
    "circular_conv": Case(
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"),
            nn.Conv2d(3, 3, 3, padding=1, padding_mode="reflect"),
            nn.Flatten(),
            nn.Linear(48, 3),
        ),
        images(2, 4),
    ),
    "grouped_conv": Case(
        lambda: nn.Sequential(
            nn.Conv2d(4, 8, 3, groups=2, stride=2, dilation=2),
            nn.Conv2d(8, 8, 1, groups=8),
            nn.Flatten(),
            nn.Linear(32, 3),
        ),
        images(4, 8),
    ),
    "batch_norm_evaluated": Case(batch_norm_evaluated, images(2, 6)),
    "padding_idx": Case(
        lambda: nn.Sequential(
            nn.Embedding(7, 4, padding_idx=0), nn.Flatten(), nn.Linear(12, 3)
        ),
        tokens(7, 3),
    ),
    "embedding_bag": Case(
        lambda: nn.Sequential(nn.EmbeddingBag(5, 4), nn.Linear(4, 3)),
        lambda size: (torch.tensor([[2, 2, 1]] * size), torch.randint(3, (size,))),
        loops=True,
    ),
    "tied": Case(
        TiedLanguageModel,
        lambda size: (torch.randint(11, (size, 5)), torch.randint(11, (size, 5))),
        next_token,
    ),
    "flattened": Case(
        flattened, lambda size: (torch.randn(size, 6, 4), torch.randint(3, (size,)))
    ),
    "two_calls_and_unused": Case(TwoCalls, keyword_batch),
    "bare_and_frozen": Case(bare, vectors(4)),
    "own_loss": Case(
        own_loss,
        lambda size: (torch.randn(size, 4), {"labels": torch.randint(3, (size,))}),
        criterion=None,
    ),
    "weight_norm": Case(weight_normed, vectors(5)),
    "transformer": Case(
        lambda: nn.Sequential(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
            Pick(lambda x: x.mean(1)),
            nn.Linear(8, 3),
        ),
        lambda size: (torch.randn(size, 5, 8), torch.randint(3, (size,))),
        loops=True,
    ),
}


class Cubed(torch.autograd.Function):
    """In the old style, which vmap cannot run."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        return 3 * ctx.saved_tensors[0] ** 2 * grad


def branches(self: Any, x: Tensor) -> Tensor:
    rows = x[:, x[0, :, 0] > 0] if x.sum() > 0 else x.sin()
    return self.outer(self.inner(rows).tanh().mean(1))


def recomputed(self: Any, x: Tensor) -> Tensor:
    def region(x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.inner(x)))

    return self.outer(checkpoint(region, self.inner(x), use_reentrant=False)).mean(1)


def of_layers(forward: Callable[..., Any]) -> Case:
    """Make a case of two layers, for samples of three rows."""
    return Case(
        lambda: Net(forward, inner=nn.Linear(4, 4), outer=nn.Linear(4, 3)),
        lambda size: (torch.randn(size, 3, 4), torch.randint(3, (size,))),
    )


HARD: dict[str, Case] = {
    "branches": of_layers(branches),
    "function": of_layers(lambda self, x: self.outer(Cubed.apply(self.inner(x))[:, 0])),
    "checkpoint": of_layers(recomputed),
}
"""Models that read values, that vmap cannot run, and that run again."""


class Built(NamedTuple):
    """A case with what its transforms take, and the gradients of the reference."""

    loss: Callable
    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    batch: tuple
    expected: oracle.Grads

    @property
    def given(self) -> tuple:
        """The arguments of a transform."""
        return self.params, self.buffers, *self.batch


def build(name: str, size: int, dtype: torch.dtype = torch.float64) -> Built:
    """Make a case anew, with parameters that require no grad."""
    torch.manual_seed(0)
    case = (CASES | HARD)[name]
    model = case.model().to(dtype)
    batch = pytree.tree_map_only(
        Tensor,
        lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf,
        case.batch(size),
    )
    expected = oracle.model_gradients(model, case.run, batch, size)
    return Built(*of_model(model, case.criterion, dtype), batch, expected)


def of_model(
    model: nn.Module,
    criterion: Callable | None = F.cross_entropy,
    dtype: torch.dtype = torch.float64,
) -> tuple:
    """Return the loss of one sample, the parameters and the buffers of a model."""
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model.to(dtype))
    params = {name: value.detach() for name, value in params.items()}
    return vgrad.sample_loss(fmodel, criterion), params, buffers


def rows(batch: Any, index: Any) -> Any:
    """Take samples out of a batch."""
    return pytree.tree_map_only(Tensor, lambda leaf: leaf[index], batch)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Draw normal numbers, the same at every call."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def of_images(
    channels, outputs, side, kernel, options, dtype, device="cpu", draw=torch.randn
):
    """Make the loss of a convolution, its kernel, and six images with cotangents."""

    def loss(params, buffers, x, g):
        return (F.conv2d(x, params["w"], **options) * g).sum()

    width = channels // options.get("groups", 1)
    weight = torch.zeros(outputs, width, kernel, kernel, device=device, dtype=dtype)
    own = {"device": device, "generator": torch.Generator(device).manual_seed(0)}
    x = draw(6, channels, side, side, **own).to(dtype)
    g = torch.randn(F.conv2d(x, weight, **options).shape, **own).to(dtype)
    return loss, {"w": weight}, (x, g)


def assert_gradients(
    loss: Callable,
    params: dict[str, Tensor],
    batch: tuple,
    *,
    buffers: dict[str, Tensor] | None = None,
    expected: oracle.Grads | None = None,
    tolerance: float = oracle.EXACT,
    **options: Any,
) -> oracle.Grads:
    """Compare gradients with a loop of plain autograd; return the loop's."""
    buffers = buffers or {}
    found = vgrad.per_sample_grad(loss, **options)(params, buffers, *batch)
    assert [found[n].dtype for n in params] == [p.dtype for p in params.values()]
    if expected is None:
        expected = oracle.loss_gradients(loss, params, buffers, batch)
    oracle.assert_exact(found, expected, tolerance)
    return expected


def assert_quantities(
    loss: Callable,
    params: dict[str, Tensor],
    batch: tuple,
    *,
    buffers: dict[str, Tensor] | None = None,
    expected: oracle.Grads | None = None,
    tolerance: float = oracle.EXACT,
    **options: Any,
) -> oracle.Grads:
    """Compare every quantity with a loop of plain autograd; return its gradients."""
    buffers, size = buffers or {}, len(batch[0])
    same = dict(buffers=buffers, expected=expected, tolerance=tolerance)
    expected = assert_gradients(loss, params, batch, **same, **options)
    given, exact = (params, buffers, *batch), oracle.norms(expected)
    norms = vgrad.per_sample_norm(loss, **options)(*given)
    torch.testing.assert_close(norms.double(), exact, rtol=tolerance, atol=0)
    weights = torch.linspace(-1, 2, size, dtype=norms.dtype)
    sums = vgrad.weighted_grad(loss, **options)(weights, *given)
    oracle.assert_exact(sums, oracle.weighted(expected, weights), tolerance)
    bound = 0.9 * float(exact.mean()) or 1.0
    clipped = vgrad.clipped_grad(loss, max_norm=bound, **options)(*given)
    oracle.assert_exact(clipped.grads, oracle.clipped(expected, bound), tolerance)
    torch.testing.assert_close(clipped.norms, norms)
    assert int(clipped.clipped) == int((exact > bound).sum())
    assert int(clipped.nonfinite) == 0
    assert clipped.losses.shape == (size,)
    return expected


def written(text: str, scope: dict[str, Any], letters: str = "xy") -> Callable:
    """Make a loss of an expression, or of statements that set `value`.

    It has the names of a scope, of parameters and buffers (`a_w` for "a.w"), `p` for
    all parameters, and the letters of a sample.
    """
    try:
        code = compile(text, text, "eval")
    except SyntaxError:
        code = compile(text, text, "exec")

    def loss(params: dict, buffers: dict, *sample: Any) -> Any:
        named = {n.replace(".", "_"): v for n, v in (params | buffers).items()}
        given = dict(zip(letters, sample, strict=False))
        names = {**scope, "p": params, **named, **given}
        found = eval(code, names)
        return names["value"] if found is None else found

    return loss


def norms(loss: Callable, params: Any, *batch: Any, **options: Any) -> Any:
    """Return the norms of samples, for a loss without buffers."""
    return vgrad.per_sample_norm(loss, **options)(params, {}, *batch)


def clipped(loss: Callable, bound: float, params: Any, *batch: Any, **options: Any):
    """Return a clipped sum, for a loss without buffers."""
    return vgrad.clipped_grad(loss, max_norm=bound, **options)(params, {}, *batch)


def length(grads: dict[str, Tensor]) -> float:
    """Return the norm of a sum over all its parameters, in float64."""
    return float(torch.cat([g.double().flatten() for g in grads.values()]).norm())


def singles(batch: Any) -> list:
    """Return the batches of one sample each."""
    return [rows(batch, slice(n, n + 1)) for n in range(len(batch[0]))]


def clipped_lengths(
    loss: Callable, params: Any, batch: Any, bound: float, **options: Any
) -> Tensor:
    """Norms of the clipped gradients of single samples, each a batch of its own."""
    sums = [clipped(loss, bound, params, *one, **options) for one in singles(batch)]
    return torch.tensor([length(each.grads) for each in sums], dtype=torch.float64)


def plan(**options: Any) -> vgrad.dp.Plan:
    """Return a plan of privacy, for a data set of 80 samples."""
    defaults = dict(dataset_size=80, sampling_rate=0.1, noise_multiplier=1.0)
    defaults |= dict(max_norm=1.0, steps=9, delta=1e-3)
    return vgrad.dp.Plan(**defaults | options)


def product(params: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
    """A loss whose gradient is the sample."""
    return (params["w"] * x).sum()


def linear(params: dict, buffers: dict, x: Tensor, g: Tensor) -> Tensor:
    """A loss whose gradient is a product of inputs, added up over positions."""
    return (F.linear(x, params["w"]) * g).sum()


def squared(params: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
    """A loss that is no linear function of its parameter."""
    return (params["w"] * x).square().sum()


def state_of_torch() -> tuple:
    """Everything that a call could leave behind."""
    backends = torch.backends
    return (
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._functorch.peek_interpreter_stack(),
        torch._C._functorch.maybe_current_level(),
        torch._C._autograd._saved_tensors_hooks_is_enabled(),
        backends.cudnn.deterministic,
        backends.cudnn.benchmark,
        backends.cudnn.enabled,
        backends.cudnn.allow_tf32,
        backends.cuda.matmul.allow_tf32,
        backends.mkldnn.enabled,
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_anomaly_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.get_rng_state().tolist(),
    )


class Peak(TorchDispatchMode):
    """Measures the bytes that results of ops take: the `most` at once, and `now`."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple] = {}
        self.most = self.now = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(each.__name__ in ("Lazy", "DTensor") for each in types):
            return NotImplemented  # the ops that such a tensor runs come one by one
        result = func(*args, **(kwargs or {}))
        self.count(result)
        return result

    def count(self, result: Any) -> None:
        """Count the memory of tensors as long as it is alive."""
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and not leaf.is_meta:
                storage = leaf.untyped_storage()
                ref = StorageWeakRef(storage)
                self.alive[storage._cdata] = ref, storage.nbytes()
        self.alive = {
            k: each for k, each in self.alive.items() if not each[0].expired()
        }
        self.now = sum(size for _, size in self.alive.values())
        self.most = max(self.most, self.now)

    def left(self, *known: Any) -> int:
        """Return how many tensors are alive, but for these and their views."""
        leaves = [x for x in pytree.tree_leaves(known) if isinstance(x, Tensor)]
        storages = {leaf.untyped_storage()._cdata for leaf in leaves}
        alive = (key for key, (ref, _) in self.alive.items() if not ref.expired())
        return len(set(alive) - storages)


class Ops(TorchDispatchMode):
    """Notes the calls of ops, each by its name and its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple, dict]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func.overloadpacket.__name__, args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def count(self, *starts: str) -> int:
        """Return the number of calls of ops whose names begin so."""
        return sum(name.startswith(starts) for name, *_ in self.calls)


def errors_of_sums(
    net: nn.Module, batch: tuple, dtype: torch.dtype, within: Any, clipping: str
) -> tuple[float, float]:
    """Errors under autocast of a clipped sum, and of the gradient of the batch."""
    (x, y), where = batch, batch[0].device.type
    loss, params, buffers = of_model(net, F.cross_entropy, torch.float32)
    exact = oracle.loss_gradients(loss, params, buffers, batch)
    norms = oracle.norms(exact)
    bound = 0.7 * float(norms.mean())
    weights = bound / (norms + 0.01)
    weights = (bound / norms).clamp(max=1) if clipping == "flat" else weights
    scale = vgrad.precision.NoOpLossScale()
    if dtype == torch.float16:
        scale = vgrad.precision.StaticLossScale(2.0**10)
    options = {"clipping": clipping, "strategy": "recorded", "loss_scale": scale}
    compute = vgrad.clipped_grad(loss, max_norm=bound, **options)
    with torch.autocast(where, dtype):
        with within:
            found = compute(params, buffers, x, y).grads
        value = scale.scale(F.cross_entropy(net(x), y, reduction="sum"))
    plain = torch.autograd.grad(value, [*net.parameters()])
    plain = dict(zip(params, scale.unscale(plain), strict=True))
    return (
        oracle.distance(found, oracle.weighted(exact, weights)),
        oracle.distance(plain, oracle.weighted(exact, torch.ones_like(norms))),
    )


def old_function(forward: Callable, backward: Callable) -> type:
    """Make a function of autograd in the old style: `forward(ctx, *inputs)`."""
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    name = backward.__name__.title().replace("_", "")
    return type(name, (torch.autograd.Function,), methods)


def new_function(name: str, forward: Callable, backward: Callable, **more: Any) -> type:
    """Make one in the new style, which saves its inputs: `forward(*inputs)`."""

    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    methods = {
        "forward": lambda *inputs: forward(*inputs),
        "setup_context": setup_context,
    }
    methods |= {"backward": backward, **more}  # also `vmap`, or that torch makes one
    made = {n: staticmethod(x) if callable(x) else x for n, x in methods.items()}
    return type(name, (torch.autograd.Function,), made)


RULED = {"generate_vmap_rule": True}
DROPS = (lambda x: F.dropout(x, 0.5), lambda ctx, grad: grad)
Dropping = new_function("Dropping", *DROPS, **RULED)
Unruled = new_function("Unruled", *DROPS)
DRAWS = (torch.clone, lambda ctx, grad: grad + torch.rand_like(grad))
Noisy = new_function("Noisy", *DRAWS, **RULED)
NoisyAndUnruled = new_function("NoisyAndUnruled", *DRAWS)
