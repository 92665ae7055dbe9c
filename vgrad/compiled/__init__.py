"""Transforms and training steps as graphs: captured once, then run without Python.

In eager mode each call interprets the loss in Python. For small and middle-sized
networks that takes longer than the arithmetic. A capture runs a function once and keeps
the ops that it called as a graph, which later calls run again.

`compile` and `CompileWarning` are names of `vgrad` itself.

* `Compiled`: the type of the result of `compile`
* `choices`: the backends that `"auto"` chose, for another run
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from vgrad.compiled.captures import (
    Backend,
    Captured,
    CaptureReport,
    Captures,
    Fallback,
    checked_sizes,
    sizes_of_plan,
)
from vgrad.compiled.captures import CompileWarning as CompileWarning
from vgrad.dp.private_gradients import PrivateSource
from vgrad.ensemble.gradients import EnsembleGradFn
from vgrad.ensemble.prediction import EnsembleForward
from vgrad.persample.engine import Transform, eager
from vgrad.training.steps import TrainingStep
from vgrad.typing import Arguments, Found, Same

__all__ = ["Compiled", "choices"]


def __dir__() -> list[str]:
    return __all__


class Compiled(Same[Arguments, Found], Protocol):
    """The result of `compile`: the same function, its attributes, and its captures."""

    def reports(self) -> tuple[CaptureReport, ...]:
        """Return a report of every capture."""
        ...

    def clear(self) -> None:
        """Forget all captures; the next call of each kind captures again."""
        ...


def compile(
    transform: Callable[Arguments, Found],
    *,
    backend: Backend | Mapping[str, str] = "replay",
    batch_sizes: Sequence[int] | None = None,
    fallback: Fallback = "eager",
    verify: bool = True,
) -> "Compiled[Arguments, Found]":
    """Capture a transform or a step as graphs; the result is called like the original.

    `transform` is a per-sample transform (`clipped_grad(loss, ...)` and the others), a
    step (`train_step`, `private_step`, `ensemble_train_step`), `ensemble_grad` or
    `ensemble_forward`. The first call for arguments of new shapes runs in eager mode
    and captures a graph; later ones run the graph. The `backend`

    * `"replay"` calls the same ops one by one, without the Python between them. Its
      numbers have the bits of eager mode, and a capture takes seconds;
    * `"inductor"` compiles the graph, as `torch.compile` does, in up to minutes. It
      takes a C++ compiler, and sums are rounded in another order than in eager mode;
    * `"cudagraph"` records a replay as one CUDA graph. Arguments, parameters included,
      are copied into its memory, and results out of it; all are on one GPU;
    * `"auto"` times all of these once for each capture and keeps the fastest (CUDA
      graphs on a GPU alone). Timings differ from run to run: a resumed run that has to
      repeat its numbers passes the `choices` of the first run's reports.

    Where one of them is missing, or is not verified, there is a warning, and replay.

    The loss is a pure function. Compared at every call, with a new capture where one
    has changed: shapes, strides, dtypes and devices of all arguments, torch's switches,
    and plain values and containers in closures, default arguments, globals that the
    loss names, chains that it spells (`config.beta`, `hp["beta"]`, `self.beta`), and
    attributes of modules. Anything deeper is a constant; `.clear()` of the result
    forgets all captures. The values of tensors are read at every call.

    Code that a graph cannot repeat (`docs/compiling.md` has a list), and calls beyond
    16 captures of one function, run in eager mode, with one warning that says why, or
    raise with `fallback="error"`. A loss of one sample may read values that all samples
    share. Where samples differ, it runs in eager mode, part by part.

    Samples whose norms rounding may have spoiled, or that are not finite, raise a flag:
    the result is dropped, and the call repeated in eager mode with the same random
    numbers. After three such calls in a row the graph is given up, with a warning.

    With `batch_sizes`, for per-sample transforms and steps with a loss of one sample, a
    batch is filled up to the next of these sizes by copies of its first sample, which
    add exactly zero, and larger batches are split, so that a few captures suffice.
    `private_step` takes sizes that suit its plan by default, and draws as in eager
    mode. Elsewhere random numbers are drawn as in eager mode on the filled up batch.

    With `verify=True` results of each capture are compared with eager mode: the first,
    and the results of calls 2, 4, 8, ... All bits of a replay must be equal. Compiled
    code, and a replay on a device that adds up in another order each time, may be as
    far from eager mode as rounding explains: 6e-5 of a tensor's largest number in
    float32, or eight times as far as eager mode moves with arguments that differ by
    rounding. A capture that no longer agrees is dropped, with a warning; a private
    step raises, before it releases anything.

    Results are constants: to differentiate them again raises.

    Raises:
        TypeError: `transform` is none of these.
        ValueError: an option is none of those allowed, or `batch_sizes` is given for a
            function of whole batches.
        RuntimeError: when called, with `fallback="error"`, if something cannot be
            captured; or if a capture of a private step disagrees with eager mode.

    Example:
        >>> import torch
        >>> import vgrad
        >>> loss = lambda params, buffers, x: (params["w"] * x).sum().square()
        >>> norms = vgrad.compile(vgrad.per_sample_norm(loss))
        >>> params, x = {"w": torch.ones(2)}, torch.tensor([[3.0, 4.0], [0.0, 1.0]])
        >>> [norms(params, {}, x) for _ in range(2)]
        [tensor([70.,  2.]), tensor([70.,  2.])]
        >>> [(each.name, each.calls) for each in norms.reports()]
        [('per_sample_norm', 1)]
    """
    function: Any = transform
    private = isinstance(getattr(function, "source", None), PrivateSource)
    captures = Captures(backend, fallback, verify=verify, private=private)
    sizes = None if batch_sizes is None else checked_sizes(batch_sizes)

    def as_graphs(transform: Transform) -> Transform:
        options = replace(transform.options, singly=False)
        transform = replace(transform, options=options)
        plain = replace(transform, execute=eager, reduce=None, keys=None)
        return replace(transform, execute=Captured(plain, captures, sizes))

    if isinstance(function, Transform):
        compiled: Any = as_graphs(function)
    elif isinstance(function, TrainingStep) and function.source.transform is not None:
        source = function.source
        if isinstance(source, PrivateSource) and sizes is None:
            sizes = sizes_of_plan(source.plan)
        source = replace(source, transform=as_graphs(source.transform))
        execute = function.reduce.execution(captures)
        compiled = replace(function, source=source, execute=execute)
    elif sizes is not None:
        name = getattr(function, "name", type(function).__name__)
        raise ValueError(
            f"compile({name}, batch_sizes={list(sizes)}): expected a per-sample "
            f"transform or a step with a loss of one sample, which can leave copies "
            f"out. A loss of a whole batch would average them."
        )
    elif isinstance(function, TrainingStep):
        compiled = replace(function, execute=function.reduce.execution(captures))
    elif isinstance(function, EnsembleGradFn | EnsembleForward):
        compiled = replace(function, execute=captures)
    else:
        raise TypeError(
            f"compile(transform): expected a per-sample transform, a training step, "
            f"ensemble_grad(...) or ensemble_forward(...), got a "
            f"{type(function).__name__}."
        )
    return compiled


def choices(reports: Sequence[CaptureReport]) -> dict[str, str]:
    """Return the backends that `"auto"` chose, which `compile(backend=...)` repeats.

    Example:
        >>> choices([CaptureReport("clipped_grad", "0a1b", "inductor")])
        {'0a1b': 'inductor'}
    """
    return {each.kind: each.backend for each in reports if each.backend != "eager"}
