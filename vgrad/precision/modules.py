"""A policy for a functional model: one for the whole of it, or one for each module."""

import copy
import functools
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vgrad import checks
from vgrad.functional.model import FunctionalModel
from vgrad.precision.autocasting import autocast
from vgrad.precision.policy import Policy, cast_floating
from vgrad.torch_private.tensors import NormBase
from vgrad.tree import tree_leaves
from vgrad.typing import Buffers, Params, Tree

_LOW = (torch.float16, torch.bfloat16)


Key = str | tuple[str, ...]
"""The modules that have a policy: one pattern of names, or several."""


def policy_for(
    fmodel: FunctionalModel, policy: Policy | str | Mapping[Key, Policy | str]
) -> "PolicyModel":
    """Run a functional model under a policy: the same function in other dtypes.

    Parameters and outputs are cast as the policy says, and the model runs under
    `autocast(compute_dtype)`; where that is float32 or float64 there is no autocast,
    and parameters and inputs are cast to it. Gradients have the dtype of the parameters
    that are given, so float32 parameters are master weights.

    A dictionary gives modules policies of their own, by a pattern of names or a tuple
    of them: `{"": "mixed_bfloat16", ("head", "*.norm"): "float32"}`, where `""` is the
    model itself. A policy holds for everything inside a module, unless a more specific
    pattern (one with more letters outside of its wildcards) matches there.

    Buffers come back in the dtype that they are given in. They are cast for the forward
    pass where the computation is in float32 or float64; otherwise running statistics
    stay as they are, and so does what a batch norm multiplies by.

    Raises:
        TypeError: `fmodel` is not what `make_functional_with_buffers` returns, or has
            policies already, a policy is neither a `Policy` nor a string, or a key is
            neither a pattern nor a tuple of patterns.
        ValueError: a pattern matches no module, two equally specific ones give one
            module different policies, tied parameters would get several dtypes, or a
            string is no policy.

    Example:
        >>> import vgrad
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        >>> fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
        >>> mixed = policy_for(fmodel, {"": "mixed_bfloat16", "1": "float32"})
        >>> mixed(params, buffers, torch.ones(5, 3)).dtype
        torch.float32
    """
    if not isinstance(fmodel, FunctionalModel):
        raise TypeError(
            f"policy_for(fmodel): expected what make_functional_with_buffers returns, "
            f"got a {type(fmodel).__name__}."
        )
    if isinstance(fmodel, PolicyModel):
        raise TypeError(
            "policy_for(fmodel): expected a model without policies, got one that has "
            "them. Pass one dictionary of all policies."
        )
    given = policy if isinstance(policy, Mapping) else {"": policy}
    return PolicyModel(fmodel, {key: _policy(each) for key, each in given.items()})


def loss_under(policy: Policy | str, loss: Callable) -> Callable:
    """Run a loss, of a sample or of a batch, under a policy.

    The loss gets parameters in the dtype of the policy and runs under its autocast;
    a computation in float32 or float64 has its batch and buffers cast too. The result
    is not cast.

    Example:
        >>> loss = lambda params, buffers, x: (x @ params["w"]).sum()
        >>> params, x = {"w": torch.ones(2)}, torch.ones(3, 2)
        >>> loss_under("mixed_bfloat16", loss)(params, {}, x)
        tensor(6., dtype=torch.bfloat16)
    """
    own = _policy(policy)

    def run(params: Params, buffers: Buffers, /, *batch: Tree) -> Any:
        params = {name: _cast_param(own, value) for name, value in params.items()}
        buffers = {name: _cast_buffer(own, value) for name, value in buffers.items()}
        if own.compute_dtype not in _LOW:
            batch = own.cast_to_compute(batch)
        with _computing(own.compute_dtype, _device([params, batch])):
            return loss(params, buffers, *batch)

    return run


class PolicyModel(FunctionalModel):
    """What `policy_for` returns: a functional model under its policies.

    Attributes:
        policies: by pattern or tuple of patterns, as they were given.
    """

    def __init__(self, fmodel: FunctionalModel, policies: Mapping[Key, Policy]) -> None:
        """Watch the modules that have a policy, in a copy."""
        skeleton = copy.deepcopy(fmodel._skeleton)
        self.policies = dict(policies)
        self._plain = fmodel
        self._regions = _Regions()
        modules = dict(skeleton.named_modules())
        chosen = _chosen(list(modules), policies)
        for name, module in modules.items():
            if (policy := chosen[name]) is not None:
                self._regions.watch(module, policy)
        super().__init__(skeleton, fmodel._entries.constants)
        self._owners: dict[str, Policy] = {}
        for name, aliases in self._entries.aliases.items():
            places = [alias.rpartition(".")[0] for alias in aliases]
            # A module in two places is known by its first name.
            places = [each for each in places if each in modules]
            found = [_owner(modules[each], chosen[each]) for each in places]
            if name not in self.buffer_names:
                _check_tied(aliases, found)
            if found[0] is not None:
                self._owners[name] = found[0]

    def train(self, mode: bool = True) -> "PolicyModel":
        """Return a new function whose module is in training mode."""
        return PolicyModel(self._plain.train(mode), self.policies)

    def to_module(self, params: Params, buffers: Buffers) -> nn.Module:
        """Return a plain module with copies of these values, without the policies."""
        return self._plain.to_module(params, buffers)

    def __reduce__(self) -> tuple:
        """Copy and pickle by parts."""
        return PolicyModel, (self._plain, self.policies)

    def _run(
        self, values: dict[str, Tensor], args: tuple, kwargs: dict
    ) -> tuple[Any, dict[str, Tensor]]:
        """Run with values that are cast, and return new ones in their old dtypes."""
        cast = dict(values)
        for name, policy in self._owners.items():
            buffer = name in self.buffer_names
            cast[name] = (_cast_buffer if buffer else _cast_param)(policy, cast[name])
        with self._lock, self._regions:
            output, left = super()._run(cast, args, kwargs)
        changed = {name: _like(left[name], values[name]) for name in self._copied}
        return output, {**values, **changed}


class _Entered(NamedTuple):
    """A module that runs, its policy, and what to close when it ends."""

    module: nn.Module | None = None
    policy: Policy | None = None
    region: ExitStack = ExitStack()


class _Regions:
    """The policies in force while a model runs, the innermost last.

    Only then is known which module runs inside which: a `ModuleList` never runs, and
    some models call the children of their children.
    """

    def __init__(self) -> None:
        self._entered = [_Entered()]

    def watch(self, module: nn.Module, policy: Policy) -> None:
        """Enter before the module's forward pass and leave after it, always."""
        before = functools.partial(self._before, policy)
        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(self._after, prepend=True, always_call=True)

    def __enter__(self) -> None:
        """Start a call of the model."""
        self._entered.append(_Entered())

    def __exit__(self, *error: Any) -> None:
        """Leave what is still open: no hook runs after a KeyboardInterrupt."""
        while self._entered[-1].module is not None:
            self._entered.pop().region.close()
        self._entered.pop()

    def _before(
        self, policy: Policy, module: nn.Module, args: tuple, kwargs: dict
    ) -> tuple[tuple, dict]:
        region, dtype = ExitStack(), policy.compute_dtype
        if policy != self._entered[-1].policy:
            if dtype not in _LOW:
                args, kwargs = cast_floating((args, kwargs), dtype)
            device = _device([args, kwargs, list(module.parameters())])
            region.enter_context(_computing(dtype, device))
        self._entered.append(_Entered(module, policy, region))
        return args, kwargs

    def _after(self, module: nn.Module, args: tuple, output: Any) -> Any:
        if self._entered[-1].module is not module:
            return output  # another hook raised before the module could run
        _, policy, region = self._entered.pop()
        region.close()
        if policy is None or policy == self._entered[-1].policy:
            return output
        return policy.cast_to_output(output)


def _chosen(
    modules: list[str], policies: Mapping[Key, Policy]
) -> dict[str, Policy | None]:
    """Return the policy of every module, parents before what is inside of them."""
    given: list[tuple[str, Policy]] = []
    for key, policy in policies.items():
        patterns = (key,) if isinstance(key, str) else key
        checks.patterns("policy_for", policy=patterns)
        checks.all_matched("policy_for", modules, patterns, kind="module")
        given += [(pattern, policy) for pattern in patterns]
    chosen: dict[str, Policy | None] = {}
    depth: dict[str, int] = {}
    for name in modules:
        parent = name.rpartition(".")[0]
        chosen[name], depth[name] = chosen.get(parent), depth.get(parent, -1)
        found = [each for each in given if checks.matches(name, each[0])]
        if not found:
            continue
        best = max(_letters(pattern) for pattern, _ in found)
        if best < depth[name]:
            continue
        among = {policy for pattern, policy in found if _letters(pattern) == best}
        if len(among) > 1:
            listed = checks.listed(pattern for pattern, _ in found)
            raise ValueError(
                f"policy_for: expected one most specific pattern for the module "
                f"{name!r}, got {listed} with different policies."
            )
        chosen[name], depth[name] = among.pop(), best
    return chosen


def _letters(pattern: str) -> int:
    """Count the letters that a pattern fixes."""
    return len(re.sub(r"\[.+?\]|[*?]", "", pattern))


def _policy(given: Any) -> Policy:
    return given if isinstance(given, Policy) else Policy.parse(given)


def _owner(module: nn.Module, policy: Policy | None) -> Policy | None:
    """Return the policy for what a module itself holds.

    Torch normalises low activations only by parameters in the dtype of the running
    statistics, which stay in float32.
    """
    running = isinstance(module, NormBase) and module.track_running_stats
    if policy is None or not running or policy.compute_dtype not in _LOW:
        return policy
    return replace(policy, param_dtype=torch.float32)


def _check_tied(aliases: list[str], policies: list[Policy | None]) -> None:
    """Refuse to cast one tensor in two ways."""
    like = torch.empty(0, dtype=torch.float32)
    dtypes = {_cast_param(each, like).dtype if each else None for each in policies}
    if len(dtypes) > 1:
        raise ValueError(
            f"policy_for: expected one dtype for the tied parameters "
            f"{checks.listed(aliases)}, got policies that give them several. Let "
            f"these differ only in what they compute, as mixed_bfloat16 and float32 do."
        )


def _cast_buffer(policy: Policy, buffer: Tensor) -> Tensor:
    """Cast a buffer only where no autocast does it: sums need more digits."""
    low = policy.compute_dtype in _LOW
    return buffer if low else policy.cast_to_compute(buffer)


def _cast_param(policy: Policy, param: Tensor) -> Tensor:
    """Cast a parameter to its own dtype, and on where no autocast will do that."""
    cast = policy.cast_to_param(param)
    low = policy.compute_dtype in _LOW
    return cast if low else policy.cast_to_compute(cast)


def _like(new: Tensor, old: Tensor) -> Tensor:
    """Return a new value in the dtype of the old one, so that a state keeps its own."""
    return cast_floating(new, old.dtype) if old.is_floating_point() else new


def _computing(dtype: torch.dtype, device: str) -> autocast:
    """Switch autocast on for a low dtype, and off for another."""
    if dtype not in _LOW:
        return autocast(device, enabled=False)
    # Torch keeps the casts of weights for all threads and both low dtypes together.
    return autocast(device, dtype=dtype, cache_enabled=False)


def _device(tree: Tree) -> str:
    """Return the type of the device that tensors are on."""
    leaves = tree_leaves(tree)
    return next((x.device.type for x in leaves if isinstance(x, Tensor)), "cpu")
