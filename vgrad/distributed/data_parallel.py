"""Functions of batches, and the batches themselves, cut among ranks."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from vgrad import optim
from vgrad.compiled import Captures, CompiledStep, CompiledTransform
from vgrad.distributed.parallel import ParallelTransform, plain_of
from vgrad.distributed.stepping import parallel_step
from vgrad.persample.engine import Transform
from vgrad.persample.gram import GramFn
from vgrad.ranks import Ranks
from vgrad.training.plain import OfSamples, TrainStep
from vgrad.training.private import PrivateStep
from vgrad.typing import Arguments, Found, Same


def data_parallel(
    transform: Callable[Arguments, Found], mesh: DeviceMesh, *, data: str = "dp"
) -> Same[Arguments, Found]:
    """Make a transform or a step one of all ranks; the result is called as it is.

    `transform` is what a per-sample transform returns (`clipped_grad(loss, ...)` and
    the others but `per_sample_gram`), `private_step` or `train_step`, or what
    `vgrad.compile` makes of one. The ranks are those along the axis `data` of the mesh.
    Each calls the result with the same parameters, buffers or state, and with its own
    part of a batch: `[B_r, ...]`, of any size or empty. All of them get what one
    process would for the parts put together in the order of ranks:

    * sums over samples (clipped and weighted sums, moments, counts) are reduced once,
      in float32 or wider, to the same bits on all ranks;
    * lists of samples (gradients, norms, projections, losses, aux) are those of the
      whole batch, `[B, ...]`, B the sum of all `B_r`. Of `per_sample_grad` each rank
      gets B gradients.

    With `randomness="different"` what a loss draws for a sample follows from a seed,
    which is the first rank's, and from the sample's place in the whole batch. So no two
    samples share a mask, on two ranks neither, and any number of ranks draws the same.
    No graph repeats such numbers: a compiled function whose loss draws runs in eager
    mode.

    A private step is one release by one mechanism: the plan speaks of the whole batch,
    and each rank adds the same noise to the same sum, so that its state stays that of
    the others. Take batches from `local_batches(plan.sampler(state), mesh)`.

    A `train_step` with a loss of one sample takes the mean over all of them. Where it
    has the loss of a batch, that is taken for a mean over it: parts must be of one
    size, buffers must not change, and aux is that of this rank's part.

    What fails on one rank raises on all: there its own error, on the others a
    `RankError` that quotes it. Ranks that call different functions, or whose states,
    plans or keys differ, raise too. Compiled functions run their graphs on each rank,
    with collectives between them, and the optimizer by replay, so that no rank rounds
    otherwise; `batch_sizes` are those of whole batches, of which each rank takes its
    share. Results are constants: to differentiate them again raises, and so does a call
    within a transform of `torch.func`.

    Cost: two or three small exchanges of notes, one reduction of all sums, one exchange
    for each list. On a ring a rank sends `2 (W - 1) / W` times the bytes of the sums.

    Raises:
        TypeError: `transform` is none of these, or `mesh` is no mesh.
        ValueError: the mesh has no axis `data`.
        RankError: when called, another rank has failed, or does something else.

    Example:
        >>> import vgrad
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> loss = lambda params, buffers, x: (params["w"] * x).sum()
        >>> clipped = vgrad.clipped_grad(loss, max_norm=1.0)
        >>> def on_each_rank(x):
        ...     mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        ...     return data_parallel(clipped, mesh)({"w": torch.ones(2)}, {}, x)
    """
    return _of_all(transform, Ranks.of("data_parallel", mesh, data))


def _of_all(transform: Any, ranks: Ranks) -> Any:
    """Return a transform or a step of all ranks."""
    step = transform
    if isinstance(transform, CompiledStep):
        step = replace(transform.plain, run=_alike_on_all(transform.plain.run))
    if isinstance(step, PrivateStep):
        step = replace(step, clipped=_parallel(step.clipped, ranks))
    if isinstance(step, TrainStep) and isinstance(step.gradients, OfSamples):
        weighted = _parallel(step.gradients.weighted, ranks)
        step = replace(step, gradients=OfSamples(weighted))
    if isinstance(step, PrivateStep | TrainStep):
        return parallel_step(step, ranks)
    if isinstance(transform, Transform | CompiledTransform):
        return _parallel(transform, ranks)
    raise TypeError(
        f"data_parallel(transform): expected what a per-sample transform, train_step "
        f"or private_step returns, or vgrad.compile makes of one, got a "
        f"{type(transform).__name__}."
    )


def _parallel(
    transform: Transform | CompiledTransform, ranks: Ranks
) -> ParallelTransform:
    """Return a transform of all ranks."""
    if isinstance(plain_of(transform), GramFn):
        raise TypeError(
            "data_parallel(per_sample_gram(loss)): expected a sum or a list over "
            "samples, got products of pairs, whose samples may be on two ranks. Take "
            "per_sample_projection(loss): inner products of its rows estimate them."
        )
    return ParallelTransform(transform, ranks)


def _alike_on_all(captures: Captures) -> Callable[..., Any]:
    """Run gradients by these captures, and the optimizer with the bits of eager mode.

    Compiled code may be other code on another rank, or missing there.
    """
    replayed = Captures("replay", "eager", verify=True)

    def run(function: Callable, *arguments: Any) -> Any:
        chosen = replayed if function is optim.step else captures
        return chosen(function, *arguments)

    return run
