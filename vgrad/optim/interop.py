"""From and to `torch.optim`: its optimizers read and written, and made of ours.

Slots of a `State` have torch's names, so a state of torch is read and written by name.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from vgrad import checks, tree
from vgrad.optim.adam import adam, adamax, adamw, nadam, radam
from vgrad.optim.adaptive import adadelta, adafactor, adagrad, rmsprop
from vgrad.optim.base import (
    GradientTransformation,
    State,
    check_transformation,
    step,
)
from vgrad.optim.fused import sharing
from vgrad.optim.grouping import Key, partition
from vgrad.optim.hyperparams import HyperparamsState, with_hyperparams
from vgrad.optim.muon import muon
from vgrad.optim.sgd import asgd, rprop, sgd
from vgrad.tree import check_fit, state_dict, tree_leaves, tree_map
from vgrad.typing import Params, Tree

Entry = dict[str, Any]
"""The state of one parameter in `torch.optim`."""

OPTIMIZERS: dict[type[Optimizer], Callable[..., GradientTransformation]] = {
    torch.optim.SGD: sgd,
    torch.optim.Adam: adam,
    torch.optim.AdamW: adamw,
    torch.optim.NAdam: nadam,
    torch.optim.RAdam: radam,
    torch.optim.Adamax: adamax,
    torch.optim.Adagrad: adagrad,
    torch.optim.Adadelta: adadelta,
    torch.optim.RMSprop: rmsprop,
    torch.optim.Rprop: rprop,
    torch.optim.ASGD: asgd,
    torch.optim.Adafactor: adafactor,
    torch.optim.Muon: muon,
}
"""The optimizers that exist on both sides."""

_WITHOUT_STEP = (torch.optim.SGD, torch.optim.Muon)
"""Optimizers that do not count their steps in torch."""

_UNCOUNTED = (torch.optim.RMSprop, torch.optim.Rprop, torch.optim.Adadelta)
"""Optimizers that count their steps, on which nothing depends."""


class _Group(NamedTuple):
    """A group of parameters: its transformation, and its state in torch by name."""

    tx: GradientTransformation
    options: dict[str, Any]
    params: Params
    entries: dict[str, Entry]
    settings: dict[str, Any]


def from_torch(
    optimizer: Optimizer, params: Mapping[str, Tensor] | None = None
) -> tuple[GradientTransformation, Tree]:
    """Read an optimizer of `torch.optim` into `(tx, state)`, to go on from there.

    `tx` is the optimizer of the same name with the current numbers of `param_groups`,
    without schedulers and hooks; several groups become a `partition` by name. The state
    holds copies. One step of it is one step of torch, to the rounding of float64 if
    everything is in float64; NAdam and ASGD keep numbers in the default dtype of torch.
    An optimizer that has not stepped gives a fresh state.

    Names are those the optimizer was made with, from `model.named_parameters()`, or
    the keys of `params`, a dictionary of the same tensors. Parameters that require no
    gradient and have not been stepped are left out, as in
    `make_functional_with_buffers`.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.Adam(model.named_parameters(), lr=0.1)
        >>> model(torch.ones(2)).sum().backward()
        >>> optimizer.step()
        >>> tx, state = from_torch(optimizer)
        >>> state[1].count, state[1].slots["exp_avg"]["bias"]
        (tensor(1), tensor([0.1000]))
    """
    groups = _groups_of("from_torch", optimizer, params)
    with torch.no_grad():
        states = [_read(optimizer, group) for group in groups]
    if len(groups) == 1:
        return groups[0].tx, states[0]
    groups_by_name: dict[Key, GradientTransformation] = {
        frozenset(group.params).__contains__: group.tx for group in groups
    }
    return partition(groups_by_name), tuple(states)


def _read(optimizer: Optimizer, group: _Group) -> Tree:
    """Return the state of a group, in copies."""
    template = group.tx.init(group.params)
    if not any(group.entries.values()):
        return template
    steps = {name: _steps_of(entry) for name, entry in group.entries.items()}
    most = max(steps.values())
    behind = {name: count for name, count in steps.items() if count < most}
    if behind and _counts(optimizer, group.options):
        name, count = next(iter(behind.items()))
        raise ValueError(
            f"from_torch(optimizer): expected parameters of one group that took "
            f"equally many steps, got {count:.0f} of {name!r} and {most:.0f} of "
            f"others. Put the parameters that missed steps into another group, which "
            f"has its own counter: {checks.listed(behind)}."
        )
    if isinstance(optimizer, torch.optim.ASGD):
        _check_asgd(group, most)

    def tensor(name: str, slot: str, old: Tensor) -> Tensor:
        entry = group.entries[name]
        if not entry:
            return old
        if slot not in entry or entry[slot].shape != old.shape:
            got = "none" if slot not in entry else f"{tuple(entry[slot].shape)}"
            raise ValueError(
                f"from_torch(optimizer): expected {slot!r} of shape "
                f"{tuple(old.shape)} in the state of {name!r}, got {got}. Was an "
                f"option changed after the first step?"
            )
        return entry[slot].detach().to(old, copy=True)

    def read(state: Any) -> Any:
        if not isinstance(state, State):
            return state
        first = next(iter(group.entries))
        slots = {
            slot: {name: tensor(name, slot, old) for name, old in tensors.items()}
            if isinstance(tensors, dict)
            else tensor(first, slot, tensors)
            for slot, tensors in state.slots.items()
        }
        return State(torch.full_like(state.count, int(most)), slots)

    return tuple(read(state) for state in template)


def _counts(optimizer: Optimizer, options: dict[str, Any]) -> bool:
    """Return whether the numbers of an optimizer depend on the count of steps."""
    if isinstance(optimizer, _WITHOUT_STEP):  # a sum without dampening starts from zero
        return bool(options.get("dampening") and options["momentum"])
    if isinstance(optimizer, torch.optim.Adagrad):
        return bool(options["lr_decay"])
    return not isinstance(optimizer, _UNCOUNTED)


def _check_asgd(group: _Group, steps: float) -> None:
    """The rate in the state of torch for the next step is the one we compute."""
    expected = _asgd_rate(group.options, steps)
    # torch keeps it in its default dtype, hence the tolerance.
    for entry in group.entries.values():
        if entry and not math.isclose(float(entry["eta"]), expected, rel_tol=1e-6):
            raise ValueError(
                f"from_torch(ASGD, lr={group.options['lr']}): expected the rate of "
                f"the last step, got one that was changed since, which torch applies "
                f"one step late. Make one more step before."
            )


def to_torch(
    state: Tree, optimizer: Optimizer, params: Mapping[str, Tensor] | None = None
) -> None:
    """Write a state into an optimizer of `torch.optim`, to go on there.

    `from_torch` of the optimizer has to give the transformation that made the state,
    with its options and groups: rates, which are not in a state, are not written. The
    optimizer is changed as a whole or, after an error, not at all. `params` names the
    parameters as in `from_torch`; load their values into the module.

    Tensors are copies in the dtype of torch, so that a state of `from_torch` comes back
    exactly. `step` is the count of the transformation also for parameters that missed
    some, in optimizers whose numbers do not depend on it.

    Example:
        >>> from vgrad.optim import adam, step
        >>> model = torch.nn.Linear(2, 1)
        >>> tx, params = adam(0.1), dict(model.named_parameters())
        >>> _, state = step(tx, params, tx.init(params), params)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        >>> to_torch(state, optimizer, params)
        >>> optimizer.state[model.bias]["step"]
        tensor(1.)
    """
    groups = _groups_of("to_torch", optimizer, params)
    single = len(groups) == 1
    with torch.no_grad():
        templates = tuple(group.tx.init(group.params) for group in groups)
    expected = state_dict(templates[0] if single else templates)
    check_fit("to_torch(state)", expected, state_dict(state))
    new = {}
    for group, part in zip(groups, [state] if single else state, strict=True):
        entries = _written(optimizer, group, part)
        new.update({group.params[name]: entry for name, entry in entries.items()})
    optimizer.state.update(new)


def _written(optimizer: Optimizer, group: _Group, state: Tree) -> dict[str, Entry]:
    """Return the state of torch for each parameter of a group."""
    parts = [part for part in state if isinstance(part, State)]
    count = int(parts[0].count) if parts else 0
    if isinstance(optimizer, _WITHOUT_STEP) and count == 0:
        return {name: {} for name in group.params}

    def entry(name: str, param: Tensor) -> Entry:
        def number(value: Any) -> Tensor:
            return _number(value, param, optimizer, group.settings)

        new: Entry = {}
        if not isinstance(optimizer, _WITHOUT_STEP):
            new["step"] = number(count)
        for slot, tensors in (pair for part in parts for pair in part.slots.items()):
            if isinstance(tensors, Tensor):
                new[slot] = number(tensors.item())
            elif name in tensors:
                value = tensors[name].detach()
                new[slot] = value.to(param.device, param.dtype, copy=True)
        if isinstance(optimizer, torch.optim.ASGD):
            new["eta"] = number(_asgd_rate(group.options, count))
            new["mu"] = number(1 / max(1, count - group.options["t0"]))
        return new

    return {name: entry(name, param) for name, param in group.params.items()}


def _number(
    value: float, param: Tensor, optimizer: Optimizer, settings: dict[str, Any]
) -> Tensor:
    """Make a number in the dtype and on the device in which torch keeps it."""
    fused = settings.get("fused")
    wide = torch.get_default_dtype() == torch.float64 and not fused
    on_device = fused or settings.get("capturable")
    on_device = on_device or isinstance(optimizer, torch.optim.ASGD)
    return torch.tensor(
        value,
        dtype=torch.float64 if wide else torch.float32,
        device=param.device if on_device else None,
    )


def _groups_of(
    function: str, optimizer: Optimizer, params: Mapping[str, Tensor] | None
) -> list[_Group]:
    """Collect the groups that hold parameters to be trained."""
    if type(optimizer) not in OPTIMIZERS:
        known = ", ".join(kind.__name__ for kind in OPTIMIZERS)
        raise TypeError(
            f"{function}(optimizer of class {type(optimizer).__name__}): expected one "
            f"of {known}, of torch.optim itself."
        )
    names_by_id: dict[int, str] = {}
    if params is not None:
        checks.dictionaries(function, params=params)
        for name, param in params.items():
            names_by_id.setdefault(id(param), name)
    seen: set[str] = set()
    groups = []
    for number, settings in enumerate(optimizer.param_groups):
        names = settings.get("param_names")
        if params is not None:
            names = [names_by_id.get(id(param)) for param in settings["params"]]
        elif names is None:
            raise ValueError(
                f"{function}(params=None): expected the names of the parameters, got "
                f"an optimizer made without. Pass dict(model.named_parameters())."
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
                    f"{function}(params): expected one name for each parameter of the "
                    f"optimizer, got {got} for one of shape {tuple(param.shape)} in "
                    f"group {number}."
                )
            seen.add(name)
            trained[name], entries[name] = param, entry
        if trained:
            tx, options = _transformation(function, optimizer, settings)
            groups.append(_Group(tx, options, trained, entries, settings))
    if not groups:
        raise ValueError(
            f"{function}(optimizer): expected parameters that require gradients, got "
            f"none."
        )
    return groups


def _transformation(
    function: str, optimizer: Optimizer, settings: dict[str, Any]
) -> tuple[GradientTransformation, dict[str, Any]]:
    """Make the transformation of a group, and return its options as numbers."""
    if settings.get("differentiable"):
        raise ValueError(
            f"{function}(optimizer with differentiable=True): expected False, since "
            f"the graph of its steps would be cut. Steps of vgrad.optim are "
            f"differentiable from the first one on."
        )
    make = OPTIMIZERS[type(optimizer)]
    if make is adam and settings["decoupled_weight_decay"]:
        make = adamw
    known = inspect.signature(make).parameters
    options = {key: _plain(settings[key]) for key in known if key in settings}
    return make(**options), options


def _steps_of(entry: Entry) -> float:
    """Return the steps of a parameter; where torch does not count them, one for any."""
    return float(entry["step"]) if "step" in entry else float(bool(entry))


def _asgd_rate(options: dict[str, Any], steps: float) -> float:
    """Return the rate of ASGD after a number of steps."""
    lr = options["lr"]
    return lr / ((1 + options["lambd"] * lr * steps) ** options["alpha"])


def _plain(value: Any) -> Any:
    """Turn tensors among hyperparameters into numbers."""
    if isinstance(value, tuple):
        return tuple(_plain(each) for each in value)
    return value.detach().item() if isinstance(value, Tensor) else value


def as_torch(
    transformation: GradientTransformation,
    params: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
) -> Optimizer:
    """Make a `torch.optim.Optimizer` that steps by a transformation.

    It is for code that needs one, such as trainers, `GradScaler` and the schedulers of
    torch. `params` are `model.named_parameters()` or a dictionary of them; their
    `.grad` is read, and they are written in place. State: the transformation's,
    made at the first step. `state_dict` returns copies of its tensors, named by
    `vgrad.tree.state_dict`, and the parameter group. A step without any gradient
    changes nothing; `param_groups[0]["behind"]` names the parameters that had none at
    an earlier step.

    If the transformation is made by `inject_hyperparams`, its hyperparameters are in
    `param_groups[0]`, and the next step uses the values a scheduler writes there;
    schedules among them are left out. So is the rate of any other transformation: it
    raises when a scheduler of torch reads it, and in `step` if one was set by hand.
    `partition` makes groups of parameters.

    Raises:
        ValueError: in `step`, a gradient is sparse, or a parameter that was behind has
            one where updates depend on the steps that torch counts for each parameter.

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


class _Settings(dict):
    """A parameter group whose missing rate raises with an explanation."""

    def __missing__(self, key: str) -> Any:
        if key != "lr":
            raise KeyError(key)
        raise ValueError(
            'as_torch(transformation).param_groups[0]["lr"]: expected a transformation '
            "whose rate a scheduler can set, got one whose rate is fixed. Make it by "
            "inject_hyperparams(lion, lr=number), or leave the scheduler out and pass "
            "one of vgrad.optim.schedules as lr."
        )


class _Adapter(Optimizer):
    """The optimizer of `as_torch`: one group, and the state of a transformation."""

    def __init__(self, transformation: GradientTransformation, params: Params) -> None:
        self._transformation = transformation
        self._names = tuple(params)
        # Made at the first step, as in torch: until then parameters may be moved.
        self._tree: Tree | None = None
        self._counted: bool | None = None  # computed when a parameter needs it
        first = transformation.init(params)
        shown = _settable(transformation, first, params)
        hyperparams = first.hyperparams if isinstance(first, HyperparamsState) else {}
        self._shown = tuple(shown)
        self._unread = {"lr", *hyperparams} - set(shown)
        group = _Settings(params=list(params.items()), behind=[])
        super().__init__([group], shown)

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
                f"the steps of each parameter, this transformation all steps. Make "
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
        named = {} if self._tree is None else tree.state_dict(self._tree)
        # Copies: the next step may write to the tensors themselves.
        copies = {name: value.clone() for name, value in named.items()}
        return {**super().state_dict(), "state": copies}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        new = None
        if state_dict["state"]:
            template = self._transformation.init(self._params())
            new = tree.load_state_dict(template, state_dict["state"])
            new = tree_map(torch.clone, new)
        super().load_state_dict({**state_dict, "state": {}})
        # A group that was saved by an earlier version names none.
        self.param_groups = [_Settings({"behind": [], **g}) for g in self.param_groups]
        self._tree = new

    def __getstate__(self) -> dict[str, Any]:
        # torch's own method leaves out the attributes of a subclass.
        names = ("_transformation", "_names", "_tree", "_counted", "_shown", "_unread")
        own = {name: getattr(self, name) for name in names}
        return {**super().__getstate__(), **own}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
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
            updates, state = update(grads, state, small)
            others, other = update(grads, other, small)
            pairs: list[Any] = [
                (x, others[n]) for n, x in updates.items() if x is not None
            ]
            if not all(torch.equal(one, two) for one, two in pairs):
                return True
            moved += any(one.any() for one, _ in pairs)
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


_OWN_SLOTS = {"ema", "seed", "square"}
"""Slots of transformations that torch does not have: nothing counts their steps."""


def _later(states: tuple) -> tuple:
    """Increment the counts that torch has for each parameter.

    Counts of schedules are for all parameters, except in `asgd` and `adagrad`.
    """
    decays = any(
        isinstance(s, State) and s.slots.keys() & {"ax", "sum"} for s in states
    )

    def later(state: Any) -> Any:
        if isinstance(state, State):
            counted = decays or (state.slots and not state.slots.keys() & _OWN_SLOTS)
            return state._replace(count=state.count + 1) if counted else state
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
    marks = tree_map(lambda value: torch.full_like(value, math.nan), state[1])
    # A step without gradients: schedules overwrite the marks.
    without = dict.fromkeys(params)
    marked = state._replace(hyperparams=marks)
    _, after = transformation.update(without, marked, params)
    return {
        name: tree_map(Tensor.item, state.hyperparams[name])
        for name, kept in after.hyperparams.items()
        if all(leaf.isnan() for leaf in tree_leaves(kept))
    }
