"""Optimizers of `torch.optim` made of transformations of this package."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from vgrad import checks, overlaps, tree
from vgrad.optim.base import GradientTransformation, check_transformation, step
from vgrad.optim.private import scales_of
from vgrad.optim.transforms import HyperparamsState, with_hyperparams
from vgrad.tree import tree_map
from vgrad.typing import Params, Tree


def as_torch(
    transformation: GradientTransformation,
    params: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
) -> Optimizer:
    """Make a `torch.optim.Optimizer` that steps by a transformation.

    It is for trainers, `GradScaler` and the schedulers of torch. `params` are
    `model.named_parameters()` or a dictionary; their `.grad` is read, and they are
    written in place. `param_groups[0]["behind"]` names parameters without a gradient at
    an earlier step. `partition` makes groups of parameters.

    If the transformation is made by `inject_hyperparams`, its hyperparameters, but for
    schedules, are in `param_groups[0]`, and the next step uses the values a scheduler
    writes there. A scheduler that reads the rate of any other transformation raises.

    Raises:
        ValueError: in `step`, a gradient is sparse, or a parameter that was behind has
            one where updates depend on the steps that torch counts for each parameter.

    Example:
        >>> tx = vgrad.optim.inject_hyperparams(vgrad.optim.sgd, lr=0.5)
        >>> model = torch.nn.Linear(1, 1)
        >>> optimizer = as_torch(tx, model.named_parameters())
        >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        >>> optimizer.step(lambda: model(torch.ones(1)).backward())
        >>> scheduler.step()
        >>> optimizer.param_groups[0]["lr"]
        0.25
    """
    check_transformation("as_torch", transformation)
    pairs: list[Any] = list(params.items() if isinstance(params, Mapping) else params)
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise TypeError(
                f"as_torch(params): expected pairs of a name and a parameter, got a "
                f"{type(pair).__name__}. Pass model.named_parameters()."
            )
    named: Params = dict(pairs)
    if len(named) < len(pairs):
        raise ValueError("as_torch(params): expected names, got one name for several.")
    for pair in overlaps.sharing(named):
        names = " and ".join(map(repr, dict.fromkeys(pair)))
        raise ValueError(
            f"as_torch(params): expected parameters with memory of their own, got "
            f"{names}, where one update would overwrite another. Pass clones."
        )
    return _Adapter(transformation, named)


class _Settings(dict):
    def __missing__(self, key: str) -> Any:
        if key != "lr":
            raise KeyError(key)
        raise ValueError(
            'as_torch(transformation).param_groups[0]["lr"]: expected a transformation '
            "whose rate can be set, got one whose rate is fixed. Make it by "
            "inject_hyperparams(lion, lr=number), or pass a schedule as lr."
        )


class _Adapter(Optimizer):
    def __init__(self, transformation: GradientTransformation, params: Params) -> None:
        self._transformation = transformation
        self._names = tuple(params)
        # Made at the first step, as in torch: until then parameters may be moved.
        self._tree: Tree | None = None
        state, self._shown = transformation.init(params), transformation.settable
        if scales_of(state):
            raise ValueError(
                "as_torch(scale_then_privatize(...)): expected a transformation of "
                "gradients as they are, got one whose scales apply before they are "
                "clipped. Train with vgrad.training.private_step."
            )
        hyperparams = state.hyperparams if isinstance(state, HyperparamsState) else {}
        shown = {n: tree_map(torch.Tensor.item, hyperparams[n]) for n in self._shown}
        self._unread = {"lr", *hyperparams} - set(shown)
        super().__init__([_Settings(params=list(params.items()), behind=[])], shown)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
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
        without = {name for name, grad in grads.items() if grad is None}
        if len(without) == len(grads):
            return loss
        (group,) = self.param_groups
        late = [name for name in group["behind"] if name not in without]
        if late and self._transformation.counted:
            raise ValueError(
                f"as_torch(...).step: expected gradients of the parameters that had "
                f"one at every step, got others of {checks.listed(late)}: torch counts "
                f"the steps of each parameter. Give these an optimizer of their own."
            )
        # A fresh dictionary is given away; the parameters are written in any case.
        tx = self._transformation
        new, self._tree = step(tx, grads, state, dict(params), donate=True)
        for name, param in params.items():
            if new[name] is not param:
                param.copy_(new[name])
        group["behind"] = sorted(without.union(group["behind"]))
        group["step"] = group.get("step", 0) + 1
        return loss

    def state_dict(self) -> dict[str, Any]:
        named = {} if self._tree is None else tree.state_dict(self._tree)
        # Copies: the next step may write to the tensors themselves.
        copies = {name: value.clone() for name, value in named.items()}
        return {**super().state_dict(), "state": copies}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        new = None
        if saved := state_dict["state"]:
            template = self._transformation.init(self._params())
            new = tree_map(torch.clone, tree.load_state_dict(template, saved))
        super().load_state_dict({**state_dict, "state": {}})
        # A group that was saved by an earlier version names none.
        self.param_groups = [_Settings({"behind": [], **g}) for g in self.param_groups]
        self._tree = new

    def __getstate__(self) -> dict[str, Any]:
        # torch's own method leaves out the attributes of a subclass.
        names = ("_transformation", "_names", "_tree", "_shown", "_unread")
        attributes = {name: getattr(self, name) for name in names}
        return {**super().__getstate__(), **attributes}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.param_groups:
            raise ValueError(
                "as_torch(...).add_param_group: expected one group, of the parameters "
                "the optimizer was made with. Make groups by vgrad.optim.partition."
            )
        super().add_param_group(param_group)

    def _params(self) -> Params:
        (group,) = self.param_groups
        return dict(zip(self._names, group["params"], strict=True))

    def _with_numbers(self, state: Tree) -> Tree:
        (group,) = self.param_groups
        for name in sorted(self._unread & group.keys()):
            raise ValueError(
                f"as_torch(...).step: expected no {name!r} in param_groups, got "
                f"{group[name]!r}, which the transformation does not read. Make it by "
                f"inject_hyperparams."
            )
        if not self._shown:
            return state
        return with_hyperparams(state, **{name: group[name] for name in self._shown})
