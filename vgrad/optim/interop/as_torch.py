"""A transformation as a `torch.optim.Optimizer`, for code that asks for one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from vgrad import checks, tree
from vgrad.optim.arguments import sharing
from vgrad.optim.averaging import AverageState
from vgrad.optim.base import GradientTransformation, check_transformation, step
from vgrad.optim.hyperparams import HyperparamsState, with_hyperparams
from vgrad.optim.interop.counterparts import FIELDS
from vgrad.optim.methods.adaptive import RssState
from vgrad.optim.transforms import ScheduleState
from vgrad.tree import tree_leaves, tree_map
from vgrad.typing import Params, Tree

_COUNTED = tuple({kind for kind in FIELDS if "count" in kind._fields} - {ScheduleState})
"""States whose count torch has for each parameter; schedules count for all of them,
but for those of `asgd` and `adagrad`."""


def as_torch(
    transformation: GradientTransformation,
    params: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
) -> Optimizer:
    """Make a `torch.optim.Optimizer` that steps by a transformation.

    It is for code that asks for one, such as trainers, `GradScaler` and the schedulers
    of torch. `params` are `model.named_parameters()` or a dictionary of them; their
    `.grad` is read, and they are written in place. State: that of the transformation,
    made at the first step. `state_dict` returns copies of its tensors, named by
    `vgrad.tree.state_dict`, and the parameter group. A step without any gradient
    changes nothing; `param_groups[0]["behind"]` names the parameters that had none at
    an earlier step.

    If the transformation is made by `inject_hyperparams`, its hyperparameters are in
    `param_groups[0]`, and the next step uses what a scheduler writes there; those that
    are schedules themselves are left out. So is the rate of any other transformation:
    it raises when a scheduler of torch asks for it, and in `step` if one was set by
    hand. `partition` makes groups of parameters.

    Raises:
        TypeError: the transformation is none, or the parameters are not pairs of a name
            and a tensor.
        ValueError: a name comes twice, or parameters share memory; a group is added
            later; a scheduler asks for a rate that the transformation does not read;
            in `step`, a gradient is sparse, such a rate was set, or a parameter that
            was behind has a gradient, where updates depend on the steps that torch
            counts for each parameter; in `load_state_dict`, names, shapes or dtypes
            differ.

    Example:
        >>> from vgrad.optim import inject_hyperparams, sgd
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> tx = inject_hyperparams(sgd, lr=0.5)
        >>> optimizer = as_torch(tx, model.named_parameters())
        >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        >>> for _ in range(2):
        ...     optimizer.zero_grad()
        ...     model(torch.ones(1)).backward()
        ...     optimizer.step()
        ...     scheduler.step()
        >>> model.weight.item(), optimizer.param_groups[0]["lr"]
        (0.25, 0.125)
    """
    check_transformation("as_torch", transformation)
    return _Adapter(transformation, _named(params))


class _Group(dict):
    """A parameter group that tells schedulers why it has no rate."""

    def __missing__(self, key: str) -> Any:
        """Say how there comes to be one."""
        if key != "lr":
            raise KeyError(key)
        raise ValueError(
            'as_torch(transformation).param_groups[0]["lr"]: expected a transformation '
            "whose rate a scheduler can set, got one whose rate is fixed. Make it by "
            "inject_hyperparams(lion, lr=number), or leave the scheduler out and pass "
            "one of vgrad.optim.schedules as lr."
        )


class _Adapter(Optimizer):
    """What `as_torch` returns: one group, and the state of a transformation."""

    def __init__(self, transformation: GradientTransformation, params: Params) -> None:
        self._transformation = transformation
        self._names = tuple(params)
        # Made at the first step, as in torch: until then parameters may be moved.
        self._tree: Tree | None = None
        self._counted: bool | None = None  # computed when a parameter needs it
        first = transformation.init(params)
        shown = _settable(transformation, first, params)
        held = first.hyperparams if isinstance(first, HyperparamsState) else {}
        self._shown = tuple(shown)
        self._unread = {"lr", *held} - set(shown)
        group = _Group(params=list(params.items()), behind=[])
        super().__init__([group], shown)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step; return the loss of the closure, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = self._params()
        grads = {name: param.grad for name, param in params.items()}
        for name, grad in grads.items():
            if grad is not None and grad.layout != torch.strided:
                raise ValueError(
                    f"as_torch(...).step: expected dense gradients, got a sparse one "
                    f"in {name!r}. Embeddings take sparse=False."
                )
        state = self._transformation.init(params) if self._tree is None else self._tree
        state = self._with_numbers(state)
        if all(grad is None for grad in grads.values()):
            return loss
        (group,) = self.param_groups
        late = [name for name in group["behind"] if grads[name] is not None]
        if late and self._counted is None:
            self._counted = self._is_counted(params)
        if late and self._counted:
            raise ValueError(
                f"as_torch(...).step: expected gradients of the parameters that had "
                f"one at every step, got others of {checks.listed(late)}: torch counts "
                f"the steps of each parameter, this transformation those of all. Make "
                f"an optimizer of its own for parameters that are trained later."
            )
        # A fresh dictionary is given away; the parameters are written in any case.
        new, self._tree = step(
            self._transformation, grads, state, dict(params), donate=True
        )
        for name, param in params.items():
            if new[name] is not param:
                param.copy_(new[name])
        behind = {*group["behind"], *(name for name in grads if grads[name] is None)}
        group["behind"] = sorted(behind)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the state's tensors by name, and the parameter group."""
        found = super().state_dict()
        named = {} if self._tree is None else tree.state_dict(self._tree)
        # The next step may write to the tensors themselves.
        found["state"] = {name: value.clone() for name, value in named.items()}
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned, with copies of its tensors."""
        new = None
        if state_dict["state"]:
            template = self._transformation.init(self._params())
            new = tree.load_state_dict(template, state_dict["state"])
            new = tree_map(torch.clone, new)
        super().load_state_dict({**state_dict, "state": {}})
        # A group that was saved by an earlier version names none.
        self.param_groups = [_Group({"behind": [], **g}) for g in self.param_groups]
        self._tree = new

    def __getstate__(self) -> dict[str, Any]:
        """Return everything: torch's own method leaves out what a subclass adds."""
        names = ("_transformation", "_names", "_tree", "_counted", "_shown", "_unread")
        own = {name: getattr(self, name) for name in names}
        return {**super().__getstate__(), **own}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a second group."""
        if self.param_groups:
            raise ValueError(
                "as_torch(...).add_param_group: expected one group, of the parameters "
                "that the optimizer was made with. Make groups by "
                "vgrad.optim.partition."
            )
        super().add_param_group(param_group)

    def _params(self) -> Params:
        (group,) = self.param_groups
        return dict(zip(self._names, group["params"], strict=True))

    def _is_counted(self, params: Params) -> bool:
        """Return whether updates depend on counts that torch has for each parameter.

        They do if other counts lead to other updates, of small parameters.
        """
        update, small = self._transformation.update, {}
        for name, param in params.items():
            first, rest = param.shape[:1], param.shape[1:]  # of members, perhaps
            shape = (*first, *(min(size, 2) for size in rest))
            small[name] = torch.ones(shape, dtype=param.dtype, device=param.device)
        state = self._with_numbers(self._transformation.init(small))
        (other,) = _later((state,))
        moved = 0
        for number in range(1000):  # `multi_steps` leaves most parameters as they are
            grads = {n: torch.sin(p.cumsum(0) + number) for n, p in small.items()}
            found, state = update(grads, state, small)
            others, other = update(grads, other, small)
            given: list[Any] = [
                (x, others[n]) for n, x in found.items() if x is not None
            ]
            if not all(torch.equal(one, two) for one, two in given):
                return True
            moved += any(one.any() for one, _ in given)
            if moved == 3:
                break
        return False

    def _with_numbers(self, state: Tree) -> Tree:
        """Put the numbers of the parameter group into the state."""
        (group,) = self.param_groups
        unread = sorted(self._unread & group.keys())
        if unread:
            raise ValueError(
                f"as_torch(...).step: expected no {unread[0]!r} in param_groups, got "
                f"{group[unread[0]]!r}, which the transformation does not read. Make "
                f"it by inject_hyperparams(..., {unread[0]}=number)."
            )
        if not self._shown:
            return state
        return with_hyperparams(state, **{name: group[name] for name in self._shown})


def _later(states: tuple) -> tuple:
    """Put one more into the counts that torch has for each parameter."""
    decays = any(isinstance(each, AverageState | RssState) for each in states)
    counted = (*_COUNTED, ScheduleState) if decays else _COUNTED

    def later(state: Any) -> Any:
        if isinstance(state, counted):
            return state._replace(count=state.count + 1)
        if not isinstance(state, tuple):
            return state
        new = _later(tuple(state))
        return type(state)(*new) if hasattr(state, "_fields") else new

    return tuple(later(state) for state in states)


def _named(params: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> Params:
    """Return the parameters by name; no two of them may share memory."""
    pairs: list[Any] = list(params.items() if isinstance(params, Mapping) else params)
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise TypeError(
                f"as_torch(params): expected pairs of a name and a parameter, got a "
                f"{type(pair).__name__}. Pass model.named_parameters()."
            )
    named: Params = dict(pairs)
    if len(named) < len(pairs):
        raise ValueError(
            "as_torch(params): expected a name for each parameter, got one name for "
            "several."
        )
    for pair in sharing(named):
        raise ValueError(
            f"as_torch(params): expected parameters with memory of their own, got "
            f"{' and '.join(map(repr, dict.fromkeys(pair)))}, where one update would "
            f"overwrite another. Let the modules hold one parameter, or clones."
        )
    return named


def _settable(
    transformation: GradientTransformation, state: Tree, params: Params
) -> dict[str, Any]:
    """Return, as numbers, the hyperparameters that are not schedules."""
    if not isinstance(state, HyperparamsState):
        return {}
    marks = tree_map(lambda held: torch.full_like(held, math.nan), state[1])
    # A step without gradients: schedules overwrite the marks.
    without = dict.fromkeys(params)
    marked = state._replace(hyperparams=marks)
    _, after = transformation.update(without, marked, params)
    return {
        name: tree_map(Tensor.item, state.hyperparams[name])
        for name, kept in after.hyperparams.items()
        if all(leaf.isnan() for leaf in tree_leaves(kept))
    }
