"""A report of how a per-sample transform runs a model and a batch."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol, overload

import torch
from torch.overrides import TorchFunctionMode

from vgrad import checks
from vgrad.factors import Conv, Dense, Experts, Factor, Outer, Rows, Tied, Zero
from vgrad.factors.combined import Moved
from vgrad.generators import kept_random_state
from vgrad.loss.grad_flags import only_reads
from vgrad.persample.engine import (
    Call,
    Fallbacks,
    Inputs,
    Join,
    Joined,
    Listed,
    Quantity,
    Transform,
    UnsupportedOp,
    at_a_time,
    verify,
)
from vgrad.persample.engine.collectors import Collector
from vgrad.persample.engine.proxies import Use
from vgrad.report import Cost, Explanation, Row
from vgrad.torch_private import modes
from vgrad.torch_private.modes import op_name
from vgrad.tree import tree_leaves
from vgrad.typing import Buffers, Found, Params, Strategy, Tree

EXPANDED = "no rule fits: expanded over the samples"
"""The beginning of a row's reason if autograd forms every gradient of the op."""


class Explains(Protocol[Found]):
    """A function with a report of its own, as functions of ensembles."""

    def explain(self, params: Params, buffers: Buffers, /, *batch: Tree) -> Found:
        """Return the report."""
        ...


@overload
def explain(transform: Transform) -> Callable[..., Explanation]: ...
@overload
def explain(transform: Explains[Found]) -> Callable[..., Found]: ...
def explain(transform: Any) -> Any:
    """Report how a transform runs: `(params, buffers, *batch) -> Report`.

    `transform` is the result of `per_sample_norm`, `clipped_grad` or another per-sample
    transform. Its loss runs once, forward and backward, on the first chunk of the batch
    and with the transform's options (and on one sample, if a parameter gets no
    gradient; on two, if no call has compared gradients with plain autograd so far);
    random generators are restored. Print the report, or read `.strategy`,
    `.why`, `.costs`, `.rows` and `.splits`. For `ensemble_forward(...)` and
    `ensemble_grad(...)` it has the strategy and the form of each op, for a compiled
    function its captures.

    Each use of a parameter leaves a factor. Where the op has no rule that fits, the
    parameter is expanded over the samples: exact, but all gradients are stored. A
    parameter that is used several times, or through a computation, has one more row for
    its sum; only that one then takes memory.

    Raises:
        TypeError: `transform` is something else.
        ValueError: the transform has no forms here; when called, the batch is empty.

    Example:
        >>> import torch
        >>> import vgrad
        >>> loss = lambda params, buffers, x: (x @ params["w"] + params["b"]).sum()
        >>> params = {"w": torch.ones(9, 8), "b": torch.ones(8), "c": torch.ones(1)}
        >>> compute = vgrad.clipped_grad(loss, max_norm=1.0)
        >>> report = explain(compute)(params, {}, torch.ones(4, 2, 9))
        >>> report.strategy
        'recorded'
        >>> for row in report.rows:
        ...     print(row.names, row.op, row.factor, row.form, row.bytes)
        ('w',) matmul Outer gram 544
        ('b',) add Dense gradients 128
        ('c',)  Zero none 0
    """
    if hasattr(transform, "explain"):
        return transform.explain
    if not isinstance(transform, Transform):
        raise TypeError(
            f"explain(transform): expected a per-sample or ensemble transform of a "
            f"loss, got a {type(transform).__name__}. Pass, for example, "
            f"per_sample_norm(loss)."
        )
    checks.choice("explain", _FORMS, transform=transform.options.function)

    def explained(params: Params, buffers: Buffers, /, *batch: Tree) -> Any:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return explained(params, buffers, *batch)
        # A memory of its own, so that the transform still warns; the report has the
        # reason.
        options = replace(transform.options, fallbacks=Fallbacks(silent=True))
        inputs = transform.prepared(Inputs(params, buffers, batch))
        call = options.on(inputs).replaced(history=transform.options.on(inputs).history)
        with kept_random_state(call.tensors):
            report = _explained(call)
        captured = getattr(transform.execute, "explanation", None)
        return report if captured is None else captured(report)

    return explained


def _explained(call: Call) -> Explanation:
    size, fallbacks, watch = call.batch.size, call.fallbacks, _Watch()
    if not size:
        raise ValueError(
            f"explain({call.function})(params, buffers, *batch): expected at least one "
            f"sample, got an empty batch."
        )

    def watched(params: Params, buffers: Buffers, /, *sample: Tree) -> Any:
        watch.names = {id(value): name for name, value in params.items()}
        with watch:
            return call.loss(params, buffers, *sample)

    verified = _verified(call)
    size = min(size, at_a_time(call) or size)
    part = replace(call, loss=watched).select(slice(0, size))
    part, quantity = part.replaced(chunk_size=None), _Described(call)
    parts = Joined(part, quantity.joins())
    Transform(call, quantity).run_parts(part, parts)
    parts.close()
    uses = parts.values["uses"]
    sizes = tuple(len(chunk.losses) for chunk in parts.chunks)
    largest = sizes.index(max(sizes))
    strategy = parts.chunks[largest].strategy
    failure = call.history.failure
    if strategy == "loop":
        failure = fallbacks.split or failure
    if failure is not None:
        why = f"{failure.why} ({failure.where})"
    elif call.strategy != "auto":
        why = f'as strategy="{call.strategy}" says'
    elif modes.inside_transform():
        why = "inside a transform of torch.func"
    elif strategy == "loop":
        why = "one sample costs least by plain autograd"
    else:
        why = "the loss can be recorded"
    line = "" if strategy == "loop" else fallbacks.rooms.line
    hooks = fallbacks.hooks if strategy == "recorded" else {}
    rows = tuple(uses[largest].rows(strategy, watch))
    one = sum(value.numel() * value.element_size() for value in call.params.values())
    costs = (
        Cost("recorded", len(sizes), sum(row.bytes for row in rows)),
        Cost("vmap", len(sizes), sizes[largest] * one),
        Cost("loop", size, one),
    )
    names = [cost.strategy for cost in costs]
    return Explanation(
        function=call.function,
        strategy=strategy,
        why=why,
        samples=sizes[largest],
        rows=rows,
        parts=sizes,
        splits=tuple(fallbacks.splits.items()),
        foreign=tuple(sorted(fallbacks.foreign)),
        copied=uses[largest].copied,
        written=line,
        hooks=tuple(f"{name} ({line})" for name, line in hooks.items()),
        costs=costs[names.index(strategy) :],
        verified=verified,
    )


def _verified(call: Call) -> str:
    """Return how far gradients are verified; compare them if no call has done so."""
    if not call.verify:
        return "not verified: verify=False"
    if call.strategy == "loop":
        return ""
    if not call.history.calls:
        try:
            verify(call, strict=False)
        except (UnsupportedOp, RuntimeError) as error:
            return str(error)
    return str(call.history)


@dataclasses.dataclass(frozen=True)
class _Described(Quantity):
    call: Call

    def joins(self) -> dict[str, Join]:
        return {"uses": Listed()}

    def collector(self, call: Call) -> Collector:
        return _Uses(self.call)

    def partial(self, collector: Any, call: Call) -> dict[str, Any]:
        return {"uses": [collector]}


class _Watch(TorchFunctionMode):
    """Notes which ops take a parameter, under any strategy."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[int, str] = {}
        self.ops: dict[str, dict[str, None]] = {}

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not only_reads(func):
            for leaf in tree_leaves((args, kwargs)):
                if (name := self.names.get(id(leaf))) is not None:
                    self.ops.setdefault(name, {})[op_name(func)] = None
        return func(*args, **kwargs)


class _Uses(Collector):
    """Describes uses, and the factors that are collected; it keeps no tensors."""

    def __init__(self, call: Call) -> None:
        self._form = _FORMS[call.function]
        self._params = call.params
        self._uses: list[Row] = []
        self._computed: set[str] = set()
        self._wholes: dict[str, Row] = {}
        self.copied = 0

    def callback(self, use: Use) -> None:
        self.copied += use.copied
        why = "has a rule" if use.ruled else EXPANDED
        if use.computed:
            self._computed.update(use.names)
            why += ", for a value computed from parameters"
        kind = type(use.factor).__name__
        self._uses.append(Row(use.names, ", ".join(use.ops), kind, "", 0, why))

    def add(self, name: str, factor: Factor) -> None:
        form, size = self._form(factor, self._params[name].element_size())
        kind, why = type(factor).__name__, "not used: no gradient reaches it"
        self._wholes[name] = Row((name,), "", kind, form, size, why)

    def rows(self, strategy: Strategy, watch: _Watch) -> Iterator[Row]:
        """Yield the uses of each parameter, and their sum where it is another."""
        recorded = self._uses[::-1]  # the backward pass came to the last use first
        shown: list[Row] = []
        for name in self._params:
            uses = [row for row in recorded if name in row.names]
            sum_row = self._wholes[name]
            if strategy != "recorded" and name in watch.ops:
                why = f"{strategy} stores all gradients"
                yield sum_row._replace(op=", ".join(watch.ops[name]), why=why)
            elif not uses:
                yield sum_row
            elif len(uses) == 1 and name not in self._computed:
                yield uses[0]._replace(form=sum_row.form, bytes=sum_row.bytes)
            else:
                others = [row for row in uses if row not in shown]
                shown += [row for row in others if len(row.names) > 1]
                yield from others
                sums = f"sum of {len(uses)} uses"
                why = sums if len(uses) > 1 else "through the computation"
                yield sum_row._replace(why=why)


def _for_norms(factor: Factor, number: int) -> tuple[str, int]:
    """Return the form of norms, and the bytes that are kept until weights are known."""
    match factor:
        case Zero():
            return "none", 0
        case Rows():
            return "rows", factor.bytes
        case Outer() if factor.inputs.shape[2] == 1:
            return "both sides", factor.bytes
        case Outer(by_gram=True) | Experts(by_gram=True) | Conv(form="gram"):
            return "gram", factor.bytes
        case Tied() if factor.outer.by_gram:
            return "gram and rows", factor.bytes
        case Moved():
            forms = [_for_norms(part, number) for part in factor.parts]
            names = dict.fromkeys(name for name, _ in forms)
            return ", ".join(names), sum(size for _, size in forms)
        case Conv():
            form, size = _for_gradients(factor, number)
            return f"{form} by {factor.form}", size
        case Dense() | Outer() | Experts() | Tied():
            return _for_gradients(factor, number)
    return "its own", factor.bytes


def _for_gradients(factor: Factor, number: int) -> tuple[str, int]:
    return "gradients", factor.size * math.prod(factor.shape) * number


def _as(form: str) -> Callable[[Factor, int], tuple[str, int]]:
    return lambda factor, number: (form, factor.bytes)


_FORMS = {
    "per_sample_norm": _for_norms,
    "clipped_grad": _for_norms,
    "clipped_sum": _for_norms,
    "per_sample_grad": _for_gradients,
    "gradient_moments": _for_gradients,
    "weighted_grad": _as("weighted sum"),
    "per_sample_gram": _as("inner products"),
    "per_sample_projection": _as("projected"),
}
"""The form and bytes of a factor in each transform; `number` is the bytes of a number.
"""
