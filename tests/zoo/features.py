"""Features of torch that rewrite, compile, replay or hide what a module does."""

import functools
import warnings

import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.utils import checkpoint as checkpointing

from tests.zoo.entries import (
    SAME,
    SIZE,
    SPLITS,
    D,
    Entries,
    Exact,
    Impossible,
    Net,
    Refused,
    Use,
    alone,
    classes,
    loops,
    mlp,
    net,
    noise,
    total,
)

ENTRIES = Entries()
row = ENTRIES.row

JITTED = Refused("expected modules whose tensors can be exchanged")
SPARSE = Refused("expected dense tensors, got sparse ones")
PLAIN = Refused("expected a plain torch.nn.Module")
NO_FLEX = Impossible("FlexAttention does not support backward on CPU")
ON_META = "expected parameters with values"
AVERAGE, MAXIMUM = nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d


@row("checkpoint with dropout", drop=0.5, options=SAME)
@row(
    "checkpoint, re-entrant", reentrant=True, today=Refused("Pass use_reentrant=False")
)
@row("checkpoint")
def checkpointed(*, reentrant: bool = False, drop: float = 0.0) -> Use:
    """Blocks whose activations are computed again; one of them is used twice."""

    def forward(self, x):
        for block in (*self.blocks, self.blocks[0]):
            x = x + checkpointing.checkpoint(block, x, use_reentrant=reentrant)
        return self.head(x)

    def block():
        return nn.Sequential(
            nn.Linear(D, 8), nn.Tanh(), nn.Dropout(drop), nn.Linear(8, D)
        )

    parts = dict(first=nn.Linear(D, D), blocks=nn.ModuleList(block() for _ in range(2)))

    return net(
        lambda self, x: forward(self, self.first(x)), D, **parts, head=nn.Linear(D, 3)
    )


@row("checkpoint_sequential")
def checkpointed_in_parts() -> Use:
    def forward(self, x):
        return checkpointing.checkpoint_sequential(self.body, 2, x, use_reentrant=False)

    body = nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))
    return net(forward, D, body=body)


@row(
    "checkpoint inside a checkpoint",
    today=Exact("loop", "expected a region that runs again by itself", "checkpoint"),
)
def checkpointed_twice() -> Use:
    def forward(self, x):
        def inner(y):
            return torch.tanh(self.first(y))

        def outer(y):
            return self.second(checkpointing.checkpoint(inner, y, use_reentrant=False))

        return checkpointing.checkpoint(outer, x, use_reentrant=False)

    return net(forward, D, first=nn.Linear(D, 5), second=nn.Linear(5, 3))


@row("selective checkpoint")
def selectively_checkpointed() -> Use:
    """Results of matrix products are kept, all else is computed again."""

    def forward(self, x):
        contexts = functools.partial(
            checkpointing.create_selective_checkpoint_contexts,
            [torch.ops.aten.mm.default],
        )
        return checkpointing.checkpoint(
            self.body, x, use_reentrant=False, context_fn=contexts
        )

    return net(forward, D, body=mlp())


@row("save_on_cpu")
def saved_elsewhere() -> Use:
    """What autograd saves goes through hooks, as with `save_on_cpu`."""

    def forward(self, x):
        with torch.autograd.graph.save_on_cpu():
            return self.body(x)

    return net(forward, D, body=mlp())


@row("sparse COO matrix in a buffer", "coo", today=SPARSE)
@row("sparse CSR matrix in a buffer", "csr", today=SPARSE)
def sparse_matrix(layout: str) -> Use:
    def forward(self, x):
        spread = self.graph @ self.layer(x[0])
        return torch.tanh(spread).sum(0, keepdim=True)

    use = net(forward, 5, D, layer=nn.Linear(D, 3))
    graph = torch.rand(5, 5).round().double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that sparse CSR is in beta state
        graph = graph.to_sparse_csr() if layout == "csr" else graph.to_sparse()
    use.model.register_buffer("graph", graph)
    return use


@row(
    "sparse matrix of a sample's edges",
    today=Exact(
        "loop",
        "Could not run 'aten::view' with arguments from the 'SparseCPU' backend",
    ),
)
def sparse_sample() -> Use:
    def forward(self, x, edges):
        ones = torch.ones(edges.shape[-1])
        graph = torch.sparse_coo_tensor(edges[0], ones, (5, 5))
        return torch.sparse.mm(graph, self.layer(x[0])).tanh().sum(0, keepdim=True)

    model = Net(forward, layer=nn.Linear(D, 3))
    return Use(model, (noise(5, D), torch.randint(5, (SIZE, 2, 8)), classes()))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, 8)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.layer(x).chunk(2, -1)
        return a * torch.sigmoid(b) * self.scale


@row("scripted model", whole=True, today=PLAIN)
@row("scripted submodule", whole=False, today=JITTED)
def scripted(*, whole: bool) -> Use:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        body = nn.Sequential(Gated(), nn.Linear(4, 3))
        if whole:
            return Use(torch.jit.script(body.double()), (noise(D), classes()))
        body[0] = torch.jit.script(body[0].double())
    return Use(body, (noise(D), classes()))


def in_a_sequence() -> torch.jit.ScriptModule:
    return torch.jit.script(nn.Sequential(nn.Linear(D, 4), nn.Tanh()).double())


def traced() -> torch.jit.ScriptModule:
    return torch.jit.trace(Gated().double(), torch.zeros(2, D).double())


@row("traced submodule", traced, today=JITTED)
@row("scripted submodule beside others", in_a_sequence, today=JITTED)
def jitted(make) -> Use:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        body = make()
    return Use(nn.Sequential(body, nn.Linear(4, 3)), (noise(D), classes()))


class OldSquare(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    backward = staticmethod(lambda ctx, grad: 2 * ctx.saved_tensors[0] * grad)


def linear_backward(ctx, grad):
    x, weight = ctx.saved_tensors
    return grad @ weight, grad.t() @ x, grad.sum(0)


class OldLinear(Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return x @ weight.t() + bias

    backward = staticmethod(linear_backward)


class NewLinear(Function):
    """The same in the new style, with a vmap rule that torch generates."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, weight, bias):
        return x @ weight.t() + bias

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2])

    backward = staticmethod(linear_backward)


class Unmapped(NewLinear):
    generate_vmap_rule = False


class SharedWeight(Function):
    """A layer whose own vmap rule takes for granted that all samples share weights."""

    @staticmethod
    def forward(x, weight):
        return x @ weight.t()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.mT @ x

    @staticmethod
    def vmap(info, in_dims, x, weight):
        assert in_dims[1] is None
        return SharedWeight.apply(x.movedim(in_dims[0], 0), weight), 0


@row(
    "autograd.Function whose vmap rule shares the weight",
    SharedWeight,
    bias=False,
    today=alone("SharedWeight"),
)
@row("autograd.Function, no vmap rule", Unmapped, today=alone("Unmapped"))
@row("autograd.Function, generated vmap rule", NewLinear)
@row("autograd.Function, old style, a layer", OldLinear, today=alone("OldLinear"))
def own_function(function: type[Function], *, bias: bool = True) -> Use:
    def forward(self, x):
        parts = (self.first.weight, self.first.bias)[: 1 + bias]
        return self.head(torch.tanh(function.apply(x, *parts)))

    return net(forward, D, first=nn.Linear(D, 5, bias=bias), head=nn.Linear(5, 3))


@row("autograd.Function, old style, an activation", today=alone("OldSquare"))
def own_activation() -> Use:
    def forward(self, x):
        return self.head(OldSquare.apply(self.first(x)))

    return net(forward, D, first=nn.Linear(D, 5), head=nn.Linear(5, 3))


@torch.compile(backend="eager")
def compiled_scale(x, weight):
    return torch.sin(x * weight.exp())


@torch.compile(backend="eager")
def compiled_norm(x):
    return x / (1 + x.square().mean(-1, keepdim=True))


@row("compiled function of an activation", of_parameter=False)
@row("compiled function of a parameter", of_parameter=True)
def compiled_function(*, of_parameter: bool) -> Use:
    def forward(self, x):
        x = self.layer(x)
        return compiled_scale(x, self.weight) if of_parameter else compiled_norm(x)

    parts = dict(weight=torch.zeros(3)) if of_parameter else {}
    return net(forward, D, layer=nn.Linear(D, 3), **parts)


@row("torch.compile of a model", today=PLAIN)
def compiled_model() -> Use:
    return Use(torch.compile(Gated(), backend="eager"), (noise(D), noise(4)), total)


@row("module.compile()")
def compiled_in_place() -> Use:
    model = Gated()
    model.compile(backend="eager")
    return Use(model, (noise(D), noise(4)), total)


@row("module.compile() of a layer")
def compiled_layer() -> Use:
    def forward(self, x):
        return self.head(self.body(x))

    use = net(forward, D, body=Gated(), head=nn.Linear(4, 3))
    use.model.body.compile(backend="eager")
    return use


@row("torch.cond", today=SPLITS)
def conditional() -> Use:
    def forward(self, x):
        def yes(y):
            return self.a(y)

        def no(y):
            return self.b(y).sin()

        return torch.cond(x.sum() > 0, yes, no, (x,))

    return net(forward, D, a=nn.Linear(D, 3), b=nn.Linear(D, 3))


@row("flex_attention with a captured parameter", learned=True, today=NO_FLEX)
@row("flex_attention", learned=False, today=NO_FLEX)
def flexible_attention(*, learned: bool) -> Use:
    def forward(self, x):
        from torch.nn.attention.flex_attention import flex_attention

        def score(value, b, h, i, j):
            return value + (self.bias[h] * (i - j) if learned else 0.1 * (i - j))

        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is not compiled
            y = flex_attention(q, k, v, score_mod=score)
        return self.head(y.transpose(1, 2).flatten(2)[:, 0])

    parts = dict(qkv=nn.Linear(8, 96), bias=torch.zeros(2), head=nn.Linear(32, 3))
    return net(forward, 5, 8, **parts)


@row("model on meta, no values", filled=False, today=Refused(ON_META))
@row("model on meta, values given", filled=True)
def hidden_in_meta(*, filled: bool) -> Use:
    """Built on the device `meta`, as large models are before they are loaded."""
    values = nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, 3)).state_dict()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, 3))
    return Use(model, (noise(D), classes()), values=values if filled else None)


@row("adaptive max pooling to 3", MAXIMUM, 3)
@row("adaptive average pooling to 3", AVERAGE, 3)
@row("adaptive average pooling to 1", AVERAGE, 1)
def adaptive_pooling(kind, size) -> Use:
    def forward(self, x):
        return self.head(self.pool(self.conv(x)).flatten(1))

    pool = kind(size)
    width = pool(torch.zeros(1, 4, 7, 7)).numel()
    parts = dict(conv=nn.Conv2d(2, 4, 3, padding=1), pool=pool)
    return net(forward, 2, 7, 7, **parts, head=nn.Linear(width, 3))


@row("max pooling and unpooling by indices", today=loops("aten::max_unpool2d"))
def with_indices() -> Use:
    def forward(self, x):
        x, indices = F.max_pool2d(self.conv(x), 2, return_indices=True)
        return F.max_unpool2d(x, indices, 2)

    return net(forward, 1, 4, 4, output=(2, 4, 4), conv=nn.Conv2d(1, 2, 3, padding=1))


@row("fractional max pooling", options=SAME, today=loops("aten::fractional_max_pool2d"))
def fractional_pooling() -> Use:
    def forward(self, x):
        return self.pool(self.conv(x))

    parts = dict(conv=nn.Conv2d(1, 2, 3), pool=nn.FractionalMaxPool2d(2, 3))
    return net(forward, 1, 7, 7, output=(2, 3, 3), **parts)


@row(
    "evaluated batch norm before tokens, by the loop",
    twice=True,
    options={"strategy": "loop"},
    today=Exact("loop", 'strategy="loop"'),
)
@row(
    "evaluated batch norm before tokens, chunks of one",
    twice=True,
    options={"chunk_size": 1},
)
@row("evaluated batch norm before tokens", twice=True)
def normed_and_transposed() -> Use:
    """Evaluated batch norm before tokens, whose gradient comes transposed."""

    def forward(self, x):
        tokens = self.norm(self.conv(x)).flatten(2).transpose(1, 2)
        return self.head(tokens.mean(1))

    parts = dict(conv=nn.Conv2d(2, 4, 3, padding=1), norm=nn.BatchNorm2d(4))
    model = Net(forward, **parts, head=nn.Linear(4, 3)).eval()
    return Use(model, (noise(2, 2, 2), classes()))


@row("interpolation", today=loops("aten::_upsample_nearest_exact2d.vec"))
def resized() -> Use:
    def forward(self, x):
        x = self.conv(x)
        modes = "nearest", "bilinear", "bicubic", "area", "nearest-exact"
        return sum(F.interpolate(x, size=(6, 5), mode=mode) for mode in modes)

    return net(forward, 1, 5, 5, output=(2, 6, 5), conv=nn.Conv2d(1, 2, 3))


@row("autocast switched off inside")
def in_mixed_precision() -> Use:
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
            return self.body(x)

    return net(forward, D, body=mlp())


class Labelled(torch.Tensor):
    """A subclass of tensors, which keeps its class."""


@row("subclass of tensors")
def of_a_subclass() -> Use:
    def forward(self, x):
        return self.layer(x.as_subclass(Labelled)).as_subclass(torch.Tensor)

    return net(forward, D, layer=nn.Linear(D, 3))


@row("functional_call inside the model")
def called_functionally() -> Use:
    def forward(self, x):
        weights = {"weight": self.maker(self.code).view(3, D), "bias": self.shift}
        return torch.func.functional_call(self.held[0], weights, (x,))

    parts = dict(maker=nn.Linear(4, 3 * D), code=torch.randn(4), shift=torch.zeros(3))
    with torch.device("meta"):
        held = [nn.Linear(D, 3)]
    return net(forward, D, **parts, held=held)


@row("associative_scan")
def scanned() -> Use:
    def forward(self, x):
        from torch._higher_order_ops import associative_scan

        x = self.layer(x).sigmoid()
        return associative_scan(torch.mul, x, dim=1, combine_mode="generic").sum(1)

    return net(forward, 5, D, layer=nn.Linear(D, 3))


@row("a weight read through .data")
def read_through_data() -> Use:
    def forward(self, x):
        scale = self.layer.weight.data.abs().mean()
        return self.layer(x) / scale

    return net(forward, D, layer=nn.Linear(D, 3))


@row("questions about requires_grad")
def asks_for_gradients() -> Use:
    def forward(self, x):
        y = self.layer(x)
        assert self.layer.weight.requires_grad
        return y * 2 if y.requires_grad and torch.is_grad_enabled() else y

    return net(forward, D, layer=nn.Linear(D, 3))


@row("no_grad and enable_grad inside")
def quiet_gradient() -> Use:
    def forward(self, x):
        with torch.no_grad():
            first = self.a(x)
            with torch.enable_grad():
                second = self.b(x)
        return first + second + self.a(x)

    return net(forward, D, a=nn.Linear(D, 3), b=nn.Linear(D, 3))
