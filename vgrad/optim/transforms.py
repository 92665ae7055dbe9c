"""Transformations of gradients: decay, factors, groups, clipping and noise.

A selection is a list or tuple of patterns, of which one has to match (see
`vgrad.checks`), or a function of the name. Clipping and noise act on gradients that
were already summed or averaged over a batch: they do not bound the influence of single
samples, as `vgrad.clipped_grad` does, and give no privacy, as `vgrad.dp` does.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from vgrad import checks
from vgrad.optim.base import (
    GradientTransformation,
    Grads,
    Number,
    Rate,
    State,
    chain,
    check_real,
    counter,
    is_schedule,
    is_zero,
    length,
    map_grads,
    of_gradient,
    of_gradient_and_parameter,
    per_parameter,
    plain,
    plus,
    root,
    scalar,
    stateless,
)
from vgrad.torch_private import shards
from vgrad.tree import widened
from vgrad.typing import Params

Selection = checks.Patterns | Callable[[str], bool]
"""The names that match one of the patterns, or for which a function is true."""

Key = str | tuple[str, ...] | Callable[[str], bool]
"""A selection as the key of a dictionary, where one pattern needs no tuple."""


def add_decayed_weights(
    weight_decay: Number, *, mask: Selection | None = None
) -> GradientTransformation:
    """Add the parameters, times a factor, to the gradients: `g + weight_decay * p`.

    Before the moments of an optimizer this is a penalty of the squared norm, after them
    it is decoupled weight decay. A decay of the number zero is the identity. `mask` is
    a selection as in `masked`. Reference: Loshchilov and Hutter, arXiv 1711.05101.

    Example:
        >>> decay = add_decayed_weights(0.5)
        >>> decay.update({"w": torch.zeros(2)}, (), {"w": torch.tensor([2.0, 4.0])})
        ({'w': tensor([1., 2.])}, ())
    """
    if mask is not None:
        mask = _checked("add_decayed_weights", "mask", mask)
    if is_zero(weight_decay):
        return chain()
    if mask is not None:
        return masked(add_decayed_weights(weight_decay), mask)
    return of_gradient_and_parameter(
        "add_decayed_weights", lambda grad, param: plus(grad, weight_decay, param)
    )


def scale(factor: Rate) -> GradientTransformation:
    """Multiply gradients by a factor, or one that changes: `factor * g`.

    A schedule is called with the number `t` of steps taken so far, an int64 tensor
    without dimensions that is zero at the first step; only then there is a state, the
    count. A schedule that needs float64 computes with `t.double()`.

    Example:
        >>> scale(-0.5).update({"w": torch.ones(2)}, ())
        ({'w': tensor([-0.5000, -0.5000])}, ())
    """
    if not is_schedule(factor):
        checks.finite("scale", **plain(factor=factor))
    return _multiplied(factor)


def scale_by_learning_rate(rate: Rate) -> GradientTransformation:
    """Turn gradients into updates that descend: `-rate * g`, as in `scale`."""
    return _multiplied(rate, negate=True)


def _multiplied(factor: Rate, *, negate: bool = False) -> GradientTransformation:
    def scaled(grads, factor):
        def multiply(grad):
            grad = widened(grad)
            value = scalar(factor, grad)
            return (-value if negate else value) * grad

        return map_grads(multiply, grads)

    if not is_schedule(factor):
        return stateless(lambda grads, params: scaled(grads, factor))
    return GradientTransformation(
        lambda params: State(counter(params), {}),
        lambda grads, state, params=None: (
            scaled(grads, factor(state.count)),
            State(state.count + 1, {}),
        ),
    )


def descent(
    lr: Rate,
    *direction: GradientTransformation,
    weight_decay: Number = 0.0,
    decoupled: bool = False,
    maximize: bool = False,
) -> GradientTransformation:
    """Make the chain that most optimizers are: sign, decay, direction and rate.

    Decoupled decay is added after the direction, so the direction does not scale it.
    """
    decay = add_decayed_weights(weight_decay)
    return chain(
        *ascent(maximize),
        *((*direction, decay) if decoupled else (decay, *direction)),
        scale_by_learning_rate(lr),
    )


def ascent(maximize: bool) -> list[GradientTransformation]:
    """List the change of sign that turns descent into ascent, where one maximizes."""
    return [scale(-1.0)] if maximize else []


def masked(
    inner: GradientTransformation, selection: Selection
) -> GradientTransformation:
    """Apply a transformation to the selected names; other gradients pass unchanged.

    `selection` is a list or tuple of patterns of names, or a function of the name.

    Example:
        >>> decay = masked(add_decayed_weights(0.5), ["*.weight"])
        >>> params = {"0.weight": torch.ones(2), "0.bias": torch.ones(2)}
        >>> decay.update(params, decay.init(params), params)[0]
        {'0.weight': tensor([1.5000, 1.5000]), '0.bias': tensor([1., 1.])}
    """
    selection = _checked("masked", "selection", selection)

    def init(params):
        _check_matches("masked", selection, params)
        return inner.init(_part(params, _selected(params, selection)))

    def update(grads, state, params=None):
        chosen = _selected(grads, selection)
        updates, state = _update_part("masked", inner, chosen, grads, state, params)
        return {**grads, **updates}, state

    return GradientTransformation(init, update)


def partition(groups: Mapping[Key, GradientTransformation]) -> GradientTransformation:
    """Give each group of parameters its own transformation: parameter groups.

    A key is a pattern, a tuple of patterns or a function of the name. A name belongs to
    the first group that selects it, in the order of the dictionary, so that exceptions
    come first and `"*"` last. State: a tuple of the groups' states.

    Example:
        >>> from vgrad.optim import adamw, sgd
        >>> tx = partition({"*.bias": sgd(0.5), "*": adamw(0.1, weight_decay=0.0)})
        >>> params = {"0.weight": torch.ones(2), "0.bias": torch.ones(2)}
        >>> tx.update(params, tx.init(params), params)[0]
        {'0.weight': tensor([-0.1000, -0.1000]), '0.bias': tensor([-0.5000, -0.5000])}
    """
    if not groups:
        raise ValueError("partition({}): expected at least one group, got none.")
    transformations = list(groups.values())
    selections = [
        _checked("partition", "key", (key,) if isinstance(key, str) else key)
        for key in groups
    ]

    def init(params):
        for selection in selections:
            _check_matches("partition", selection, params)
        parts = zip(transformations, split(params), strict=True)
        return tuple(tx.init(_part(params, chosen)) for tx, chosen in parts)

    def update(grads, state, params=None):
        if len(state) != len(selections):
            raise ValueError(
                f"partition(state of {len(state)} groups): expected one of "
                f"{len(selections)}, as init of the same partition makes it."
            )
        updates, states = dict(grads), []
        for tx, chosen, old in zip(transformations, split(grads), state, strict=True):
            changed, new = _update_part("partition", tx, chosen, grads, old, params)
            updates.update(changed)
            states.append(new)
        return updates, tuple(states)

    def split(tree):
        """Return the names of each group; each name is in exactly one."""
        left, members = list(tree), []
        for selection in selections:
            members.append(_selected(left, selection))
            left = [name for name in left if name not in members[-1]]
        if left:
            raise ValueError(
                f"partition({checks.listed(left)}): expected a group that selects "
                f"every name, got none for these. End with a group of '*'."
            )
        return members

    return GradientTransformation(init, update)


def set_to_zero(selection: Selection = ("*",)) -> GradientTransformation:
    """Leave the selected parameters as they are; other gradients pass unchanged.

    Their updates are `None`, so that `apply_updates` returns the very same tensors. To
    compute no gradients for them either, see `vgrad.freeze`.

    Example:
        >>> freeze = set_to_zero(["encoder.*"])
        >>> freeze.update({"encoder.weight": torch.ones(2), "bias": torch.ones(1)}, ())
        ({'encoder.weight': None, 'bias': tensor([1.])}, ())
    """
    selection = _checked("set_to_zero", "selection", selection)

    def init(params):
        _check_matches("set_to_zero", selection, params)
        return ()

    return GradientTransformation(
        init,
        lambda grads, state, params=None: (
            {**grads, **dict.fromkeys(_selected(grads, selection))},
            state,
        ),
    )


def _selected(names: Iterable[str], selection: Selection) -> list[str]:
    if callable(selection):
        return [name for name in names if selection(name)]
    return checks.selected(names, selection)


def _part(tree: Mapping[str, Any], chosen: Iterable[str]) -> dict[str, Any]:
    return {name: tree[name] for name in chosen}


def _update_part(function, tx, chosen, grads, state, params):
    part = None
    if params is not None:
        checks.names(f"{function}(grads)", params, grads)
        part = _part(params, chosen)
    return tx.update(_part(grads, chosen), state, part)


def _checked(function: str, argument: str, selection: Any) -> Any:
    """Return an immutable copy of a selection, or refuse it."""
    if callable(selection):
        return selection
    if not isinstance(selection, str | list | tuple):
        raise TypeError(
            f"{function}({argument}={selection!r}): expected patterns of names or a "
            f"function of the name, got a {type(selection).__name__}."
        )
    checks.patterns(function, **{argument: selection})
    return tuple(selection)


def _check_matches(function: str, selection: Selection, params: Params) -> None:
    """Each pattern matches a parameter: a misspelt one would act on other names."""
    if not params:
        return
    if not callable(selection):
        checks.all_matched(function, params, selection)
    elif not _selected(params, selection):
        raise ValueError(
            f"{function}({selection!r}): expected a function that selects a parameter, "
            f"got none. The names are {checks.listed(params)}."
        )


def clip_by_value(clip_value: Number) -> GradientTransformation:
    """Clip every entry to `[-clip_value, clip_value]`; an entry that is NaN stays NaN.

    Example:
        >>> clip_by_value(1.0).update({"w": torch.tensor([0.5, -3.0])}, ())
        ({'w': tensor([ 0.5000, -1.0000])}, ())
    """
    checks.positive("clip_by_value", **plain(clip_value=clip_value))

    def clip(grad):
        bound = scalar(clip_value, grad)
        return grad.clamp(-bound, bound)

    return of_gradient(clip)


def clip_by_global_norm(max_norm: Number) -> GradientTransformation:
    """Shrink all gradients by one factor where their common norm exceeds `max_norm`.

    The factor is `min(max_norm / (norm + 1e-6), 1)` with the norm of `global_norm`, as
    in `torch.nn.utils.clip_grad_norm_`. If the norm is infinite, entries that are not
    finite become NaN, and all others zero. Reference: Pascanu et al., arXiv 1211.5063.

    Example:
        >>> clip = clip_by_global_norm(1.0)
        >>> clip.update({"w": torch.tensor([3.0]), "b": torch.tensor([-4.0])}, ())[0]
        {'w': tensor([0.6000]), 'b': tensor([-0.8000])}
    """
    checks.positive("clip_by_global_norm", **plain(max_norm=max_norm))

    def update(grads, params):
        norm = global_norm(grads)
        factor = (scalar(max_norm, norm) / (norm + 1e-6)).clamp(max=1.0)

        def shrink(grad):
            grad = widened(grad)
            return grad * factor.to(grad.device, grad.dtype)

        return map_grads(shrink, grads)

    return stateless(update)


def global_norm(grads: Grads) -> Tensor:
    """Compute the norm of all entries of all tensors together: `{name: shape} -> []`.

    The squares are summed in `promote_types(dtype, float32)`. Its gradient is zero if
    all entries are. None counts as zero.

    Example:
        >>> global_norm({"w": torch.tensor([3.0]), "b": torch.tensor([-4.0])})
        tensor(5.)
    """
    total = torch.zeros(())
    for grad in grads.values():
        if grad is not None:
            square = widened(grad).abs().square().sum()
            # Without dimensions on either side, the wider dtype of the two.
            total = total.to(square.device) + square
    return length(total)


def clip_by_block_rms(threshold: Number) -> GradientTransformation:
    """Divide each tensor by `max(rms / threshold, 1)`, with its root mean square.

    Reference: Shazeer and Stern, arXiv 1804.04235, section 6.

    Example:
        >>> clip_by_block_rms(1.0).update({"w": torch.tensor([2.0, -2.0])}, ())
        ({'w': tensor([ 1., -1.])}, ())
    """
    checks.positive("clip_by_block_rms", **plain(threshold=threshold))

    def clip(grad):
        rms = root(grad.abs().square().sum() / max(grad.numel(), 1))
        return grad / (rms / scalar(threshold, rms)).clamp(min=1.0)

    return of_gradient(clip)


def adaptive_grad_clip(
    clipping: Number, *, eps: Number = 1e-3
) -> GradientTransformation:
    """Clip the gradient of each unit relative to the norm of the unit's parameters.

    A gradient `g` of parameters `p` whose norm exceeds
    `bound = clipping * max(norm(p), eps)` becomes `g * bound / max(norm(g), 1e-6)`. A
    unit is one entry of the first dimension, or a tensor with at most one dimension
    longer than one. Reference: Brock et al., arXiv 2102.06171.

    Example:
        >>> params = {"w": torch.tensor([3.0, 4.0])}
        >>> adaptive_grad_clip(0.5).update({"w": torch.tensor([6.0, 8.0])}, (), params)
        ({'w': tensor([1.5000, 2.0000])}, ())
    """
    checks.positive("adaptive_grad_clip", **plain(clipping=clipping, eps=eps))

    def unit_norm(value):
        """Return the norm of each unit, in a shape that broadcasts."""
        square = value.abs().square()
        if sum(size > 1 for size in value.shape) <= 1:
            return root(square.sum())
        return root(square.sum(dim=tuple(range(1, value.ndim)), keepdim=True))

    def clip(grad, param):
        norm = unit_norm(grad)
        size = unit_norm(param).to(norm.dtype).clamp(min=scalar(eps, norm))
        bound = scalar(clipping, norm) * size
        clipped = grad * (bound / norm.clamp(min=1e-6))
        return torch.where(norm < bound, grad, clipped)

    return of_gradient_and_parameter("adaptive_grad_clip", clip)


def centralize() -> GradientTransformation:
    """Subtract the mean of each unit from its gradient: `g - mean(g)`.

    A unit is one entry of the first dimension. Tensors of fewer than two stay as they
    are. Reference: Yong et al., arXiv 2004.01461.

    Example:
        >>> centralize().update({"w": torch.tensor([[1.0, 3.0]])}, ())
        ({'w': tensor([[-1.,  1.]])}, ())
    """

    def centre(grad):
        if grad.ndim < 2:
            return grad
        return grad - grad.mean(dim=tuple(range(1, grad.ndim)), keepdim=True)

    return of_gradient(centre)


def zero_nans() -> GradientTransformation:
    """Replace every entry that is NaN by zero, and note where there was one.

    Infinite entries stay. To leave out the whole step instead, see `apply_if_finite`.

    Example:
        >>> grads = {"w": torch.tensor([1.0, float("nan")])}
        >>> updates, state = zero_nans().update(grads, zero_nans().init(grads))
        >>> updates, state.slots["found"]
        ({'w': tensor([1., 0.])}, {'w': tensor(True)})
    """

    def none(param):
        return torch.zeros((), dtype=torch.bool, device=param.device)

    def rule(g, found):
        wide = widened(g)
        # Of a DTensor, a count is compared once its parts are added up; `any` is not.
        return torch.where(wide.isnan(), 0.0, wide), g.isnan().sum() > 0

    return per_parameter("zero_nans", {"found": none}, lambda count: rule, real=False)


def add_noise(
    eta: Number, gamma: Number, *, seed: int | Tensor
) -> GradientTransformation:
    """Add Gaussian noise of the variance `eta / t^gamma` at step `t = 1, 2, ...`.

    The draws of a step are a function of the seed and the count in the state, and of
    the sizes of the gradients: training goes on with the same noise after a checkpoint.
    To give members their own noise, put `init` under `torch.vmap` with seeds `[E]`.
    Drawing takes about four times the memory of the parameters in float32, on every
    rank. Reference: Neelakantan et al., arXiv 1511.06807; Salmon et al., SC 2011.

    Example:
        >>> noise, grads = add_noise(1.0, 0.55, seed=1), {"w": torch.zeros(2)}
        >>> once, again = (noise.update(grads, noise.init(grads))[0] for _ in range(2))
        >>> torch.equal(once["w"], again["w"])
        True
    """
    checks.finite("add_noise", **plain(eta=eta, gamma=gamma))
    checks.non_negative("add_noise", **plain(eta=eta, gamma=gamma))
    checks.whole("add_noise", least=0, **plain(seed=seed))
    checks.between("add_noise", -1, 2**63, **plain(seed=seed))

    def init(params):
        check_real("add_noise", params)
        count = counter(params)
        return State(count, {"seed": count + scalar(seed, count)})

    def update(grads, state, params=None):
        count = state.count + 1
        steps = count.double()
        variance = scalar(eta, steps) / steps ** scalar(gamma, steps)
        # The slope of a root is infinite at zero, where there is no noise.
        some = variance > 0
        deviation = torch.where(some, variance, 1.0).sqrt() * some
        present = {name: widened(g) for name, g in grads.items() if g is not None}
        noise = _normal(present, state.slots["seed"], state.count)
        updates = dict(grads)
        for name, grad in present.items():
            updates[name] = grad + scalar(deviation, grad) * noise[name]
        return updates, State(count, state.slots)

    return GradientTransformation(init, update)


_WORD = 2**32 - 1


def _normal(like: Params, seed: Tensor, count: Tensor) -> Params:
    """Draw normal numbers of the shapes, dtypes and devices of tensors."""
    # All at once: the rounds are about a hundred small operations for each call.
    sizes = [value.numel() for value in like.values()]
    dtypes = (value.dtype for value in like.values())
    dtype = reduce(torch.promote_types, dtypes, torch.float32)
    blocks = torch.arange(math.ceil(sum(sizes) / 4), device=seed.device)
    place = (blocks & _WORD, blocks >> 32, count & _WORD, count >> 32)
    words = philox(place, (seed & _WORD, (seed >> 32) & _WORD))
    # By Box and Muller, from uniform numbers that are never zero.
    first, second, third, fourth = ((w.to(dtype) + 0.5) / 2**32 for w in words)
    radius = (-2 * torch.stack((first, second)).log()).sqrt()
    angle = 2 * math.pi * torch.stack((third, fourth))
    flat = torch.cat((radius * angle.cos(), radius * angle.sin())).flatten()
    noise = {}
    parts = flat[: sum(sizes)].split(sizes)
    for (name, value), part in zip(like.items(), parts, strict=True):
        part = part.reshape(value.shape).to(value.device, value.dtype)
        distributed = shards.is_distributed(value)
        noise[name] = shards.cut(part, value) if distributed else part
    return noise


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Compute Philox4x32-10: four random words for each counter of four words.

    To `torch.vmap` no operation is random, so that each member can have a seed.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # The product wraps at 64 bits; a shift extends the sign, which is cut off.
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = ((p1 >> 32) & _WORD) ^ c1 ^ k0, p1 & _WORD
        c2, c3 = ((p0 >> 32) & _WORD) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3
