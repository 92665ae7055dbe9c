"""Policies for a functional model, as a whole or per module."""

import copy
import functools
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vgrad import checks
from vgrad.functional.model import FunctionalModel
from vgrad.precision.autocasting import autocast
from vgrad.precision.policy import Policy
from vgrad.torch_private.tensors import NormBase
from vgrad.tree import tensors
from vgrad.typing import Buffers, Params, Tree

_LOW = (torch.float16, torch.bfloat16)


Key = str | tuple[str, ...]
"""One pattern of module names, or several."""


def policy_for(
    fmodel: FunctionalModel, policy: Policy | str | Mapping[Key, Policy | str]
) -> "PolicyModel":
    """Run a functional model under a policy: the same function in other dtypes.

    Parameters and outputs are cast to the dtypes of the policy, and the model runs
    under `autocast(compute_dtype)`. If that is float32 or float64 there is no autocast,
    and parameters, inputs and buffers are cast to it. Gradients have the dtype of the
    passed parameters, so float32 parameters are master weights. Buffers come back in
    their own dtype; running statistics are never cast to a low one, nor are weight and
    bias of their batch norm.

    A dictionary sets policies per module, by a pattern of names or a tuple
    of them: `{"": "mixed_bfloat16", ("head", "*.norm"): "float32"}`, where `""` is the
    model itself. A policy holds for everything inside a module, unless a more specific
    pattern (one with more letters outside of its wildcards) matches there.

    Raises:
        TypeError: `fmodel` is no functional model, or has policies already.
        ValueError: a pattern matches no module, two equally specific ones give one
            module different policies, or tied parameters would get several dtypes.

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
            f"policy_for(fmodel): expected a model of make_functional_with_buffers, "
            f"got a {type(fmodel).__name__}."
        )
    if isinstance(fmodel, PolicyModel):
        raise TypeError(
            "policy_for(fmodel): expected a model without policies, got one that has "
            "them. Pass one dictionary of all policies."
        )
    policies = policy if isinstance(policy, Mapping) else {"": policy}
    return PolicyModel(fmodel, {key: Policy.parse(p) for key, p in policies.items()})


def loss_under(policy: Policy | str, loss: Callable) -> Callable:
    """Run a loss, of a sample or of a batch, under a policy.

    Parameters, buffers and inputs are cast as by `policy_for`; the result is not.

    Example:
        >>> loss = lambda params, buffers, x: (x @ params["w"]).sum()
        >>> params, x = {"w": torch.ones(2)}, torch.ones(3, 2)
        >>> loss_under("mixed_bfloat16", loss)(params, {}, x)
        tensor(6., dtype=torch.bfloat16)
    """
    parsed = Policy.parse(policy)

    def run(params: Params, buffers: Buffers, /, *batch: Tree) -> Any:
        params = {name: _cast_param(parsed, x) for name, x in params.items()}
        buffers = {name: _cast_buffer(parsed, x) for name, x in buffers.items()}
        if parsed.compute_dtype not in _LOW:
            batch = parsed.cast(batch, to="compute")
        with _computing(parsed.compute_dtype, _device([params, batch])):
            return loss(params, buffers, *batch)

    return run


class PolicyModel(FunctionalModel):
    """A functional model under `policies` by pattern, made by `policy_for`."""

    def __init__(self, fmodel: FunctionalModel, policies: Mapping[Key, Policy]) -> None:
        skeleton = copy.deepcopy(fmodel._skeleton)
        self.policies = dict(policies)
        self._plain = fmodel
        self._regions = _Regions()
        modules = dict(skeleton.named_modules())
        chosen = _chosen(list(modules), policies)
        for name, module in modules.items():
            if (policy := chosen[name]) is not None:
                self._regions.watch(module, policy)
        super().__init__(skeleton, fmodel._defaults)
        self._owners: dict[str, Policy] = {}
        for name, aliases in self._aliases.items():
            places = [alias.rpartition(".")[0] for alias in aliases]
            # A module in two places is known by its first name.
            places = [place for place in places if place in modules]
            owners = [_owner(modules[place], chosen[place]) for place in places]
            if name not in self.buffer_names:
                _check_tied(aliases, owners)
            if owners[0] is not None:
                self._owners[name] = owners[0]

    def train(self, mode: bool = True) -> "PolicyModel":
        """Return a new function whose module is in training mode."""
        return PolicyModel(self._plain.train(mode), self.policies)

    def to_module(self, params: Params, buffers: Buffers) -> nn.Module:
        """Return a plain module with copies of these values, without the policies."""
        return self._plain.to_module(params, buffers)

    def __reduce__(self) -> tuple:
        return PolicyModel, (self._plain, self.policies)

    def _run(
        self, values: dict[str, Tensor], args: tuple, kwargs: dict
    ) -> tuple[Any, dict[str, Tensor]]:
        cast = dict(values)
        for name, policy in self._owners.items():
            buffer = name in self.buffer_names
            cast[name] = (_cast_buffer if buffer else _cast_param)(policy, cast[name])
        with self._lock, self._regions:
            output, written = super()._run(cast, args, kwargs)
        for name in self._copied:
            new, old = written[name], values[name]
            both = new.is_floating_point() and old.is_floating_point()
            values = {**values, name: new.to(old.dtype) if both else new}
        return output, values


class _Regions:
    """The running modules, their policies and contexts, the innermost last."""

    # Which module runs inside which is known only then: a `ModuleList` never runs, and
    # some models call the children of their children.

    def __init__(self) -> None:
        self._entered: list[Any] = [(None, None, ExitStack())]

    def watch(self, module: nn.Module, policy: Policy) -> None:
        before = functools.partial(self._before, policy)
        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(self._after, prepend=True, always_call=True)

    def __enter__(self) -> None:
        self._entered.append((None, None, ExitStack()))

    def __exit__(self, *error: Any) -> None:
        # No hook has closed these regions after a KeyboardInterrupt.
        while self._entered[-1][0] is not None:
            self._entered.pop()[-1].close()
        self._entered.pop()

    def _before(
        self, policy: Policy, module: nn.Module, args: tuple, kwargs: dict
    ) -> tuple[tuple, dict]:
        region, dtype = ExitStack(), policy.compute_dtype
        if policy != self._entered[-1][1]:
            if dtype not in _LOW:
                args, kwargs = policy.cast((args, kwargs), to="compute")
            device = _device([args, kwargs, list(module.parameters())])
            region.enter_context(_computing(dtype, device))
        self._entered.append((module, policy, region))
        return args, kwargs

    def _after(self, module: nn.Module, args: tuple, output: Any) -> Any:
        if self._entered[-1][0] is not module:
            return output  # another hook raised before the module could run
        _, policy, region = self._entered.pop()
        region.close()
        if policy is None or policy == self._entered[-1][1]:
            return output
        return policy.cast(output, to="output")


def _chosen(
    modules: list[str], policies: Mapping[Key, Policy]
) -> dict[str, Policy | None]:
    """Return the policy of every module, parents before their children."""
    by_pattern: list[tuple[str, Policy]] = []
    for key, policy in policies.items():
        patterns = (key,) if isinstance(key, str) else key
        checks.patterns("policy_for", policy=patterns)
        checks.all_matched("policy_for", modules, patterns, kind="module")
        by_pattern += [(pattern, policy) for pattern in patterns]
    chosen: dict[str, Policy | None] = {}
    depth: dict[str, int] = {}
    for name in modules:
        parent = name.rpartition(".")[0]
        chosen[name], depth[name] = chosen.get(parent), depth.get(parent, -1)
        matches = [item for item in by_pattern if checks.matches(name, item[0])]
        best = max((_letters(pattern) for pattern, _ in matches), default=-1)
        if best < max(depth[name], 0):
            continue
        among = {policy for pattern, policy in matches if _letters(pattern) == best}
        if len(among) > 1:
            listed = checks.listed(pattern for pattern, _ in matches)
            raise ValueError(
                f"policy_for: expected one most specific pattern for the module "
                f"{name!r}, got {listed} with different policies."
            )
        chosen[name], depth[name] = among.pop(), best
    return chosen


def _letters(pattern: str) -> int:
    return len(re.sub(r"\[.+?\]|[*?]", "", pattern))


def _owner(module: nn.Module, policy: Policy | None) -> Policy | None:
    # Torch normalises low activations only by parameters in the dtype of the running
    # statistics, which stay in float32.
    running = isinstance(module, NormBase) and module.track_running_stats
    if policy is None or not running or policy.compute_dtype not in _LOW:
        return policy
    return replace(policy, param_dtype=torch.float32)


def _check_tied(aliases: list[str], policies: list[Policy | None]) -> None:
    like = torch.empty(0, dtype=torch.float32)
    dtypes = {_cast_param(p, like).dtype if p else None for p in policies}
    if len(dtypes) > 1:
        raise ValueError(
            f"policy_for: expected one dtype for the tied parameters "
            f"{checks.listed(aliases)}, got policies with several. Use policies "
            f"that differ only in compute_dtype, such as mixed_bfloat16 and float32."
        )


def _cast_buffer(policy: Policy, buffer: Tensor) -> Tensor:
    # To float32 or float64 only: sums need the digits.
    low = policy.compute_dtype in _LOW
    return buffer if low else policy.cast(buffer, to="compute")


def _cast_param(policy: Policy, param: Tensor) -> Tensor:
    # To its own dtype, and on if no autocast will do that.
    return _cast_buffer(policy, policy.cast(param, to="param"))


def _computing(dtype: torch.dtype, device: str) -> autocast:
    if dtype not in _LOW:
        return autocast(device, enabled=False)
    # Torch keeps the casts of weights for all threads and both low dtypes together.
    return autocast(device, dtype=dtype, cache_enabled=False)


def _device(tree: Tree) -> str:
    return next((x.device.type for x in tensors(tree)), "cpu")
