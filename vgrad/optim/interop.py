"""From and to `torch.optim`: its optimizers read and written, and made of ours."""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from vgrad import checks, overlaps, tree
from vgrad.optim import methods
from vgrad.optim.base import GradientTransformation, State, check_transformation, step
from vgrad.optim.private import scales_of
from vgrad.optim.transforms import HyperparamsState, Key, partition, with_hyperparams
from vgrad.tree import check_fit, state_dict, tree_map, tree_map_only
from vgrad.typing import Params, Tree

Entry = dict[str, Any]
"""The state of one parameter in `torch.optim`, whose names the slots of ours have."""

_NAMES = "SGD Adam AdamW NAdam RAdam Adamax Adagrad Adadelta RMSprop Rprop ASGD "
OPTIMIZERS: dict[type[Optimizer], Callable[..., GradientTransformation]] = {
    getattr(torch.optim, name): getattr(methods, name.lower())
    for name in [*_NAMES.split(), "Adafactor", "Muon"]
}
"""The optimizers that exist on both sides."""


class _Group(NamedTuple):
    tx: GradientTransformation
    params: Params
    entries: dict[str, Entry]
    settings: dict[str, Any]


def from_torch(
    optimizer: Optimizer, params: Mapping[str, Tensor] | None = None
) -> tuple[GradientTransformation, Tree]:
    """Read an optimizer of `torch.optim` into `(tx, state)`, to go on from there.

    `tx` is the optimizer of the same name with the current numbers of `param_groups`;
    several groups become a `partition` by name. The state holds copies. Schedulers and
    hooks are left out, as are frozen parameters. Names are those the optimizer was made
    with, from `model.named_parameters()`, or the keys of `params`.

    Example:
        >>> optimizer = torch.optim.Adam(torch.nn.Linear(2, 1).named_parameters())
        >>> tx, state = from_torch(optimizer)
        >>> state[1].slots["exp_avg"]["bias"]
        tensor([0.])
    """
    groups = _groups("from_torch", optimizer, params)
    with torch.no_grad():
        states = tuple(_read(optimizer, group) for group in groups)
    if len(groups) == 1:
        return groups[0].tx, states[0]
    by_name: dict[Key, GradientTransformation] = {
        frozenset(group.params).__contains__: group.tx for group in groups
    }
    return partition(by_name), states


def _read(optimizer: Optimizer, group: _Group) -> Tree:
    template = group.tx.init(group.params)
    if not any(group.entries.values()):
        return template
    steps = {name: _steps_of(entry) for name, entry in group.entries.items()}
    most = max(steps.values())
    behind = [name for name, count in steps.items() if count < most]
    if behind and group.tx.counted:
        raise ValueError(
            f"from_torch(optimizer): expected parameters of a group that took equally "
            f"many steps, got fewer than {most:.0f} of {checks.listed(behind)}. Put "
            f"these into another group."
        )
    if isinstance(optimizer, torch.optim.ASGD):
        # torch keeps the rate of the next step, in its default dtype.
        expected = _asgd_rate(group.settings, most)
        rates = [float(entry["eta"]) for entry in group.entries.values() if entry]
        if not all(math.isclose(rate, expected, rel_tol=1e-6) for rate in rates):
            raise ValueError(
                f"from_torch(ASGD, lr={group.settings['lr']}): expected the rate of "
                f"the last step, got one changed since. Make one more step before."
            )

    def tensor(name, slot, old):
        entry = group.entries[name]
        if not entry:
            return old
        got = tuple(entry[slot].shape) if slot in entry else "none"
        if got != tuple(old.shape):
            raise ValueError(
                f"from_torch(optimizer): expected {slot!r} of shape {tuple(old.shape)} "
                f"in the state of {name!r}, got {got}. Was an option changed?"
            )
        return entry[slot].detach().to(old, copy=True)

    def read(state):
        if not isinstance(state, State):
            return state
        slots: dict[str, Any] = {
            slot: {name: tensor(name, slot, x) for name, x in old.items()}
            if isinstance(old, dict)
            else tensor(next(iter(group.entries)), slot, old)
            for slot, old in state.slots.items()
        }
        return State(torch.full_like(state.count, int(most)), slots)

    return tuple(map(read, template))


def to_torch(
    state: Tree, optimizer: Optimizer, params: Mapping[str, Tensor] | None = None
) -> None:
    """Write a state into an optimizer of `torch.optim`, to go on there.

    `from_torch` of the optimizer has to give the transformation that made the state;
    rates are not written. `params` names the parameters as in `from_torch`; load their
    values into the module. After an error nothing has changed.

    Example:
        >>> optimizer = torch.optim.Adam(torch.nn.Linear(2, 1).named_parameters())
        >>> tx, state = from_torch(optimizer)
        >>> to_torch(state, optimizer)
    """
    groups = _groups("to_torch", optimizer, params)
    with torch.no_grad():
        templates = tuple(group.tx.init(group.params) for group in groups)
    single = len(groups) == 1
    expected = state_dict(templates[0] if single else templates)
    check_fit("to_torch(state)", expected, state_dict(state))
    new = {}
    for group, part in zip(groups, [state] if single else state, strict=True):
        new.update(_written(optimizer, group, part))
    optimizer.state.update(new)


def _written(optimizer: Optimizer, group: _Group, state: Tree) -> dict[Tensor, Entry]:
    parts = [part for part in state if isinstance(part, State)]
    count = int(parts[0].count) if parts else 0
    uncounted = isinstance(optimizer, (torch.optim.SGD, torch.optim.Muon))
    asgd = isinstance(optimizer, torch.optim.ASGD)
    fused = group.settings.get("fused")
    wide = torch.get_default_dtype() == torch.float64 and not fused
    dtype = torch.float64 if wide else torch.float32
    on_device = fused or group.settings.get("capturable") or asgd

    def entry(name, param):
        if uncounted and count == 0:
            return {}
        numbers: dict[str, Any] = {} if uncounted else {"step": count}
        new = {}
        for slot, tensors in (pair for part in parts for pair in part.slots.items()):
            if isinstance(tensors, Tensor):
                numbers[slot] = tensors.item()
            elif name in tensors:
                value = tensors[name].detach()
                new[slot] = value.to(param.device, param.dtype, copy=True)
        if asgd:
            numbers["eta"] = _asgd_rate(group.settings, count)
            numbers["mu"] = 1 / max(1, count - group.settings["t0"])
        # In the dtype and on the device in which torch keeps them.
        device = param.device if on_device else None
        kept = partial(torch.tensor, dtype=dtype, device=device)
        return {key: kept(number) for key, number in numbers.items()} | new

    return {param: entry(name, param) for name, param in group.params.items()}


def _groups(function: str, optimizer: Optimizer, params: Any) -> list[_Group]:
    if type(optimizer) not in OPTIMIZERS:
        known = ", ".join(kind.__name__ for kind in OPTIMIZERS)
        raise TypeError(
            f"{function}(optimizer of class {type(optimizer).__name__}): expected one "
            f"of {known}, of torch.optim itself."
        )
    names_by_id: dict[int, str] = {}
    if params is not None:
        checks.dictionaries(function, params=params)
        names_by_id = {id(p): name for name, p in reversed([*params.items()])}
    seen: set[str] = set()
    groups = []
    for number, settings in enumerate(optimizer.param_groups):
        names = settings.get("param_names")
        if params is not None:
            names = [names_by_id.get(id(param)) for param in settings["params"]]
        elif names is None:
            raise ValueError(
                f"{function}(params=None): expected the names of the parameters, got "
                f"an optimizer without. Pass dict(model.named_parameters())."
            )
        trained, entries = {}, {}
        for name, param in zip(names, settings["params"], strict=True):
            entry = optimizer.state.get(param, {})
            entry = {key: value for key, value in entry.items() if value is not None}
            if not param.requires_grad and not _steps_of(entry):
                continue
            if name is None or name in seen:
                got = "no name" if name is None else f"{name!r} a second time"
                raise ValueError(
                    f"{function}(params): expected one name for each parameter, got "
                    f"{got} for one of shape {tuple(param.shape)} in group {number}."
                )
            seen.add(name)
            trained[name], entries[name] = param, entry
        if not trained:
            continue
        if settings.get("differentiable"):
            raise ValueError(
                f"{function}(optimizer with differentiable=True): expected False, "
                f"since the graph of its steps would be cut."
            )
        make = OPTIMIZERS[type(optimizer)]
        if make is methods.adam and settings["decoupled_weight_decay"]:
            make = methods.adamw
        known = inspect.signature(make).parameters
        options = {key: settings[key] for key in known if key in settings}
        options = tree_map_only(Tensor, lambda x: x.detach().item(), options)
        groups.append(_Group(make(**options), trained, entries, settings))
    if not groups:
        expected = "expected parameters that require gradients, got none"
        raise ValueError(f"{function}(optimizer): {expected}.")
    return groups


def _steps_of(entry: Entry) -> float:
    # One for any, where torch does not count them.
    return float(entry["step"]) if "step" in entry else float(bool(entry))


def _asgd_rate(settings: dict[str, Any], steps: float) -> float:
    lr = float(settings["lr"])
    return lr / ((1 + settings["lambd"] * lr * steps) ** settings["alpha"])


def as_torch(
    transformation: GradientTransformation,
    params: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
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
        shown = {n: tree_map(Tensor.item, hyperparams[n]) for n in self._shown}
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
        own = {name: getattr(self, name) for name in names}
        return {**super().__getstate__(), **own}

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
