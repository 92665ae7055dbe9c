"""Members that share their weights up to factors of rank one: BatchEnsemble, TabM."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vgrad import checks
from vgrad.checks import Patterns
from vgrad.ensemble.stacking import build_models, joined, member_seed
from vgrad.functional import slots
from vgrad.functional.model import FunctionalModel
from vgrad.typing import Buffers, Params


def rank_one(
    make: nn.Module | Callable[[], nn.Module],
    members: int,
    *,
    seed: int,
    shared: Patterns = (),
    own: Patterns = (),
    random: Patterns = ("*",),
) -> tuple[FunctionalModel, Params, Buffers, tuple[str, ...]]:
    """Make E members that share weights: `-> (fmodel, params, buffers, shared)`.

    In each Linear and Conv layer member e computes `y = s_e * (W (r_e * x)) + b_e`,
    which is the layer of weight `(s_e r_e^T) * W`. All members have one `W`, and each
    its vectors `layer.r [E, I]` and `layer.s [E, O]`, over channels, and its biases,
    norms and buffers. Pass the names of the result on as `shared=`.

    Other matrices (embeddings, attention, recurrent weights) have no r and s, and have
    to match `shared`, patterns of the entries without a member axis, or `own`, of
    entries `[E, *shape]` as from `stack`. So may weights and all else.

    `make` is a module, which is copied, or makes one: member i begins as `make()` after
    `torch.manual_seed(member_seed(seed, i))`, but with the `W` of member 0. Vectors
    that match `random` begin as random signs, others as ones: by default all do, as in
    BatchEnsemble. TabM has `random=["first.r"], own=["last.*"]`, and minimizes the mean
    over members: gradients of `W` are sums, so divide the rate of `shared_tx` by E.

    Cost: the operations of E models, with one product by `W` for the inputs of all of
    them, and the memory of one model.

    Reference: Wen, Tran and Ba, BatchEnsemble, arXiv 2002.06715; Gorishniy, Kotelnikov
    and Babenko, TabM, arXiv 2410.24210.

    Raises:
        ValueError: another matrix matches nothing, no layer is left, a pattern is idle,
            an entry matches both `shared` and `own`, or a layer has an `r` or `s`.
        RuntimeError: in a call, if other code than its layer reads a weight, as does
            `nn.TransformerEncoderLayer` in evaluation mode.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> fmodel, params, buffers, shared = rank_one(model, 4, seed=0)
        >>> shared, params["0.weight"].shape, params["0.r"].shape
        (('0.weight', '2.weight'), torch.Size([8, 3]), torch.Size([4, 3]))
    """
    [members] = checks.integers("rank_one", minimum=1, members=members)
    checks.patterns("rank_one", shared=shared, own=own, random=random)
    models: list[nn.Module] = []
    first: dict[str, Tensor] = {}  # the shared entries of member 0

    build: Any = (lambda: make) if isinstance(make, nn.Module) else make
    for i in range(members):
        [model] = build_models("rank_one(make)", [build], [member_seed(seed, i)])
        memo = {id(x): first[n] for n, x in slots.named_tensors(model) if n in first}
        models.append(copy.deepcopy(model, {**memo}))  # which adds to it
        if i == 0:
            layers, names = _layers(models[0], shared, own)
            entries = dict(slots.named_tensors(models[0]))
            first |= {name: entries[name] for name in names}
    vectors = [f"{path}.{part}".lstrip(".") for path in layers for part in "rs"]
    drawn = {*checks.all_matched("rank_one", vectors, random, kind="vector")}
    source = torch.Generator().manual_seed(member_seed(seed, 2**32 - 1))
    for model in models:
        for path in layers:
            layer: Any = model.get_submodule(path)
            weight, layer.__class__ = layer.weight, _FORMS[type(layer)]
            inputs = weight.shape[1] * getattr(layer, "groups", 1)
            for part, size in (("r", inputs), ("s", len(weight))):
                start = torch.ones(size)
                if f"{path}.{part}".lstrip(".") in drawn:
                    start = torch.randint(2, (size,), generator=source) * 2 - 1
                layer.register_parameter(part, nn.Parameter(start.to(weight)))
    return *joined("rank_one(make)", models, names), tuple(names)


def _layers(
    model: nn.Module, shared: Patterns, own: Patterns
) -> tuple[list[str], list[str]]:
    """Return the paths of the layers with r and s, and the names of shared entries."""
    firsts: dict[int, str] = {}
    for name, tensor in slots.named_tensors(model):
        firsts.setdefault(id(tensor), name)
    entries, kind = [*firsts.values()], "parameter or buffer"
    common = checks.all_matched("rank_one", entries, shared, kind=kind)
    stacked = checks.all_matched("rank_one", entries, own, kind=kind)
    if both := {*common}.intersection(stacked):
        raise ValueError(
            f"rank_one(shared=, own=): expected an entry in one of them at most, got "
            f"{checks.listed(both)} in both."
        )
    fixed = {*common, *stacked}
    layers, others = [], []
    for path, module in model.named_modules():
        matrices = {
            name: firsts[id(x)]
            for name, x in module.named_parameters(recurse=False)
            if x.ndim > 1 and firsts[id(x)] not in fixed
        }
        padded = getattr(module, "padding_mode", "zeros") == "zeros"
        plain = type(module) in _FORMS and padded and "forward" not in vars(module)
        if plain and [*matrices] == ["weight"]:
            if present := [name for name in "rs" if hasattr(module, name)]:
                raise ValueError(
                    f"rank_one(make): expected layers without attributes 'r' and 's', "
                    f"got one with {checks.listed(present)} at {path!r}."
                )
            layers.append(path)
            common.append(matrices["weight"])
        else:
            others += [f"{x} of {type(module).__name__}" for x in matrices.values()]
    if others or not layers:
        raise ValueError(
            f"rank_one(make): expected weights of Linear and Conv layers, padded with "
            f"zeros, got {checks.listed(others) or 'none'}. Name others in shared=, "
            f"for one of all members, or in own=, for one of each."
        )
    return layers, [name for name in entries if name in common]


class _Scaled:
    """A layer of r and s, whose weight only its own forward pass may read."""

    def __getattr__(self: Any, name: str) -> Any:
        if name == "weight":
            raise RuntimeError(
                f"rank_one(make): expected a layer that is called, got the weight of a "
                f"{type(self).__bases__[-1].__name__} read by other code, which leaves "
                f"out r and s. Name the weight in shared= or own=."
            )
        return nn.Module.__getattr__(self, name)

    def forward(self: Any, input: Tensor) -> Tensor:
        def along(vector: Tensor) -> Tensor:
            return vector.reshape(-1, *[1] * spatial)

        spatial = len(getattr(self, "kernel_size", ()))
        x, weight = input * along(self.r), self._parameters["weight"]
        if spatial:
            how = None, self.stride, self.padding, self.dilation, self.groups
            out = getattr(F, f"conv{spatial}d")(x, weight, *how)
        else:
            out = F.linear(x, weight)
        out = out * along(self.s)
        return out if self.bias is None else out + along(self.bias)


class _Linear(_Scaled, nn.Linear): ...


class _Conv1d(_Scaled, nn.Conv1d): ...


class _Conv2d(_Scaled, nn.Conv2d): ...


class _Conv3d(_Scaled, nn.Conv3d): ...


_FORMS: dict[type, type] = {
    form.__bases__[-1]: form for form in (_Linear, _Conv1d, _Conv2d, _Conv3d)
}
