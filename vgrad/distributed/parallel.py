"""Per-sample transforms and steps on batches whose samples are cut among ranks.

W ranks, each with its own part of a batch, which may be empty. B samples altogether.
"""

import copy
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from vgrad import batches, files, optim
from vgrad.compiled import Captures
from vgrad.distributed.options import (
    at_powers_of_two,
    check_loss,
    check_optimizer,
    of_transform,
    options_of,
)
from vgrad.distributed.sharding import RankCall, sharded_call
from vgrad.ensemble.execution import run_eager
from vgrad.generators import Tag, sample_keys
from vgrad.persample.engine import (
    LOCAL,
    Call,
    Inputs,
    Reducer,
    Transform,
    constant,
    eager,
)
from vgrad.persample.gram import Products
from vgrad.ranks import RankError, Ranks, Summing, layout
from vgrad.torch_private import modes
from vgrad.training import saved
from vgrad.training.state import TrainState, check_state
from vgrad.training.steps import (
    Gradients,
    StepReducer,
    TrainingStep,
    mean_gradients,
)
from vgrad.tree import map_tensors, map_values, tensors, wide
from vgrad.typing import Arguments, Found, Params, Same, T, Tree


def data_parallel(
    transform: Callable[Arguments, Found], mesh: DeviceMesh, *, data: str = "dp"
) -> Same[Arguments, Found]:
    """Make a transform or a step one of all ranks; the result is called as it is.

    `transform` is the result of a per-sample transform (`clipped_grad(loss, ...)` and
    the others but `per_sample_gram`), of `private_step` or `train_step`. It may be
    compiled by `vgrad.compile`, before or after. The ranks are along the axis `data`
    of the mesh.
    Each calls the result with the same parameters, buffers or state, and with its own
    part of a batch: `[B_r, ...]`, of any size or empty. All of them get the result of
    one process for the parts put together in the order of ranks:

    * sums over samples (clipped and weighted sums, moments, counts) are reduced once,
      in float32 or wider, to the same bits on all ranks;
    * lists of samples (gradients, norms, projections, losses, aux) are of the whole
      batch, `[B, ...]`, B the sum of all `B_r`. Of `per_sample_grad` each rank gets B
      gradients.

    With `randomness="different"` the random numbers of a sample follow from a seed,
    drawn by the first rank, and from the sample's place in the whole batch: any number
    of ranks draws the same, in a private step as one process does.

    A private step is one release by one mechanism: the plan covers the whole batch, and
    each rank adds the same noise to the same sum, so that all states stay the same.
    Take batches from `local_batches(plan.sampler(state), mesh)`.

    A `train_step` with a loss of one sample takes the mean over all of them. The loss
    of a batch is taken for a mean over it: parts must be of one size, buffers must not
    change, and aux is of this rank's part.

    An error on one rank raises on all: there its own error, on the others a `RankError`
    that quotes it. Ranks that call different functions, or whose states, plans, keys or
    options differ, raise too. So do ranks whose losses differ on one sample that is
    made from a seed, or whose optimizers differ on gradients from a seed: both are
    called on them at the calls 1, 2, 4, 8, ..., the loss unless parameters are sharded.
    Private training raises where the samples of ranks need other strategies.

    Compiled functions run their graphs on each rank, with collectives between them, and
    the optimizer by replay, so that no rank rounds otherwise; `batch_sizes` are of
    whole batches, of which each rank takes its share.
    Results are constants: to differentiate them again raises, and so does a call within
    a transform of `torch.func`.

    Cost: two or three small exchanges of notes, one reduction of all sums, one exchange
    for each list. On a ring a rank sends `2 (W - 1) / W` times the bytes of the sums.

    Raises:
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
    ranks = Ranks.of("data_parallel", mesh, data)
    step: Any = transform
    if isinstance(step, TrainingStep) and step.source.kind is TrainState:
        along = mesh if mesh.ndim == 1 else mesh[data]
        reduce, source = _AveragedOverRanks(step, ranks, along), step.source
        if source.transform is not None:
            sums = _AcrossRanks(source.transform, ranks)
            source = replace(source, transform=replace(source.transform, reduce=sums))
        execute = reduce.execution(step.execute)
        parallel: Any = replace(step, source=source, execute=execute, reduce=reduce)
    elif isinstance(step, Transform):
        parallel = replace(step, reduce=_AcrossRanks(step, ranks))
    else:
        raise TypeError(
            f"data_parallel(transform): expected the result of a per-sample transform, "
            f"train_step or private_step, or of vgrad.compile for one, got a "
            f"{type(transform).__name__}."
        )
    return parallel


def replicated(tree: T, mesh: DeviceMesh, *, data: str = "dp") -> T:
    """Return a tree of tensors as the first rank along an axis of a mesh has it.

    A run starts from the same state on all ranks, its secret key included:
    `replicated(TrainState.create(tx, params, buffers), mesh)`. The key is drawn once,
    by the first rank, and reaches the others through the process group alone. The
    tensors are copies that require no grad.

    Raises:
        RankError: names, shapes or dtypes are not the same on all ranks.

    Example:
        >>> from vgrad import optim
        >>> def on_each_rank(mesh, params):
        ...     state = TrainState.create(optim.sgd(0.1), params, {})
        ...     return replicated(state, mesh)
    """
    ranks = Ranks.of("replicated", mesh, data)
    named = {str(number): tensor for number, tensor in enumerate(tensors(tree))}
    ranks.check_same("replicated(tree)", layout=layout(named))
    return map_tensors(ranks.of_first, tree)


@contextmanager
def single_process_mesh(
    *axes: str, device: str | torch.device = "cpu"
) -> Iterator[DeviceMesh]:
    """Make a mesh of this process alone, whose process group ends with the block.

    Code for many ranks runs here too, in a notebook or under a debugger, with the same
    results.

    Raises:
        ValueError: this process is in a process group already.

    Example:
        >>> with single_process_mesh("dp", "members") as mesh:
        ...     mesh.size()
        1
    """
    device = torch.device(device)
    backend = distributed.get_default_backend_for_device(device)
    store = distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        sizes = (1,) * len(axes)
        yield init_device_mesh(device.type, sizes, mesh_dim_names=axes)
    finally:
        distributed.destroy_process_group()


# Steps.


class _SameOnAll:
    """Runs gradients by captures, and the optimizer with the bits of eager mode."""

    def __init__(self, captures: Captures) -> None:
        # Compiled code may be other code on another rank, or missing there.
        self._replayed = Captures("replay", "eager", verify=True)
        self._captures = captures
        self.reports, self.explanation = captures.reports, captures.explanation

    def clear(self) -> None:
        """Forget all captures."""
        self._replayed.clear()
        self._captures.clear()

    def __copy__(self) -> "_SameOnAll":
        return _SameOnAll(copy.copy(self._captures))

    def __call__(self, function: Callable, *arguments: Any) -> Any:
        """Run a function of tensors."""
        captures = self._replayed if function is optim.step else self._captures
        return captures(function, *arguments)


class _AveragedOverRanks(StepReducer):
    """A step of all ranks, each with its part of a batch."""

    def __init__(self, step: TrainingStep, ranks: Ranks, mesh: DeviceMesh) -> None:
        self._ranks, self._mesh = ranks, mesh
        self._expected: tuple[int, str] | None = None
        self._probes = at_powers_of_two()
        self._options = options_of(
            loss=getattr(step.source, "loss", None),
            donate=step.donate,
            has_aux=step.has_aux,
            loss_scale=step.first_scale,
        )

    @contextmanager
    def together(
        self, step: TrainingStep, state: Any, batch: tuple
    ) -> Iterator[tuple[TrainingStep, tuple[Tag, ...]]]:
        """Check that all ranks take the same step."""
        label, plan = f"data_parallel({step.name})", getattr(step.source, "plan", None)
        with self._ranks.together(label) as facts:
            facts.own["probe"] = probe = next(self._probes)
            check_state(label, state, TrainState)
            facts.own["samples"] = batches.read(step.name, batch).size
            number, key = int(state.step), _digest([state.key])
            facts.same |= {"step": number, "key": key, "options": self._options}
            facts.same |= {"plan": plan and repr(asdict(plan)), "state": None}
            if probe or self._expected != (number, key):  # where the last step ended
                facts.same["state"] = _digest(
                    x for x in tensors(state) if not isinstance(x, DTensor)
                )
        self._expected = None
        due = any(note["probe"] for note in facts.notes)
        if due:
            check_optimizer(self._ranks, label, step.tx, state.params, state.step)
        sizes = [note["samples"] for note in facts.notes]
        limit = 0 if plan is None else plan.largest_batch or plan.dataset_size
        if plan is not None and sum(sizes) > limit:
            raise ValueError(
                f"data_parallel(private_step(plan))(state, *batch): expected at most "
                f"the {limit} samples that a batch of the plan can have on all ranks "
                f"together, got {sizes}. Give each rank its part of a batch, as "
                f"local_batches(plan.sampler(state), mesh) does."
            )
        tags: tuple[Tag, ...] = ()
        if step.source.transform is None:
            _check_means(sizes, state)
            if due:
                loss = getattr(step.source, "loss", None)
                arguments = loss, state.params, state.buffers, batch
                check_loss(self._ranks, label, *arguments, rows=(2,))
            if self._ranks.rank:  # whose samples are others
                tags = "rank", self._ranks.rank
        elif plan is not None:
            start = sum(sizes[: self._ranks.rank])
            step = replace(step, source=replace(step.source, start=start))
        yield step, tags
        self._expected = number + 1, key

    def of(self, step: TrainingStep) -> "_AveragedOverRanks":
        """Return the ranks of another step."""
        return _AveragedOverRanks(step, self._ranks, self._mesh)

    def agreed(self, key: Tensor) -> Tensor:
        """Return the key of the first rank."""
        return self._ranks.of_first(key.to(self._ranks.device)).to(key.device)

    def share(self, batch: Tree) -> Tree:
        """Return the samples of this rank."""
        rows = slice(self._ranks.rank, None, self._ranks.size)
        return map_tensors(lambda x: x[rows], batch)

    def reloaded(self, state: Any) -> Any:
        """Save a state of all ranks, and load it."""
        with TemporaryDirectory() as path:
            folders = self._ranks.exchanged("audit, folder", json.dumps(path))
            folder = Path(folders[0], "state")
            saved.save(folder, state, self._mesh)
            state = saved.load(folder, state, self._mesh)
            self._ranks.agree("audit, loaded")  # before the first rank removes it
        return state

    def execution(self, captures: Any) -> Any:
        """Return how a compiled step runs on all ranks."""
        return captures if captures is run_eager else _SameOnAll(captures)

    def reduced(
        self, step: TrainingStep, compute: Callable[[], Gradients], state: Any
    ) -> Gradients:
        """Average gradients and losses of batches; sums over samples are of all."""
        if step.source.transform is not None:
            return compute()
        ranks, label = self._ranks, "data_parallel(train_step), gradients"
        with ranks.together(label):
            result, old = compute(), state.buffers
            pairs = ((name, old[name], result.buffers[name]) for name in old)
            changed = [
                name for name, one, other in pairs if not torch.equal(one, other)
            ]
            if changed:
                raise ValueError(
                    f"data_parallel(train_step(loss)): expected a loss that leaves "
                    f"buffers as they are, got one that changes {changed}. Each rank "
                    f"would have its own: replace_batch_norm(model) puts layers "
                    f"without them in place."
                )
        grads = {f"/{name}": x.to(wide(x.dtype)) for name, x in result.grads.items()}
        sums = ranks.summed(label, {**grads, "loss": result.loss})
        means = map_values(lambda total: total / ranks.size, sums)
        grads = {n: means[f"/{n}"].to(x.dtype) for n, x in result.grads.items()}
        return mean_gradients(state, grads, means["loss"], result.buffers, result.aux)


def _digest(tensors: Iterable[Tensor]) -> str:
    """Hash tensors that all ranks have to hold alike."""
    return files.digest({str(number): tensor for number, tensor in enumerate(tensors)})


def _check_means(sizes: list[int], state: TrainState) -> None:
    """Refuse parts of unlike size, whose mean losses do not count alike."""
    if any(isinstance(value, DTensor) for value in state.params.values()):
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


# Transforms.


class _AcrossRanks:
    """The reduction of a per-sample transform over ranks."""

    def __init__(self, transform: Transform, ranks: Ranks) -> None:
        if isinstance(transform.quantity, Products):
            raise TypeError(
                "data_parallel(per_sample_gram(loss)): expected a sum or a list over "
                "samples, got products of pairs, whose samples may be on two ranks. "
                "Take per_sample_projection(loss): inner products of its rows estimate "
                "them."
            )
        self._ranks = ranks
        self._options = of_transform(transform)
        self._probes = at_powers_of_two()

    def of(self, transform: Transform) -> "_AcrossRanks":
        """Return the reduction of another transform."""
        return _AcrossRanks(transform, self._ranks)

    def __call__(self, transform: Transform, inputs: Inputs) -> Any:
        """Compute the quantity of the whole batch, of which this rank has a part."""
        ranks, options, mask = self._ranks, transform.options, inputs.mask
        function = options.function
        call = _Summed(f"data_parallel({function})", ranks)
        if modes.inside_transform():
            raise RuntimeError(
                f"{call.label}: expected a call outside of torch.func's transforms, "
                f"which do not reach other ranks. Differentiate or map within the "
                f"loss, or transform the function of one process."
            )
        with call.together():
            inputs = transform.prepared(inputs)
            read = batches.read(function, inputs.batch)
            if mask is not None:
                batches.check_mask(function, mask, read.size)
            counted = read.size if mask is None else int(mask.sum())
            draws = options.randomness != "error" and inputs.keys is None
            seed = int(torch.randint(2**62, ())) if draws else None
            facts = {"counted": counted, "size": read.size, "seed": seed}
            facts["probe"] = next(self._probes)
            notes = call.exchange("batch", facts, options=self._options)
            if any(note["probe"] for note in notes):
                with call.same_errors():
                    check_loss(ranks, call.label, options.loss, *inputs[:3])
        counts = [note["counted"] for note in notes]
        sizes = [note["size"] for note in notes]
        seed, size = notes[0]["seed"], read.size
        if options.has_aux and not read.size and any(sizes):
            # Shapes and dtypes of aux are known from a sample alone.
            inputs = inputs.padded(0, 1)
            size = 1
        with call.together(), torch.no_grad():
            if draws:
                same = options.randomness == "same"
                start = 0 if same else sum(sizes[: ranks.rank])
                inputs = inputs._replace(keys=sample_keys(seed, start, size))
            result = self._run(transform, call, inputs)
            result = self._joined(transform, call, result, counts, sizes)
        if torch.is_grad_enabled():
            tensors = [*inputs.params.values(), *read.tensors]
            result = constant(call.label, result, tensors)
        return result

    def _run(self, transform: Transform, call: "_Summed", inputs: Inputs) -> Any:
        """Return sums over all ranks, and lists of this rank's samples."""
        if not any(isinstance(value, DTensor) for value in inputs.params.values()):
            return transform.execute(transform, inputs, call)
        if transform.execute is not eager:
            raise TypeError(
                f"{call.label}(params): expected ordinary tensors for a compiled "
                f"function, got DTensors, which are gathered while it runs. Leave "
                f"vgrad.compile out, or pass gather(params, mesh)."
            )
        call.exchange("shards")
        with call.same_errors():
            return sharded_call(transform, self._ranks, inputs)

    def _joined(
        self,
        transform: Transform,
        call: "_Summed",
        result: Any,
        counts: list[int],
        sizes: list[int],
    ) -> Any:
        """Join the lists of samples in a result over the ranks."""
        ranks, lists = self._ranks, list[Tensor]()
        transform.mapped(lambda leaf: lists.append(leaf) or leaf, result)
        kinds = [[str(leaf.dtype)[6:], *leaf.shape[1:]] for leaf in lists]
        fallbacks = transform.options.fallbacks
        note = json.dumps([fallbacks.route, kinds])
        with call.same_errors():
            notes = ranks.exchanged(f"{call.label}, lists", note)
            # Without samples a rank does not have the dtypes of the others.
            filled = [rank for rank, size in enumerate(sizes) if size] or [0]
            kinds = notes[filled[0]][1]
            if any(notes[rank][1] != kinds for rank in filled):
                raise RankError(
                    f"{call.label}: expected lists of samples of the same dtypes and "
                    f"trailing shapes on all ranks, got others. Pad samples to the "
                    f"same shape on every rank."
                )
            routes = [notes[rank][0] for rank in filled]
            if len({*routes}) > 1:
                raise RankError(
                    f"{call.label}: expected private training by one strategy on all "
                    f"ranks, got {routes} on ranks {filled}, since their samples "
                    f'differ. Pass strategy="loop", or another one that runs the loss.'
                )
            fallbacks.route = routes[0]
            remaining = iter(kinds)

            def joined(leaf: Tensor) -> Tensor:
                dtype, *shape = next(remaining)
                if not counts[ranks.rank]:
                    leaf = leaf.new_empty((0, *shape), dtype=getattr(torch, dtype))
                return ranks.joined(leaf, counts)

            return transform.mapped(joined, result)


class _Summed(RankCall):
    """A call whose sums travel to the other ranks, one by one where that is safe."""

    def __init__(self, label: str, ranks: Ranks) -> None:
        super().__init__(label, ranks)
        self._sums: Summing | None = None
        self._error: Exception | None = None

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.ranks.size

    def of(self, call: Call) -> Call:
        """Return the call of this rank, whose sums are sent off as they are formed."""
        # Random numbers may have to be drawn again, and then sums differ.
        if self.ranks.size == 1 or call.randomness != "error":
            return call
        return replace(call, reducer=_AsFormed(self.give, call.params))

    def give(self, like: Params, name: str, value: Tensor) -> None:
        """Send one of some sums off; an error waits until they are needed."""
        if self._error is None:
            try:
                self._begin(like).give(name, value)
            except Exception as error:
                self._error = error

    def summed(self, tensors: Params) -> Params:
        """Sum over the ranks."""
        if self._error is not None:
            raise self._error
        if self.ranks.size == 1:
            return dict(tensors)
        sums, self._sums = self._begin(tensors), None
        with self.same_errors():
            return sums.finished(tensors)

    def _begin(self, like: Params) -> Summing:
        if self._sums is None:
            with self.same_errors():
                self._sums = Summing(self.ranks, self.label, like)
        return self._sums

    def abandon(self) -> None:
        """Send zeros for the sums that other ranks wait for."""
        if self._sums is not None:
            self._sums.given_up()


class _AsFormed(Reducer):
    """Sums of a whole batch, which go to the other ranks as soon as they are formed."""

    def __init__(
        self, give: Callable[[Params, str, Tensor], None], params: Params
    ) -> None:
        self._give = give
        self._like = {
            name: torch.empty_like(value, dtype=wide(value.dtype), device="meta")
            for name, value in params.items()
        }

    def reduced(self, name: str, value: Tensor) -> Tensor:
        """Send a sum off."""
        self._give(self._like, name, value.to(self._like[name].dtype))
        return value

    def of_part(self) -> Reducer:
        """Wait for all parts."""
        return LOCAL
