"""Functions of batches, and the batches themselves, cut among ranks."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vgrad import batches, files, optim
from vgrad.compiled import Captures, CompiledStep, CompiledTransform
from vgrad.distributed.options import Options
from vgrad.distributed.parallel import ParallelTransform, plain_of
from vgrad.generators import torch_seed
from vgrad.persample.engine import Transform
from vgrad.persample.gram import GramFn
from vgrad.precision import all_finite
from vgrad.ranks import Ranks, layout
from vgrad.training.state import TrainState, check_state
from vgrad.training.steps import OfBatch, OfSamples, PrivateStep, TrainStep
from vgrad.tree import map_tensors, map_values, tensors, wide
from vgrad.typing import Arguments, Buffers, Found, Same, T, Tree


class ParallelStep:
    """What `data_parallel` returns for a step: `(state, *batch) -> (state, metrics)`.

    The batch is this rank's part; state and metrics are the same on all ranks.
    """

    def __init__(self, step: TrainStep | PrivateStep, ranks: Ranks) -> None:
        self._step = step
        self._ranks = ranks
        self._expected: tuple[int, str] | None = None
        self._options = _options(step)

    @property
    def plan(self) -> Any:
        """The plan of a private step."""
        return getattr(self._step, "plan", None)

    def __call__(self, state: Any, /, *batch: Tree) -> tuple[Any, Any]:
        """Take a step."""
        step = self._step
        name = "private_step" if isinstance(step, PrivateStep) else "train_step"
        what = f"data_parallel({name})"
        try:
            check_state(what, state, TrainState)
            size = batches.read(name, batch).size
        except BaseException as error:
            self._ranks.agree(what, error=error)
            raise
        taken, key = int(state.step), _digest([state.key])
        facts = {"step": taken, "key": key, "state": None, "options": self._options}
        if isinstance(step, PrivateStep):
            facts["plan"] = repr(step.plan)
        if self._expected != (taken, key):  # it is not where the last step ended
            held = [x for x in tensors(state) if not isinstance(x, DTensor)]
            facts["state"] = _digest(held)
        self._expected = None
        notes = self._ranks.check_same(what, {"samples": size}, **facts)
        sizes = [note["samples"] for note in notes]
        if isinstance(step, PrivateStep):
            _check_total(step, sizes)
        elif isinstance(step.gradients, OfBatch):
            _check_plain(sizes, state)
        found = step(state, *batch)
        self._expected = taken + 1, key
        return found


def parallel_step(step: TrainStep | PrivateStep, ranks: Ranks) -> ParallelStep:
    """Return a step of all ranks; sums over single samples are theirs already."""
    if isinstance(step, TrainStep) and isinstance(step.gradients, OfBatch):
        step = replace(step, reduce=partial(_averaged, ranks))
    return ParallelStep(step, ranks)


def replicated(tree: T, mesh: DeviceMesh, *, data: str = "dp") -> T:
    """Return a tree of tensors as the first rank along an axis of a mesh has it.

    A run starts from the same state on all ranks, its secret key included:
    `replicated(TrainState.create(tx, params, buffers), mesh)`. The key is drawn once,
    by the first rank, and reaches the others through the process group alone. The
    tensors are copies that require no grad.

    Raises:
        TypeError, ValueError: as `data_parallel`.
        RankError: names, shapes or dtypes are not the same on all ranks.

    Example:
        >>> from vgrad import optim
        >>> def on_each_rank(mesh, params):
        ...     state = TrainState.create(optim.sgd(0.1), params, {})
        ...     return replicated(state, mesh)
    """
    ranks = Ranks.of("replicated", mesh, data)
    what, found = "replicated(tree)", tensors(tree)
    named = {str(number): each for number, each in enumerate(found)}
    ranks.check_same(what, layout=layout(named))
    return map_tensors(ranks.of_first, tree)


def _options(step: TrainStep | PrivateStep) -> Options:
    """Read the options of a step; a transform within it compares its own."""
    parts = {"tx": step.tx, "donate": step.donate, "has_aux": step.has_aux}
    parts["loss_scale"] = step.scale
    own = step.gradients if isinstance(step, TrainStep) else None
    return Options(own.loss if isinstance(own, OfBatch) else None, **parts)


def _averaged(ranks: Ranks, compute: Callable[[], tuple], state: TrainState) -> tuple:
    """Compute gradients and loss on every rank, and return their means."""
    what = "data_parallel(train_step), gradients"
    with ranks.together(what):
        # The step has seeded all ranks alike, whose samples differ.
        place = ("rank", ranks.rank) if ranks.rank else ()
        torch.manual_seed(torch_seed(state.key, "loss", int(state.step), *place))
        grads, value, aux, buffers, _ = compute()
        _check_buffers(state.buffers, buffers)
    given = {f"/{name}": each.to(wide(each.dtype)) for name, each in grads.items()}
    found = ranks.summed(what, {**given, "loss": value})
    means = map_values(lambda total: total / ranks.size, found)
    grads = {name: means[f"/{name}"].to(each.dtype) for name, each in grads.items()}
    return grads, means["loss"], aux, buffers, all_finite(grads)


def _check_total(step: PrivateStep, sizes: list[int]) -> None:
    """Refuse more samples than the plan's data set has, on all ranks."""
    if sum(sizes) > step.plan.dataset_size:
        raise ValueError(
            f"data_parallel(private_step(plan))(state, *batch): expected at most the "
            f"{step.plan.dataset_size} samples of the plan's data set on all ranks "
            f"together, got {sizes}. Give each rank its part of a batch, as "
            f"local_batches(plan.sampler(state), mesh) does."
        )


def _check_plain(sizes: list[int], state: TrainState) -> None:
    """Refuse parts of unlike size, whose mean losses do not count alike."""
    if any(isinstance(each, DTensor) for each in state.params.values()):
        raise TypeError(
            "data_parallel(train_step(loss))(state): expected ordinary tensors in "
            "state.params, got DTensors, which the loss of a batch cannot gather as it "
            "goes. Take sample_loss or gather(state.params, mesh)."
        )
    if len(set(sizes)) > 1:
        raise ValueError(
            f"data_parallel(train_step(loss))(state, *batch): expected as many samples "
            f"on every rank, since the loss of a batch is taken for a mean over it, "
            f"got {sizes}. A loss of one sample, from sample_loss, takes any sizes."
        )


def _check_buffers(old: Buffers, new: Buffers) -> None:
    """Refuse statistics of a batch, of which each rank sees a part."""
    changed = [name for name in old if not torch.equal(old[name], new[name])]
    if changed:
        raise ValueError(
            f"data_parallel(train_step(loss)): expected a loss that leaves buffers as "
            f"they are, got one that changes {changed}. Each rank would have its own: "
            f"replace_batch_norm(model) puts layers without them in place."
        )


def _digest(tensors: Iterable[Tensor]) -> str:
    """Tell tensors apart, on ranks that hold the same ones."""
    return files.digest({str(number): each for number, each in enumerate(tensors)})


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
