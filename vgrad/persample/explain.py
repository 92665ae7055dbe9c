"""The way of a per-sample transform through a model and a batch, as a table."""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, overload

from torch.overrides import TorchFunctionMode

from vgrad import checks
from vgrad.generators import kept_random_state
from vgrad.persample.engine import Call, Fallbacks, Problem, Transform, at_a_time
from vgrad.persample.engine.collectors import Collector
from vgrad.persample.engine.ladder import FINAL, Stop
from vgrad.persample.engine.sites import Use
from vgrad.persample.engine.views import only_reads
from vgrad.persample.factors import Conv, Dense, Factor, Outer, Rows, Tied, Zero
from vgrad.persample.factors.combined import Moved
from vgrad.torch_private import modes
from vgrad.torch_private.modes import op_name
from vgrad.tree import tree_leaves
from vgrad.typing import Buffers, Found, Params, Tree


class Row(NamedTuple):
    """One use of parameters, or the sum of several.

    Attributes:
        names: the parameters.
        op: the op, or those that asked for copies of the parameter, one a sample.
        factor: the kind of factor that holds the gradients.
        form: how norms are computed: from those of `"both sides"` of one outer
            product, from inner products of positions (`"gram"`), from the `"rows"` of a
            table or from the `"gradients"` themselves. Transforms that need no norms
            have `"gradients"`, or a `"weighted sum"` without them.
        bytes: memory that this form takes for the samples that were run.
        why: how the factor came about.
    """

    names: tuple[str, ...]
    op: str
    factor: str
    form: str
    bytes: int
    why: str


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What `explain` finds; `str` makes a table of it.

    Attributes:
        function: the transform's name.
        strategy: the strategy that ran.
        why: why it was that one.
        samples: how many samples the rows are of, those of the first chunk or, if it
            falls into parts, of the largest.
        rows: what happens to each parameter.
        parts: the sizes of the parts of the first chunk; one, if it does not split.
        splits: the lines that ask what its samples answer differently, and how often it
            or one of its parts splits there.
        foreign: the nodes of the graph and the ops that are not torch's own, which may
            write into any tensor that they reach.
        copied: bytes that factors hold as copies for that reason.
    """

    function: str
    strategy: str
    why: str
    samples: int
    rows: tuple[Row, ...]
    parts: tuple[int, ...] = ()
    splits: tuple[tuple[str, int], ...] = ()
    foreign: tuple[str, ...] = ()
    copied: int = 0

    def __str__(self) -> str:
        """Return an aligned table in plain text."""
        head = ("parameter", *Row._fields[1:])
        cells = [
            (", ".join(row.names), *row[1:4], f"{row.bytes:,}", row.why)
            for row in self.rows
        ]
        samples = f"{self.samples} sample{'s' * (self.samples != 1)}"
        title = f"{self.function} of {samples}, strategy {self.strategy}: {self.why}"
        if self.splits:
            lines = [f"  {where} ({times} x)" for where, times in self.splits]
            title += (
                f"\n\n{sum(self.parts)} samples run in {len(self.parts)} parts, of "
                f"which this is the largest. They take different branches at\n"
            ) + "\n".join(lines)
        if self.foreign:
            title += (
                f"\n\nFactors hold copies, {self.copied:,} bytes, since these are not "
                f"torch's own and may write in place: {', '.join(self.foreign)}"
            )
        return f"{title}\n\n{aligned([head, *cells], right={4})}"


def aligned(lines: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> str:
    """Lay cells out in columns, those numbered in `right` at their right edge.

    Example:
        >>> print(aligned([("op", "bytes"), ("linear", "8")], right={1}))
        op      bytes
        linear      8
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


EXPANDED = "no rule fits: expanded over the samples"
"""How the reason of a row begins whose op made autograd form every gradient."""

_BACK = "through the computation"
_UNUSED = "not used: no gradient reaches it"


class Explains(Protocol[Found]):
    """A function that says itself what it does, as those of ensembles do."""

    def explain(self, params: Params, buffers: Buffers, /, *batch: Tree) -> Found:
        """Say it."""
        ...


@overload
def explain(transform: Transform) -> Transform[Explanation]: ...
@overload
def explain(transform: Explains[Found]) -> Callable[..., Found]: ...
def explain(transform: Any) -> Any:
    """Say what a transform does: `(params, buffers, *batch) -> Explanation`.

    `transform` is what `per_sample_norm`, `clipped_grad` or another per-sample
    transform returns. Its loss runs once, forward and backward, on the first chunk of
    the batch and with the transform's options (and on one sample, if a parameter gets
    no gradient); random generators are put back. Print the result, or read `.strategy`,
    `.rows` and `.splits`. For what `ensemble_forward` and `ensemble_grad` return it
    says which strategy runs and the form of each op.

    Each use of a parameter leaves a factor. Where the op has no rule that fits, the
    parameter is expanded over the samples: exact, but all gradients are stored. What is
    used several times, or computed from parameters, has one more row for each
    parameter's sum; only that one then takes memory. `.foreign` names nodes that may
    write in place into any tensor, for which factors hold `.copied` bytes as copies.

    Raises:
        TypeError: `transform` is something else.
        ValueError: it is a transform that has no forms here; when called, the batch is
            empty; else as the transform.
        UnsupportedOp: as the transform.

    Example:
        >>> import torch
        >>> import vgrad
        >>> loss = lambda params, buffers, x: (x @ params["w"] + params["b"]).sum()
        >>> params = {"w": torch.ones(9, 8), "b": torch.ones(8), "c": torch.ones(1)}
        >>> compute = vgrad.clipped_grad(loss, max_norm=1.0)
        >>> explanation = explain(compute)(params, {}, torch.ones(4, 2, 9))
        >>> explanation.strategy
        'recorded'
        >>> for row in explanation.rows:
        ...     print(row.names, row.op, row.factor, row.form, row.bytes)
        ('w',) matmul Outer gram 544
        ('b',) add Dense gradients 128
        ('c',)  Zero none 0
    """
    if hasattr(transform, "explain"):
        return transform.explain
    if not isinstance(transform, Transform):
        raise TypeError(
            f"explain(transform): expected what a per-sample or ensemble transform "
            f"returns, got a {type(transform).__name__}. Pass, for example, "
            f"per_sample_norm(loss)."
        )
    checks.choice("explain", _FORMS, transform=transform.options.function)

    # A memory of its own, so that the transform still warns of what was seen here.
    fresh = {"loss_scale": None, "fallbacks": Fallbacks()}
    return _Explaining(dataclasses.replace(transform.options, **fresh))


class _Explaining(Transform):
    """What `explain` returns for a per-sample transform."""

    def called(self, call: Call, more: Any) -> Explanation:
        """Say which strategy is taken, and why."""
        with kept_random_state(call.problem.tensors):
            return _explained(call.problem)


def _explained(problem: Problem) -> Explanation:
    """Take the strategy that the transform would take."""
    chosen, why = problem.strategy, f'as strategy="{problem.strategy}" says'
    if chosen == "auto" and modes.inside_transform():
        chosen, why = "vmap", "inside a transform of torch.func"
    elif chosen == "auto":
        try:
            return _recorded(problem, "the loss can be recorded")
        except FINAL:
            raise
        except Exception as error:
            stopped = Stop.of(error)
            chosen, why = "vmap", f"{stopped.why} ({stopped.where})"
        try:
            return _stored(problem, chosen, why)
        except FINAL:
            raise
        except Exception:
            chosen = "loop"
    if chosen == "recorded":
        return _recorded(problem, why)
    return _stored(problem, chosen, why)


def _recorded(problem: Problem, why: str) -> Explanation:
    """Record the loss, and list the uses of every parameter."""
    found, told = _run(problem, "recorded", why)
    return dataclasses.replace(told, rows=tuple(found.rows()))


def _stored(problem: Problem, strategy: str, why: str) -> Explanation:
    """Store all gradients, and see which ops take each parameter."""
    watch = _Watch()

    def watched(params: Params, buffers: Buffers, /, *sample: Tree) -> Any:
        watch.names = {id(value): name for name, value in params.items()}
        with watch:
            return problem.loss(params, buffers, *sample)

    found, told = _run(dataclasses.replace(problem, loss=watched), strategy, why)
    because = f"{strategy} stores all gradients"
    rows = tuple(
        whole._replace(op=", ".join(watch.ops[name]), why=because)
        if name in watch.ops
        else whole
        for name, whole in found.wholes.items()
    )
    return dataclasses.replace(told, rows=rows)


def _run(problem: Problem, strategy: str, why: str) -> tuple["_Found", Explanation]:
    """Run the first chunk; return what its largest part left, and all but the rows."""
    size = problem.batch.size
    if not size:
        raise ValueError(
            f"explain({problem.function})(params, buffers, *batch): expected at least "
            f"one sample, got an empty batch."
        )
    chosen = dataclasses.replace(problem, strategy=strategy)
    part = chosen.part(0, min(size, at_a_time(chosen) or size))
    call = Call(dataclasses.replace(part, chunk_size=None))
    before = problem.fallbacks.splits.copy()
    parts: list[tuple[int, _Found]] = []
    for found in call.chunks(lambda: _Found(problem)):
        parts.append((call.done - sum(size for size, _ in parts), found))
    largest, found = max(parts, key=lambda part: part[0])
    sizes = tuple(size for size, _ in parts)
    splits = tuple((problem.fallbacks.splits - before).items())
    foreign = tuple(sorted(problem.fallbacks.foreign))
    of_parts = sizes, splits, foreign, found.copied
    told = Explanation(problem.function, strategy, why, largest, (), *of_parts)
    return found, told


class _Found(Collector):
    """Notes uses and what is collected of them; it keeps no tensors."""

    def __init__(self, problem: Problem) -> None:
        """Start with nothing."""
        self._form = _FORMS[problem.function]
        self._params = problem.params
        self._uses: list[Row] = []
        self._computed: set[str] = set()
        self.wholes: dict[str, Row] = {}
        self.copied = 0

    def tell(self, use: Use) -> None:
        """Note a use."""
        self.copied += use.copied
        why = "has a rule" if use.ruled else EXPANDED
        if use.computed:
            self._computed.update(use.names)
            why += ", for what is computed from parameters"
        kind = type(use.factor).__name__
        self._uses.append(Row(use.names, ", ".join(use.ops), kind, "", 0, why))

    def take(self, name: str, factor: Factor) -> None:
        """Note what is handed on for a parameter."""
        form, size = self._form(factor, self._params[name].element_size())
        kind = type(factor).__name__
        self.wholes[name] = Row((name,), "", kind, form, size, _UNUSED)

    def rows(self) -> Iterator[Row]:
        """Yield the uses of each parameter, and their sum where it is another."""
        told = self._uses[::-1]  # the backward pass came to the last use first
        shown: list[Row] = []
        for name in self._params:
            uses = [row for row in told if name in row.names]
            whole = self.wholes[name]
            if not uses:
                yield whole
            elif len(uses) == 1 and name not in self._computed:
                yield uses[0]._replace(form=whole.form, bytes=whole.bytes)
            else:
                others = [row for row in uses if row not in shown]
                shown += [row for row in others if len(row.names) > 1]
                yield from others
                sums = f"sum of {len(uses)} uses" if len(uses) > 1 else _BACK
                yield whole._replace(why=sums)


class _Watch(TorchFunctionMode):
    """Sees which ops take a parameter, whatever runs them."""

    def __init__(self) -> None:
        """Start with nothing."""
        super().__init__()
        self.names: dict[int, str] = {}
        self.ops: dict[str, dict[str, None]] = {}

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Note the parameters among the arguments, and run the call."""
        kwargs = kwargs or {}
        op = op_name(func)
        if not only_reads(func):
            for leaf in tree_leaves((args, kwargs)):
                if (name := self.names.get(id(leaf))) is not None:
                    self.ops.setdefault(name, {})[op] = None
        return func(*args, **kwargs)


def _for_norms(factor: Factor, number: int) -> tuple[str, int]:
    """Say how norms are computed, and what is kept until the sum can be weighted."""
    match factor:
        case Zero():
            return "none", 0
        case Rows():
            return "rows", factor.bytes
        case Outer() if factor.inputs.shape[2] == 1:
            return "both sides", factor.bytes
        case Outer(by_gram=True) | Conv(form="gram"):
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
        case Dense() | Outer() | Tied():
            return _for_gradients(factor, number)
    return "its own", factor.bytes


def _for_gradients(factor: Factor, number: int) -> tuple[str, int]:
    return "gradients", factor.size * math.prod(factor.shape) * number


def _as(form: str) -> Callable[[Factor, int], tuple[str, int]]:
    return lambda factor, number: (form, factor.bytes)


_FORMS = {
    "per_sample_norm": _for_norms,
    "clipped_grad": _for_norms,
    "per_sample_grad": _for_gradients,
    "gradient_moments": _for_gradients,
    "weighted_grad": _as("weighted sum"),
    "per_sample_gram": _as("inner products"),
    "per_sample_projection": _as("projected"),
}
"""What each transform does with a factor; `number` is the bytes of one."""
