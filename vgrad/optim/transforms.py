"""Transformations of gradients, averages, and optimizers around optimizers.

Clipping and noise act on gradients that were already summed or averaged over a batch,
and give no privacy, as `vgrad.clipped_grad` and `vgrad.dp` do.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial, reduce
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from vgrad import checks
from vgrad.generators import random_bits
from vgrad.optim.base import (
    SHARE,
    GradientTransformation,
    Grads,
    Number,
    Rate,
    State,
    apply_updates,
    chain,
    check_numbers,
    check_range,
    check_real,
    counter,
    counting,
    filled,
    is_schedule,
    is_zero,
    length,
    lerp,
    map_grads,
    of_gradient,
    of_gradient_and_parameter,
    per_parameter,
    plain,
    plus,
    rate_at,
    required,
    root,
    scalar,
    stateless,
)
from vgrad.torch_private import shards
from vgrad.tree import cast, map_values, tree_leaves, tree_map, widened
from vgrad.typing import Params, Schedule, Tree

__all__ = [
    "adaptive_grad_clip",
    "add_decayed_weights",
    "add_noise",
    "apply_if_finite",
    "averaged_parameters",
    "centralize",
    "clip_by_block_rms",
    "clip_by_global_norm",
    "clip_by_value",
    "ema",
    "ema_parameters",
    "evaluation_parameters",
    "global_norm",
    "inject_hyperparams",
    "lookahead",
    "masked",
    "multi_steps",
    "partition",
    "polyak_average",
    "reduce_on_plateau",
    "scale",
    "scale_by_learning_rate",
    "schedule_free",
    "set_to_zero",
    "with_hyperparams",
    "zero_nans",
]

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
    name = "add_decayed_weights"
    if mask is not None:
        inner = add_decayed_weights(weight_decay)
        return _of_part(name, inner, _checked(name, "mask", mask))
    if is_zero(weight_decay):
        return chain()
    return of_gradient_and_parameter(name, lambda g, p: plus(g, weight_decay, p))


def scale(factor: Rate) -> GradientTransformation:
    """Multiply gradients by a factor, or one that changes: `factor * g`.

    A schedule gets the number of steps taken so far, an int64 tensor that is zero at
    the first step; only then there is a state, the count.

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
        return stateless(lambda grads, _: scaled(grads, factor))
    return counting(lambda grads, _, count: scaled(grads, factor(count)))


def descent(
    lr: Rate, weight_decay: Number, maximize: bool, *direction: Any, decoupled=False
) -> GradientTransformation:
    """Make the chain that most optimizers are; `decoupled` decay is not in moments."""
    decay = add_decayed_weights(weight_decay)
    parts = (*direction, decay) if decoupled else (decay, *direction)
    return chain(*ascent(maximize), *parts, scale_by_learning_rate(lr))


def ascent(maximize: bool) -> list[GradientTransformation]:
    """List the change of sign with which descent maximizes."""
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
    return _of_part("masked", inner, _checked("masked", "selection", selection))


def partition(groups: Mapping[Key, GradientTransformation]) -> GradientTransformation:
    """Give each group of parameters its own transformation: parameter groups.

    A key is a pattern, a tuple of patterns or a function of the name. A name belongs to
    the first group that selects it, so that exceptions come first and `"*"` last.
    State: a tuple of the groups' states.

    Example:
        >>> tx = partition({"*.bias": scale(-0.5), "*": vgrad.optim.adamw(0.1)})
        >>> params = {"0.weight": torch.zeros(2), "0.bias": torch.ones(2)}
        >>> tx.update(params, tx.init(params), params)[0]["0.bias"]
        tensor([-0.5000, -0.5000])
    """
    if not groups:
        raise ValueError("partition({}): expected at least one group, got none.")
    selections, parts = [], []
    for key, tx in groups.items():
        selection = (key,) if isinstance(key, str) else key
        selections.append(_checked("partition", "key", selection))
        parts.append(_of_part("partition", tx, selections[-1], selections[:-1]))
    chained = chain(*parts)

    def init(params):
        missing = set(params).difference(*(_selected(params, s) for s in selections))
        if missing:
            raise ValueError(
                f"partition({checks.listed(missing)}): expected a group that selects "
                f"every name, got none for these. End with a group of '*'."
            )
        return chained.init(params)

    return chained._replace(init=init)


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
    return _of_part("set_to_zero", stateless(lambda g, _: dict.fromkeys(g)), selection)


def _of_part(function, inner, selection: Any, before=()) -> GradientTransformation:
    """Apply a transformation to the names selected, but for those selected before."""

    def chosen(tree):
        claimed = {name for earlier in before for name in _selected(tree, earlier)}
        return [name for name in _selected(tree, selection) if name not in claimed]

    def init(params):
        names = _selected(params, selection)
        if params and not callable(selection):
            checks.all_matched(function, params, selection)
        elif params and not names:
            raise ValueError(
                f"{function}({selection!r}): expected a function that selects a "
                f"parameter, got none. The names are {checks.listed(params)}."
            )
        return inner.init({name: params[name] for name in chosen(params)})

    def update(grads, state, params=None):
        names = chosen(grads)
        if params is not None:
            checks.names(f"{function}(grads)", params, grads)
            params = {name: params[name] for name in names}
        part = {name: grads[name] for name in names}
        updates, state = inner.update(part, state, params)
        return {**grads, **updates}, state

    return GradientTransformation(init, update, counted=inner.counted)


def _selected(names: Iterable[str], selection: Selection) -> list[str]:
    if callable(selection):
        return [name for name in names if selection(name)]
    return checks.selected(names, selection)


def _checked(function: str, argument: str, selection: Any) -> Any:
    """Return an immutable copy of a selection, or refuse it."""
    if callable(selection):
        return selection
    checks.patterns(function, **{argument: selection})
    return tuple(selection)


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

    The factor is `min(max_norm / (norm + 1e-6), 1)`, as in
    `torch.nn.utils.clip_grad_norm_`. If the norm is infinite, entries that are not
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


def ema(decay: Number, *, debias: bool = True) -> GradientTransformation:
    """Replace gradients by their exponential moving average.

    `m = decay * m + (1 - decay) * g` from zero; the update is `m`, divided by
    `1 - decay^t` at step `t` for `debias`. State: one tensor per parameter. Reference:
    Kingma and Ba, arXiv 1412.6980, section 3.

    Example:
        >>> tx, grads = ema(0.5, debias=False), {"w": torch.ones(2)}
        >>> tx.update(grads, tx.init(grads))[0]
        {'w': tensor([0.5000, 0.5000])}
    """
    check_range("ema", *SHARE, decay=decay)

    def at(count):
        correction = 1 - decay ** count.double()

        def rule(g, mean):
            mean = lerp(mean, g, 1 - decay)
            return mean / scalar(correction, mean) if debias else mean, mean

        return rule

    return per_parameter("ema", {"ema": 0}, at, real=False)


def global_norm(grads: Grads) -> Tensor:
    """Compute the norm of all entries of all tensors together: `{name: shape} -> []`.

    The squares are summed in `promote_types(dtype, float32)`. None counts as zero.

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
        centred = grad - grad.mean(dim=tuple(range(1, grad.ndim)), keepdim=True)
        # From torch 2.14 on, ranks without a row make the difference a replicated one.
        return shards.placed(centred, grad)

    return of_gradient(centre)


def zero_nans() -> GradientTransformation:
    """Replace every entry that is NaN by zero, and note where there was one.

    Infinite entries stay. To leave out the whole step instead, see `apply_if_finite`.

    Example:
        >>> grads = {"w": torch.tensor([1.0, float("nan")])}
        >>> zero_nans().update(grads, zero_nans().init(grads))[0]
        {'w': tensor([1., 0.])}
    """

    def none(param):
        return torch.zeros((), dtype=torch.bool, device=param.device)

    def rule(g, flag):
        wide = widened(g)
        # Of a DTensor, a count is compared once its parts are added up; `any` is not.
        return torch.where(wide.isnan(), 0.0, wide), g.isnan().sum() > 0

    return per_parameter("zero_nans", {"found": none}, lambda count: rule, real=False)


def add_noise(
    eta: Number, gamma: Number, *, seed: int | Tensor
) -> GradientTransformation:
    """Add Gaussian noise of the variance `eta / t^gamma` at step `t = 1, 2, ...`.

    It is a function of the seed and the count in the state, and of the sizes of the
    gradients in their order. Put `init` under `torch.vmap` for members with seeds
    `[E]`. Drawing takes a few times the memory of the parameters in float32, on every
    rank. Reference: Neelakantan et al., arXiv 1511.06807.

    Example:
        >>> noise, grads = add_noise(1.0, 0.55, seed=1), {"w": torch.zeros(2)}
        >>> once, again = (noise.update(grads, noise.init(grads))[0] for _ in range(2))
        >>> torch.equal(once["w"], again["w"])
        True
    """
    checks.finite("add_noise", **plain(eta=eta, gamma=gamma))
    checks.non_negative("add_noise", **plain(eta=eta, gamma=gamma))
    checks.integers("add_noise", minimum=0, **plain(seed=seed))
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
        noisy = variance > 0
        deviation = torch.where(noisy, variance, 1.0).sqrt() * noisy
        present = {name: widened(g) for name, g in grads.items() if g is not None}
        noise = _normal(present, state.slots["seed"], state.count)
        updates = dict(grads)
        for name, grad in present.items():
            updates[name] = grad + scalar(deviation, grad) * noise[name]
        return updates, State(count, state.slots)

    return GradientTransformation(init, update)


def _normal(like: Params, seed: Tensor, count: Tensor) -> Params:
    # All at once, in few operations, of which none is random to `torch.vmap`.
    sizes = [value.numel() for value in like.values()]
    dtypes = (value.dtype for value in like.values())
    dtype = reduce(torch.promote_types, dtypes, torch.float32)
    # Neighbouring seeds and counts have streams that are far from each other.
    streams = random_bits(random_bits(seed, 1)[0] + count, 1)[0]
    bits = random_bits(streams, math.ceil(sum(sizes) / 2))
    # By Box and Muller, from uniform numbers that are never zero.
    words = (bits >> 32 & 2**32 - 1, bits & 2**32 - 1)
    first, second = ((word.to(dtype) + 0.5) / 2**32 for word in words)
    radius, angle = (-2 * first.log()).sqrt(), 2 * math.pi * second
    flat = torch.cat((radius * angle.cos(), radius * angle.sin()))
    noise = {}
    parts = flat[: sum(sizes)].split(sizes)
    for (name, value), part in zip(like.items(), parts, strict=True):
        part = part.reshape(value.shape).to(value.device, value.dtype)
        noise[name] = shards.cut(part, value)
    return noise


def _advance(function: Callable, old: Params, new: Grads, *others: Params) -> Params:
    # Where `new` is None, the entry of `old` stays.
    def apply(before, value, *rest):
        return before if value is None else function(before, value, *rest)

    return map_values(apply, old, new, *others)


def _copies(params: Params) -> Params:
    return map_values(lambda param: widened(param).clone(), params)


def states_of(state: Tree, is_one: Callable[[Any], bool]) -> list[Any]:
    """List the nodes of a state for which a function is true, outermost ones alone."""
    return [node for node in tree_leaves(state, is_leaf=is_one) if is_one(node)]


def average_after(function: str, share: Callable) -> GradientTransformation:
    """Move an average by a share of the way to the parameters after each step."""

    def update(grads, state, params=None):
        params = required(function, params, grads, state.slots["ax"])
        count = state.count + 1
        after, weight = apply_updates(params, grads), share(count)
        average = map_values(lambda x, p: lerp(x, p, weight), state.slots["ax"], after)
        return dict(grads), State(count, {"ax": average})

    return GradientTransformation(
        lambda params: State(counter(params), {"ax": _copies(params)}), update
    )


def ema_parameters(decay: Number) -> GradientTransformation:
    """Keep an exponential moving average of the parameters; updates pass unchanged.

    `average = decay * average + (1 - decay) * p` with the parameters `p` after each
    step, from `p` after the first, as
    `torch.optim.swa_utils.get_ema_multi_avg_fn(decay)`. Put it last in a chain;
    `averaged_parameters` reads it. State: one tensor per parameter. Reference:
    Tarvainen and Valpola, arXiv 1703.01780.

    Example:
        >>> tx = vgrad.optim.chain(vgrad.optim.sgd(1.0), ema_parameters(0.999))
    """
    check_range("ema_parameters", *SHARE, decay=decay)

    def share(count):
        first = (count == 1).double()
        return first + (1 - first) * (1 - decay)

    return average_after("ema_parameters", share)


def polyak_average(*, start: int | Tensor = 0) -> GradientTransformation:
    """Keep the mean of the parameters over all steps; updates pass unchanged.

    The mean is over the parameters after each step later than `start`; until then it is
    the parameters themselves. `start=0` is torch's `AveragedModel`. Use and state are
    as in `ema_parameters`. Reference: Izmailov et al., arXiv 1803.05407.

    Example:
        >>> tx = vgrad.optim.chain(vgrad.optim.sgd(1.0), polyak_average())
    """
    checks.integers("polyak_average", minimum=0, **plain(start=start))

    def share(count):
        return 1 / (count - scalar(start, count)).clamp(min=1).double()

    return average_after("polyak_average", share)


def averaged_parameters(state: Tree) -> Params:
    """Return the average of `ema_parameters`, `polyak_average` or `asgd` in a state.

    The tensors, of the one average in the state, are in
    `promote_types(param dtype, float32)`.

    Example:
        >>> averaged_parameters(polyak_average().init({"w": torch.ones(2)}))
        {'w': tensor([1., 1.])}
    """
    averages = states_of(state, lambda x: isinstance(x, State) and "ax" in x.slots)
    if len(averages) != 1:
        raise ValueError(
            f"averaged_parameters(state with {len(averages)} averages): expected one, "
            f"of ema_parameters, polyak_average or asgd. Pass that part of it."
        )
    return dict(averages[0].slots["ax"])


# Around optimizers. The inner update runs at every call, and `torch.where` chooses, on
# the device, whether its result is kept: nothing waits, and under `torch.vmap` each
# member has its choice.


class LookaheadState(NamedTuple):
    """State of `lookahead`: the steps taken, the slow weights and the inner state."""

    count: Tensor
    slow: Params
    inner: Tree


def lookahead(
    inner: GradientTransformation,
    *,
    sync_period: int | Tensor = 5,
    slow_step_size: Number = 0.5,
) -> GradientTransformation:
    """Let fast weights run ahead, and return part of the way every few steps.

    At every `sync_period`-th step the slow weights, which start as the parameters, move
    by `slow_step_size * (p - slow)` towards the parameters `p`, which become the slow
    weights. State: the inner one, and these. Reference: Zhang et al., arXiv 1907.08610.

    Example:
        >>> tx, params = lookahead(scale(-1.0), sync_period=1), {"w": torch.ones(2)}
        >>> tx.update(params, tx.init(params), params)[0]
        {'w': tensor([-0.5000, -0.5000])}
    """
    checks.integers("lookahead", minimum=1, **plain(sync_period=sync_period))
    checks.positive("lookahead", **plain(slow_step_size=slow_step_size))

    def init(params):
        return LookaheadState(counter(params), _copies(params), inner.init(params))

    def update(grads, state, params=None):
        params = required("lookahead", params, grads, state.slow)
        checks.names("lookahead(params)", state.slow, params)
        count = state.count + 1
        synced = count % scalar(sync_period, count) == 0
        updates, new = inner.update(grads, state.inner, params)

        def forward(slow, update, param):
            fast = widened(param) + update
            moved = slow + scalar(slow_step_size, slow) * (fast - slow)
            return torch.where(synced.to(slow.device), moved, slow)

        def back(update, slow, param):
            return torch.where(synced.to(slow.device), slow - param, update)

        slow = _advance(forward, state.slow, updates, params)
        updates = map_grads(back, updates, slow, params)
        return updates, LookaheadState(count, slow, new)

    return GradientTransformation(init, update, counted=inner.counted)


class ApplyIfFiniteState(NamedTuple):
    """State of `apply_if_finite`: errors in a row and in total, and the inner state."""

    errors: Tensor
    total_errors: Tensor
    last_finite: Tensor
    inner: Tree


def apply_if_finite(
    inner: GradientTransformation, *, max_consecutive_errors: int | Tensor
) -> GradientTransformation:
    """Leave out steps with a gradient that is infinite or NaN, as optax does.

    Such a step has updates of zero and keeps the inner state. After
    `max_consecutive_errors` of them in a row the next one is made anyway. The state
    counts `errors` and `total_errors`.

    Example:
        >>> tx = apply_if_finite(scale(-1.0), max_consecutive_errors=3)
        >>> grads = {"w": torch.tensor([1.0, float("inf")])}
        >>> tx.update(grads, tx.init(grads))[0]
        {'w': tensor([0., 0.])}
    """
    numbers = plain(max_consecutive_errors=max_consecutive_errors)
    checks.integers("apply_if_finite", minimum=0, **numbers)

    def init(params):
        count = counter(params)
        finite = torch.ones_like(count).bool()
        return ApplyIfFiniteState(count, count.clone(), finite, inner.init(params))

    def update(grads, state, params=None):
        finite = torch.ones_like(state.last_finite)
        for grad in grads.values():
            if grad is not None:
                finite = finite & grad.isfinite().all().to(finite.device)
        errors = torch.where(finite, 0, state.errors + 1)
        accepted = finite | (errors > scalar(max_consecutive_errors, errors))
        # A discarded update is computed from zeros: if it were NaN, gradients through
        # the branch that is kept would be NaN too.
        inner_grads = _kept_or_zero(accepted, grads)
        updates, new = inner.update(inner_grads, state.inner, params)
        total, new = state.total_errors + (~finite), _select(accepted, new, state.inner)
        state = ApplyIfFiniteState(errors, total, finite, new)
        return _kept_or_zero(accepted, updates), state

    return GradientTransformation(init, update, counted=inner.counted)


class MultiStepsState(NamedTuple):
    """State of `multi_steps`: calls and mean since the last step, the inner state."""

    count: Tensor
    mean: Params
    inner: Tree


def multi_steps(
    inner: GradientTransformation, steps: int | Tensor
) -> GradientTransformation:
    """Make one inner step of the mean gradient of every `steps` calls.

    All other calls have updates of zero. A gradient of None counts as zero; a parameter
    whose gradient is None at the last call is not updated, and its sum waits for the
    next round. State: the inner one, and the mean.

    Example:
        >>> tx, grads = multi_steps(vgrad.optim.sgd(1.0), 2), {"w": torch.ones(1)}
        >>> updates, state = tx.update(grads, tx.init(grads))
        >>> updates, tx.update(grads, state)[0]
        ({'w': tensor([0.])}, {'w': tensor([-1.])})
    """
    checks.integers("multi_steps", minimum=1, **plain(steps=steps))

    def init(params):
        mean = map_values(filled, params)
        return MultiStepsState(counter(params), mean, inner.init(params))

    def update(grads, state, params=None):
        checks.names("multi_steps(grads)", state.mean, grads)
        count = state.count + 1
        last = count >= scalar(steps, count)
        share = 1 / scalar(steps, count.double())

        def restart(total, grad):
            return torch.where(last.to(total.device), 0.0, total)

        mean = _advance(
            lambda total, g: plus(total, share, cast(g, total.dtype)), state.mean, grads
        )
        present = map_grads(lambda _, total: total, grads, mean)
        updates, new = inner.update(present, state.inner, params)
        new, rest = _select(last, new, state.inner), _advance(restart, mean, grads)
        state = MultiStepsState(torch.where(last, 0, count), rest, new)
        return _kept_or_zero(last, updates), state

    return GradientTransformation(init, update, counted=inner.counted)


def _kept_or_zero(mask, values):
    return map_grads(lambda x: torch.where(mask.to(x.device), widened(x), 0.0), values)


def _select(mask, new, old):
    return tree_map(lambda x, y: torch.where(mask.to(x.device), x, y), new, old)


class ScheduleFreeState(NamedTuple):
    """State of `schedule_free`: steps taken, their weight, inner state, `z` and `x`."""

    count: Tensor
    weight: Tensor
    inner: Tree
    iterate: Params
    average: Params


def schedule_free(
    inner: GradientTransformation,
    lr: Rate = 1.0,
    *,
    beta: Number = 0.9,
    weight_lr_power: Number = 2.0,
) -> GradientTransformation:
    """Average the iterates instead of using momentum and a falling rate.

    With `y` the parameters, where gradients are taken, `z` the iterate that the inner
    optimizer moves and `x` its average, all three of which start as the parameters:
    `z += inner(gradient at y); x = (1 - c) * x + c * z; y = (1 - beta) * z + beta * x`.
    The share `c` is `w / (sum of w so far)` with `w = lr ** weight_lr_power` of the
    step. `lr` is the rate of the inner optimizer, which should have no momentum.
    Evaluate the model at `x`, which `evaluation_parameters` returns. State: `inner`'s,
    and `z` and `x`. Reference: Defazio et al., arXiv 2405.15682.

    Example:
        >>> tx, params = schedule_free(vgrad.optim.sgd(1.0)), {"w": torch.ones(2)}
        >>> tx.update({"w": torch.ones(2)}, tx.init(params), params)[0]
        {'w': tensor([-1., -1.])}
    """
    check_numbers("schedule_free", lr, weight_lr_power=weight_lr_power)
    check_range("schedule_free", *SHARE, beta=beta)

    def init(params):
        count, both = counter(params), (_copies(params), _copies(params))
        return ScheduleFreeState(count, count.double(), inner.init(params), *both)

    def update(grads, state, params=None):
        params = required("schedule_free", params, grads, state.iterate)
        moves, new = inner.update(grads, state.inner, params)
        rate = scalar(rate_at(lr, state.count), state.weight)
        weight = rate ** scalar(weight_lr_power, state.weight)
        total = state.weight + weight
        share = weight / total.masked_fill(total == 0, 1.0)

        def mix(update, z, x, y):
            mixing = scalar(beta, z)
            return (1 - mixing) * z + mixing * x - widened(y)

        iterate = _advance(lambda z, u: z + u.to(z.dtype), state.iterate, moves)
        average = _advance(
            lambda x, _, z: lerp(x, z, share), state.average, moves, iterate
        )
        updates = map_grads(mix, moves, iterate, average, params)
        new_state = ScheduleFreeState(state.count + 1, total, new, iterate, average)
        return updates, new_state

    return GradientTransformation(init, update, counted=inner.counted)


def evaluation_parameters(state: Tree, params: Params) -> Params:
    """Return the parameters to evaluate: `{name: shape} -> {name: shape}`.

    They are the averages of `schedule_free` anywhere in `state`, in the dtypes of
    `params`; parameters without an average stay.

    Example:
        >>> tx, params = vgrad.optim.schedule_free_sgd(0.5), {"w": torch.ones(2)}
        >>> evaluation_parameters(tx.init(params), params)
        {'w': tensor([1., 1.])}
    """
    states = states_of(state, lambda node: isinstance(node, ScheduleFreeState))
    if not states:
        raise ValueError(
            "evaluation_parameters(state): expected the state of a schedule_free "
            "optimizer, got one without its averages."
        )
    averages = {name: x for free in states for name, x in free.average.items()}
    checks.names("evaluation_parameters(params)", {**params, **averages}, params)
    return {name: averages.get(name, p).to(p.dtype) for name, p in params.items()}


Hyperparam = Number | Schedule | tuple["Hyperparam", ...]
"""A number, a tensor without dimensions, a schedule, or a tuple of these."""


class HyperparamsState(NamedTuple):
    """State of `inject_hyperparams`: the steps taken, the values, the inner state."""

    count: Tensor
    hyperparams: dict[str, Tree]
    inner: Tree


def inject_hyperparams(
    make: Callable[..., GradientTransformation], /, **hyperparams: Hyperparam
) -> GradientTransformation:
    """Keep the hyperparameters of an optimizer in its state, where they can be set.

    `inject_hyperparams(adam, lr=1e-3)` makes the steps of `adam(lr=1e-3)`. The values
    are in `state.hyperparams` as float64 tensors; `with_hyperparams` sets them. A
    schedule is evaluated at every step, and overwrites a value set by hand. Bind all
    other options before: `inject_hyperparams(partial(sgd, nesterov=True), lr=0.1)`.

    Example:
        >>> tx, grads = inject_hyperparams(scale, factor=-0.5), {"w": torch.ones(2)}
        >>> tx.update(grads, with_hyperparams(tx.init(grads), factor=-0.25))[0]
        {'w': tensor([-0.2500, -0.2500])}
    """
    for name, value in hyperparams.items():
        _check_hyperparam(name, value)
    # This call checks the numbers: as tensors of the state they never are.
    unchecked = torch.zeros(())  # instead of a schedule
    numbers = tree_map(lambda v: unchecked if is_schedule(v) else v, hyperparams)
    counted = make(**numbers).counted
    settable = tuple(
        name
        for name, value in hyperparams.items()
        if not any(map(is_schedule, tree_leaves(value)))
    )

    def in_state(value, count):
        value = rate_at(value, count)
        if isinstance(value, Tensor):
            return value.to(count.device, torch.float64, copy=True)
        return torch.full_like(count, value, dtype=torch.float64)

    def init(params):
        count = counter(params)
        values = tree_map(lambda value: in_state(value, count), hyperparams)
        return HyperparamsState(count, values, make(**values).init(params))

    def update(grads, state, params=None):
        count, current, inner = state
        checks.names("inject_hyperparams(state.hyperparams)", hyperparams, current)

        def now(value, last):
            return in_state(value, count) if is_schedule(value) else last

        values = map_values(partial(tree_map, now), hyperparams, current)
        updates, inner = make(**values).update(grads, inner, params)
        return updates, HyperparamsState(count + 1, values, inner)

    return GradientTransformation(init, update, counted=counted, settable=settable)


def _check_hyperparam(name: str, value: Any) -> None:
    if isinstance(value, tuple):
        for part in value:
            _check_hyperparam(name, part)
        return
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number and not isinstance(value, Tensor) and not callable(value):
        raise TypeError(
            f"inject_hyperparams({name}={value!r}): expected a number, a tensor, a "
            f"schedule or a tuple of these, got a {type(value).__name__}. Bind it "
            f"before: partial(make, {name}={value!r})."
        )


def with_hyperparams(
    state: HyperparamsState, **hyperparams: Number | tuple
) -> HyperparamsState:
    """Return a state of `inject_hyperparams` with other values, unchecked.

    A number is set for all members of a stacked state, a tensor `[E]` for each its own.

    Example:
        >>> state = inject_hyperparams(scale, factor=0.5).init({})
        >>> with_hyperparams(state, factor=0.25).hyperparams
        {'factor': tensor(0.2500, dtype=torch.float64)}
    """
    if not isinstance(state, HyperparamsState):
        raise TypeError(
            f"with_hyperparams(state): expected the state of inject_hyperparams, got a "
            f"{type(state).__name__}. Pass that part of it."
        )
    old = state.hyperparams
    unknown = set(hyperparams) - set(old)
    if unknown:
        raise ValueError(
            f"with_hyperparams({checks.listed(unknown)}): expected names among "
            f"{checks.listed(old)}."
        )
    new = {name: _like(name, value, old[name]) for name, value in hyperparams.items()}
    return state._replace(hyperparams={**old, **new})


def _like(name: str, value: Any, old: Tree) -> Tree:
    if isinstance(old, tuple):
        if not isinstance(value, tuple) or len(value) != len(old):
            raise ValueError(
                f"with_hyperparams({name}={value!r}): expected a tuple of {len(old)}."
            )
        return tuple(_like(name, v, o) for v, o in zip(value, old, strict=True))
    return _expanded("with_hyperparams", name, value, old).clone()


def _expanded(function: str, name: str, value: Number, like: Tensor) -> Tensor:
    if not isinstance(value, Tensor):
        return torch.full_like(like, value)
    if value.shape not in ((), like.shape):
        raise ValueError(
            f"{function}({name} of shape {tuple(value.shape)}): expected a number or a "
            f"tensor of shape {tuple(like.shape)}."
        )
    return value.to(like.device, like.dtype).expand(like.shape)


Observe = Callable[[Tree, Number], Tree]
"""`observe(state, value)` returns the state after a value was measured."""

Mode = Literal["min", "max"]
ThresholdMode = Literal["rel", "abs"]


class PlateauState(NamedTuple):
    """State of `reduce_on_plateau`: `bad` values in a row, `cooldown` to ignore."""

    rate: Tensor
    best: Tensor
    bad: Tensor
    cooldown: Tensor
    inner: Tree


def reduce_on_plateau(
    make: Callable[[Tensor], GradientTransformation],
    lr: Number,
    *,
    mode: Mode = "min",
    factor: Number = 0.1,
    patience: int | Tensor = 10,
    threshold: Number = 1e-4,
    threshold_mode: ThresholdMode = "rel",
    cooldown: int | Tensor = 0,
    min_lr: Number = 0.0,
    eps: Number = 1e-8,
) -> tuple[GradientTransformation, Observe]:
    """Make the steps of `make(rate)`, and lower the rate when a value stagnates.

    Returns the optimizer and `observe(state, value) -> state`, whose state may be any
    tree with the optimizer's inside, also stacked for members, with a value `[E]`. The
    rate is `state.rate`, in float64.

    As in `torch.optim.lr_scheduler.ReduceLROnPlateau`, a value is better than the best
    one, for `mode="min"`, if it is below `best * (1 - threshold)` for `"rel"`,
    `best - threshold` for `"abs"`; NaN never is. After more than `patience` values in a
    row that are not better, `rate = max(rate * factor, min_lr)`, if that lowers it by
    more than `eps`, and the next `cooldown` values do not count.

    Example:
        >>> tx, observe = reduce_on_plateau(vgrad.optim.sgd, 0.5, patience=0)
        >>> state = tx.init({"w": torch.ones(2)})
        >>> observe(observe(state, 1.0), 1.0).rate
        tensor(0.0500, dtype=torch.float64)
    """
    function = "reduce_on_plateau"
    checks.choice(function, get_args(Mode), mode=mode)
    checks.choice(function, get_args(ThresholdMode), threshold_mode=threshold_mode)
    checks.between(function, 0, 1, **plain(factor=factor))
    checks.integers(function, minimum=0, **plain(patience=patience, cooldown=cooldown))
    numbers = plain(lr=lr, threshold=threshold, min_lr=min_lr, eps=eps)
    checks.non_negative(function, **numbers)
    sign = 1 if mode == "min" else -1

    def init(params):
        zero = counter(params)
        rate = zero.double() + scalar(lr, zero.double())
        best = torch.full_like(rate, sign * math.inf)
        return PlateauState(rate, best, zero, zero.clone(), make(rate).init(params))

    def update(grads, state, params=None):
        updates, inner = make(state.rate).update(grads, state.inner, params)
        return updates, state._replace(inner=inner)

    def after(state, value):
        best = state.best
        # No gradient flows through a comparison.
        value = _expanded("observe", "value", value, best).detach()
        margin = sign * scalar(threshold, best)
        bound = best * (1 - margin) if threshold_mode == "rel" else best - margin
        better = sign * value < sign * bound
        cooling = state.cooldown > 0
        bad = torch.where(better | cooling, 0, state.bad + 1)
        lowering = bad > scalar(patience, bad)
        lower = (state.rate * scalar(factor, best)).clamp(min=scalar(min_lr, best))
        lowered = lowering & (state.rate - lower > scalar(eps, best))
        remaining = torch.where(cooling, state.cooldown - 1, state.cooldown)
        return PlateauState(
            torch.where(lowered, lower, state.rate),
            torch.where(better, value, best),
            torch.where(lowering, 0, bad),
            torch.where(lowering, scalar(cooldown, remaining), remaining),
            state.inner,
        )

    def is_plateau(node):
        return isinstance(node, PlateauState)

    def observe(state, value):
        plateaus = len(states_of(state, is_plateau))
        if plateaus != 1:
            raise ValueError(
                f"observe(state with {plateaus} plateaus): expected the state of one "
                f"reduce_on_plateau. Pass that part of it."
            )

        def seen(node):
            return after(node, value) if is_plateau(node) else node

        return tree_map(seen, state, is_leaf=is_plateau)

    counted = make(torch.zeros(())).counted
    return GradientTransformation(init, update, counted=counted), observe
