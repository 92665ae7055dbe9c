"""The clipped sum in JAX: `jax.jit(vmap(grad))` by hand, and JAX-Privacy's.

The forward passes below follow the modules of `bench.models`, on the very
parameters, in the layout that torch has; a model made of anything else is refused.
Batches and results cross over without a copy (DLPack), which is timed with the rest.
JAX has threads of its own: one, if torch has one when this is imported, else all.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

if torch.get_num_threads() == 1:
    flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"

import jax
import jax_privacy
from jax import numpy as jnp

from bench.contenders import MAX_NORM, Grads, Run
from bench.models import Problem, tokens, vision
from bench.test_per_sample import SimpleCNN

jax.config.update("jax_enable_x64", True)  # for the check in float64

Params = dict[str, jax.Array]


class Weights:
    """The parameters of a module, by the names that torch gives them."""

    def __init__(self, params: Params, prefix: str = "") -> None:
        self._params, self._prefix = params, prefix

    def __getitem__(self, name: str) -> Any:
        return self._params.get(f"{self._prefix}{name}")

    def of(self, name: str) -> "Weights":
        return Weights(self._params, f"{self._prefix}{name}.")


def apply(module: nn.Module, weights: Weights, x: jax.Array) -> jax.Array:
    """Return the output of a module.

    Raises:
        NotImplementedError: nothing below does what the module does.
    """
    if type(module) not in FORWARD:
        raise NotImplementedError(f"no form of {type(module).__name__} in JAX")
    return FORWARD[type(module)](module, weights, x)


def linear(module: nn.Linear, weights: Weights, x: jax.Array) -> jax.Array:
    x = x @ weights["weight"].T
    return x if module.bias is None else x + weights["bias"]


def convolution(module: nn.Conv2d, weights: Weights, x: jax.Array) -> jax.Array:
    x = jax.lax.conv_general_dilated(
        x,
        weights["weight"],
        module.stride,
        [(size, size) for size in module.padding],
        feature_group_count=module.groups,
    )
    return x if module.bias is None else x + weights["bias"][:, None, None]


def pooling(module: nn.MaxPool2d, weights: Weights, x: jax.Array) -> jax.Array:
    return largest(x, module.kernel_size, module.stride)


def largest(x: jax.Array, size: int, stride: int) -> jax.Array:
    """Pool windows of `size` by `size`."""
    window, steps = (1, 1, size, size), (1, 1, stride, stride)
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, steps, "VALID")


def layer_norm(module: nn.LayerNorm, weights: Weights, x: jax.Array) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    x = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + module.eps)
    return x * weights["weight"] + weights["bias"]


def rms_norm(module: nn.RMSNorm, weights: Weights, x: jax.Array) -> jax.Array:
    eps = jnp.finfo(x.dtype).eps if module.eps is None else module.eps
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + eps) * weights["weight"]


def gelu(module: nn.GELU, weights: Weights, x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=module.approximate == "tanh")


def in_turn(module: nn.Sequential, weights: Weights, x: jax.Array) -> jax.Array:
    for name, child in module.named_children():
        x = apply(child, weights.of(name), x)
    return x


def by_name(module: nn.Module, weights: Weights) -> Callable[[str, jax.Array], Any]:
    """Make the function that applies a child by its name."""
    return lambda name, x: apply(module.get_submodule(name), weights.of(name), x)


def simple_cnn(module: SimpleCNN, weights: Weights, x: jax.Array) -> jax.Array:
    run = by_name(module, weights)
    x = jax.nn.relu(run("conv2", jax.nn.relu(run("conv1", x))))
    x = largest(x, 2, 2).reshape(len(x), -1)
    return jax.nn.log_softmax(run("fc2", jax.nn.relu(run("fc1", x))))


def block(module: tokens.Block, weights: Weights, x: jax.Array) -> jax.Array:
    run = by_name(module, weights)
    qkv = run("qkv", run("norm1", x))
    q, k, v = jnp.moveaxis(qkv.reshape(*x.shape[:2], 3, module.heads, -1), 2, 0)
    # Written out, since jax.nn.dot_product_attention has a softmax in float32 always.
    logits = jnp.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
    if module.causal:
        logits = jnp.where(jnp.tri(x.shape[1], dtype=bool), logits, -jnp.inf)
    attended = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits), v)
    x = x + run("out", attended.reshape(x.shape))
    return x + run("down", run("activation", run("up", run("norm2", x))))


def embedded(weights: Weights, tokens: jax.Array) -> jax.Array:
    """Look up tokens and positions."""
    positions = weights["positions.table.weight"][: tokens.shape[1]]
    return weights["token.weight"][tokens] + positions


def encoder(module: tokens.Encoder, weights: Weights, x: jax.Array) -> jax.Array:
    run = by_name(module, weights)
    return run("head", run("norm", run("blocks", embedded(weights, x))).mean(1))


def gpt(module: tokens.GPT, weights: Weights, x: jax.Array) -> jax.Array:
    run = by_name(module, weights)
    x = run("norm", run("blocks", embedded(weights, x)))
    return x @ weights["token.weight"].T


def vit(module: vision.ViT, weights: Weights, x: jax.Array) -> jax.Array:
    run = by_name(module, weights)
    x = run("patches", x)
    x = x.reshape(*x.shape[:2], -1).swapaxes(1, 2)
    first = jnp.broadcast_to(weights["first"], (len(x), 1, x.shape[-1]))
    x = jnp.concatenate([first, x], axis=1) + weights["places"]
    return run("head", run("norm", run("blocks", x))[:, 0])


FORWARD: dict[type[nn.Module], Callable[..., jax.Array]] = {
    nn.Linear: linear,
    nn.Conv2d: convolution,
    nn.MaxPool2d: pooling,
    nn.LayerNorm: layer_norm,
    nn.RMSNorm: rms_norm,
    nn.GELU: gelu,
    nn.ReLU: lambda module, weights, x: jax.nn.relu(x),
    nn.Flatten: lambda module, weights, x: x.reshape(len(x), -1),
    nn.Sequential: in_turn,
    SimpleCNN: simple_cnn,
    tokens.Block: block,
    tokens.Encoder: encoder,
    tokens.GPT: gpt,
    vision.ViT: vit,
}


def mean_loss(problem: Problem) -> Callable[[Params, jax.Array, jax.Array], jax.Array]:
    """Make the loss of a batch, as `Problem.mean_loss`.

    A softmax is its own fixed point, so this is the loss of log-probabilities too.
    """

    def loss(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
        logs = jax.nn.log_softmax(apply(problem.model, Weights(params), x))
        return -jnp.take_along_axis(logs, y[..., None], axis=-1).mean()

    return loss


def vmapped(problem: Problem) -> Callable[..., Params]:
    """Map the gradient over the batch, then clip and sum.

    The sum is a product with the factors: XLA fuses a plain sum with its terms,
    and is then a hundred times as slow.
    """
    gradient = jax.grad(mean_loss(problem))

    def one(params: Params, x: jax.Array, y: jax.Array) -> Params:
        return gradient(params, x[None], y[None])

    def clipped(params: Params, x: jax.Array, y: jax.Array) -> Params:
        grads = jax.vmap(one, in_axes=(None, 0, 0))(params, x, y)
        squares = [(g.reshape(len(g), -1) ** 2).sum(1) for g in grads.values()]
        factors = jnp.minimum(1, MAX_NORM / jnp.sqrt(sum(squares)))
        return {name: jnp.tensordot(factors, g, axes=1) for name, g in grads.items()}

    return clipped


def private(problem: Problem) -> Callable[..., Params]:
    """JAX-Privacy's clipped sum.

    On a CPU it takes one sample at a time, for the reason that `vmapped` gives.
    """
    on_cpu = next(problem.model.parameters()).device.type == "cpu"
    return jax_privacy.clipped_grad(
        mean_loss(problem),
        l2_clip_norm=MAX_NORM,
        batch_argnums=(1, 2),
        microbatch_size=1 if on_cpu else None,
    )


def jitted(make: Callable[[Problem], Callable[..., Params]]) -> Callable[..., Run]:
    """Compile a contender, and let it take and return torch's tensors."""

    def build(problem: Problem) -> Run:
        compute = jax.jit(make(problem))
        params = {
            name: jnp.array(jax.dlpack.from_dlpack(value.detach()), copy=True)
            for name, value in problem.model.named_parameters()
        }

        def run(x: Tensor, y: Tensor) -> Grads:
            batch = (jax.dlpack.from_dlpack(tensor) for tensor in (x, y))
            grads = jax.block_until_ready(compute(params, *batch))
            return {name: torch.from_dlpack(grad) for name, grad in grads.items()}

        return run

    return build


CLIPPED = {"vmap": jitted(vmapped), "privacy": jitted(private)}
