"""Per-sample transforms on batches whose samples are cut among ranks.

W ranks, each with its own part of a batch, which may be empty. B samples altogether.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from vgrad import batches
from vgrad.compiled import CompiledTransform
from vgrad.distributed.options import Options, of_transform
from vgrad.distributed.sharded import sharded_call
from vgrad.generators import RNG_LOCK, kept_random_state, sample_keys
from vgrad.persample.engine import LOCAL, Call, Evaluation, Reducer, Transform, constant
from vgrad.persample.grad import WeightedGradFn
from vgrad.precision.loss_scale import LossScale
from vgrad.ranks import RankError, Ranks, Summing
from vgrad.torch_private import modes
from vgrad.tree import map_tensors, wide
from vgrad.typing import Params


class ParallelTransform:
    """What `data_parallel` returns for a per-sample transform: the same function.

    It has the attributes of what it was made of.
    """

    def __init__(
        self,
        transform: Transform | CompiledTransform,
        ranks: Ranks,
        options: Options | None = None,
    ) -> None:
        self._transform = transform
        self._ranks = ranks
        self._options = options or Options(**of_transform(plain_of(transform)))
        self._takes_weights = isinstance(plain_of(transform), WeightedGradFn)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._transform, name)

    def with_loss_scale(self, loss_scale: LossScale | None) -> "ParallelTransform":
        """Return the same function with another loss scale."""
        scaled = self.__getattr__("with_loss_scale")(loss_scale)
        return ParallelTransform(scaled, self._ranks, self._options)

    def __call__(self, *arguments: Any, mask: Tensor | None = None) -> Any:
        """Compute the quantity of the whole batch, of which this rank has a part."""
        options = plain_of(self._transform).options
        function, given = options.function, 3 if self._takes_weights else 2
        meeting = _Meeting(self._ranks, f"data_parallel({function})")
        draws = options.randomness != "error"
        if modes.inside_transform():
            raise RuntimeError(
                f"{meeting.what}: expected a call outside of torch.func's transforms, "
                f"which do not reach other ranks. Differentiate or map within the "
                f"loss, or transform what one process computes."
            )
        with meeting.until():
            read = batches.read(function, arguments[given:])
            if mask is not None:
                batches.check_mask(function, mask, read.size)
            counted = read.size if mask is None else int(mask.sum())
            seed = int(torch.randint(2**62, ())) if draws else None
        own = {"samples": counted, "given": read.size, "seed": seed}
        notes = meeting.told(own, options=self._options)
        sizes = [note["samples"] for note in notes]
        held = [note["given"] for note in notes]
        seed, size = notes[0]["seed"], read.size
        if options.has_aux and not read.size and any(held):
            # What aux looks like is known from a sample alone.
            first = given - 2  # weights, if any, are of samples too
            fixed, samples = arguments[first:given], arguments[given:]
            weights, batch = map_tensors(_one, (arguments[:first], samples))
            arguments = (*weights, *fixed, *batch)
            mask = torch.zeros(1, dtype=torch.bool, device=read.tensors[0].device)
            size = 1
        with meeting.until(), torch.no_grad():
            transform = self._transform
            if options.randomness == "different":
                start = sum(held[: self._ranks.rank])
                transform = transform.keyed(sample_keys(seed, start, size))
                seed = None
            with _seeded(seed, read.tensors):
                found = self._run(transform, meeting, arguments, mask)
        found = self._joined(meeting, found, sizes, held)
        if torch.is_grad_enabled():
            params = arguments[given - 2].values()
            found = constant(meeting.what, found, [*params, *read.tensors])
        return found

    def _run(
        self,
        transform: Transform | CompiledTransform,
        meeting: "_Meeting",
        arguments: tuple,
        mask: Tensor | None,
    ) -> Any:
        """Return sums over all ranks, and lists of this rank's samples."""
        *weights, params, buffers = arguments[: 3 if self._takes_weights else 2]
        if not any(isinstance(each, DTensor) for each in params.values()):
            run = transform.over(meeting.evaluation, self._ranks.size)
            return run(*arguments, mask=mask)
        batch = arguments[len(weights) + 2 :]
        if not isinstance(transform, Transform):
            raise TypeError(
                f"{meeting.what}(params): expected ordinary tensors for a compiled "
                f"function, got DTensors, which are gathered while it runs. Leave "
                f"vgrad.compile out, or pass gather(params, mesh)."
            )
        meeting.told()
        given = params, buffers, batch, mask, *weights
        return sharded_call(transform, self._ranks, *given)

    def _joined(
        self, meeting: "_Meeting", found: Any, sizes: list[int], given: list[int]
    ) -> Any:
        """Join the lists of samples in a result over the ranks."""
        ranks, mapped = self._ranks, plain_of(self._transform).mapped
        lists: list[Tensor] = []
        with meeting.until():
            mapped(lambda leaf: lists.append(leaf) or leaf, found)
            kinds = [(str(leaf.dtype)[6:], *leaf.shape[1:]) for leaf in lists]
            text = json.dumps(kinds).encode()
            digest = hashlib.blake2b(text, digest_size=16).hexdigest()
        notes = meeting.told({"kinds": digest, "length": len(text)})
        filled = [rank for rank, size in enumerate(given) if size] or [0]
        first = notes[filled[0]]
        if any(notes[rank]["kinds"] != first["kinds"] for rank in filled):
            raise RankError(
                f"{meeting.what}: expected lists of samples of the same dtypes and "
                f"trailing shapes on all ranks, got others. Pad samples to the same "
                f"shape on every rank."
            )
        if any(note["kinds"] != first["kinds"] for note in notes):
            # Without samples a rank does not know the dtypes that the others have.
            sent = torch.zeros(first["length"], dtype=torch.uint8)
            if ranks.rank == filled[0]:
                sent = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            sent = ranks.of_first(sent.to(ranks.device), filled[0])
            kinds = json.loads(bytes(sent.tolist()))
        known = iter(kinds)

        def joined(leaf: Tensor) -> Tensor:
            dtype, *shape = next(known)
            if not sizes[ranks.rank]:
                leaf = leaf.new_empty((0, *shape), dtype=getattr(torch, dtype))
            return ranks.joined(leaf, sizes)

        return mapped(joined, found)


class _Meeting:
    """One call of all ranks, which either come through together or raise together."""

    def __init__(self, ranks: Ranks, what: str) -> None:
        self.what = what
        self._ranks = ranks
        self._place = 0
        self._met = False
        self._begun: Summing | None = None
        self._failed: Exception | None = None

    @contextmanager
    def until(self) -> Iterator[None]:
        """Run a block before the ranks meet; tell them if it fails."""
        self._met = False
        try:
            yield
        except BaseException as error:
            if self._begun is not None:
                self._begun.given_up()
            if not self._met:
                self.failed(error)
            raise

    def told(
        self, own: Mapping[str, Any] | None = None, **same: Any
    ) -> list[dict[str, Any]]:
        """Meet, and refuse facts that are to be the same but differ."""
        self._met = True
        self._place += 1
        return self._ranks.check_same(f"{self.what}, {self._place}", own, **same)

    def failed(self, error: BaseException) -> None:
        """Meet, to say that this rank cannot go on."""
        self._met = True
        self._place += 1
        self._ranks.agree(f"{self.what}, {self._place}", error=error)

    def evaluation(self, call: Call) -> Evaluation:
        """Return the evaluation of a call in which all ranks take part."""
        # Random numbers may have to be drawn again, and then sums are others.
        if self._ranks.size > 1 and call.randomness == "error":
            call = replace(call, reducer=_AsFormed(self.give, call.params))
        return Evaluation(call, reduce=self.summed)

    def give(self, like: Params, name: str, value: Tensor) -> None:
        """Send one of some sums off, whose shapes and dtypes are these.

        An error waits until the sums are wanted.
        """
        if self._failed is None:
            try:
                self._begin(like).give(name, value)
            except Exception as error:
                self._failed = error

    def summed(self, tensors: Params) -> Params:
        """Sum over the ranks."""
        if self._failed is not None:
            raise self._failed
        if self._ranks.size == 1:
            return dict(tensors)
        begun = self._begin(tensors)
        self._begun, self._met = None, True
        found = begun.finished(tensors)
        self._met = False
        return found

    def _begin(self, like: Params) -> Summing:
        """Meet, if the ranks have not begun."""
        if self._begun is None:
            self._met = True
            self._begun = Summing(self._ranks, self.what, like)
            self._met = False  # what fails from here on is not known to the others
        return self._begun


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

    def settled(self, name: str, value: Tensor) -> Tensor:
        """Send a sum off."""
        self._give(self._like, name, value.to(self._like[name].dtype))
        return value

    def of_part(self) -> Reducer:
        """Wait for all parts."""
        return LOCAL


def plain_of(transform: Transform | CompiledTransform) -> Transform:
    """Return a transform as it runs in eager mode."""
    return transform if isinstance(transform, Transform) else transform.plain


def _one(empty: Tensor) -> Tensor:
    """Make one sample where there is none."""
    return empty.new_zeros((1, *empty.shape[1:]))


@contextmanager
def _seeded(seed: int | None, tensors: list[Tensor]) -> Iterator[None]:
    """Draw from a seed that all ranks know, if all samples draw the same."""
    if seed is None:
        yield
        return
    with RNG_LOCK, kept_random_state(tensors):
        torch.manual_seed(seed)
        yield
