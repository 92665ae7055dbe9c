"""Random numbers of a loss: drawn by keys of samples, or from torch's generators.

With keys, the numbers that a random op draws for a sample are a function of the
sample's key, of how many random ops ran before in the loss, and of each number's place
in the sample's tensor. So a sample has the same numbers in any chunk, part, strategy or
process. The ops of dropout, and ops that draw uniform and normal numbers, take them
from a hash for all samples at once, in graphs too, of which the keys are an input. For
the others torch's generators are seeded sample by sample.

Without keys, a chunk that falls into parts runs again from the start, part by part. To
draw again would condition the numbers on the branch that was taken. So a chunk that
reads a value after it drew gets keys, whether or not the samples have the same value,
and later chunks of such a loss have keys from the start. Where keys cannot stand for
the numbers (cuDNN's dropout, draws in a backward pass), samples run one after another.

A sample may be a member of an ensemble as well.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from vgrad.conditions import Unrepeatable
from vgrad.generators import (
    RandomState,
    drawn_since,
    fold_in,
    random_bits,
    random_state,
    sample_keys,
    set_random_state,
    unit,
)
from vgrad.loss.grad_flags import among
from vgrad.loss.values import Partition, SplitBatch, where
from vgrad.torch_private.kernels import default_generator
from vgrad.torch_private.modes import exit_all
from vgrad.torch_private.tensors import (
    SHOWN,
    arguments_written,
    may_draw,
    named,
    op_name,
    shown_results,
    writes,
)
from vgrad.torch_private.tracing import DispatchMode
from vgrad.tree import tree_map_only


class Undrawn(RuntimeError):
    """Random numbers cannot be repeated."""

    def __init__(self, got: str) -> None:
        super().__init__(
            f"random numbers: expected some that a part of the samples can see again, "
            f'since their branches differ, got {got}. Use strategy="loop".'
        )


@dataclass(eq=False)
class Draws:
    """The state of the random numbers of samples that run together."""

    values_read: bool = False
    used_generator: bool = False  # whether numbers came from a `torch.Generator`, too
    keys: Tensor | None = None  # from which the numbers follow, int64 [B]
    place: int = 0  # how many random ops of the loss ran before, where there are keys
    axis: int | None = 0  # of samples in the numbers of an op; None if it is unclear
    shared: bool = False  # whether all samples draw the same, where there are keys
    drew: bool = False  # whether there were random ops, where there are keys
    idle: bool = False  # whether random ops are left alone

    def of(self, rows: slice | Tensor) -> "Draws":
        """Return the state of some of the samples."""
        if self.keys is not None:
            return Draws(keys=self.keys[rows], shared=self.shared)
        return Draws()

    def watched(
        self, *, unbatched: bool, captured: bool, repeated: bool = False
    ) -> AbstractContextManager:
        """Draw by keys, if there are some, while a loss runs once.

        `unbatched` is a sample without a batch dimension. A part of a loss that is
        `repeated` goes on at its place.
        """
        if self.keys is None or self.idle:
            return nullcontext()
        self.place = self.place if repeated else 0
        return Keyed(self, single=unbatched or self.shared, captured=captured)

    @contextmanager
    def _having(self, **state: Any) -> Iterator[None]:
        before = {name: getattr(self, name) for name in state}
        self.__dict__.update(state)
        try:
            yield
        finally:
            self.__dict__.update(before)

    def samples_at(self, axis: int | None) -> AbstractContextManager:
        """Set the axis of samples of random ops; None holds in blocks inside, too."""
        return self._having(axis=None if self.axis is None else axis)

    def restorer(self) -> Callable[[], AbstractContextManager]:
        """Return a function that makes a block with the place of now, for a re-run."""
        return partial(self._having, place=self.place)


class _Seen(DispatchMode):
    drew = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        self.drew |= may_draw(func)
        return func(*args, **kwargs or {})


def drew(
    before: RandomState, tensors: Iterable[Tensor], rerun: Callable[[], Any]
) -> bool:
    """Return whether a run drew, by another one, where other threads may have drawn."""
    if not drawn_since(before, tensors):
        return False
    with sdpa_kernel(SDPBackend.MATH), _Seen() as seen:  # other kernels may draw
        rerun()
    return seen.drew


# By keys of samples.


def fresh_keys(size: int, device: Any) -> Tensor:
    """Return keys of samples, int64 `[size]`, from a number of torch's generator."""
    return sample_keys(int(torch.randint(2**62, ())), 0, size, device)


class Unkeyed(RuntimeError):
    """Random numbers cannot follow from keys of samples."""

    def __init__(self, got: str) -> None:
        super().__init__(
            f"random numbers: expected draws from torch's default generators in the "
            f"forward pass, for which keys of samples can stand, got {got}."
        )


def check_drawn(
    before: RandomState, tensors: Iterable[Tensor], rerun: Callable[[], Any]
) -> None:
    """Refuse numbers drawn elsewhere than in the loss, and put the generators back."""
    tensors = [*tensors]
    if drew(before, tensors, rerun):
        set_random_state(before)
        raise Unkeyed("some that a backward pass draws")


class Keyed(DispatchMode):
    """Runs the random ops of a loss, of all samples at once or of a `single` one."""

    def __init__(self, at: "Draws", *, single: bool, captured: bool) -> None:
        super().__init__()
        assert at.keys is not None
        self._at = at
        self._captured = captured  # in a graph, which takes the keys
        with exit_all():  # whose tensors are none of theirs
            self._keys = at.keys[:1] if single else at.keys
        self._size = len(self._keys)
        self._single = single
        self._plain: set[Any] = set()  # ops that draw nothing
        self._before: RandomState
        self._kernels: AbstractContextManager = nullcontext()

    def __enter__(self) -> "Keyed":
        self._before = random_state(())
        if torch.accelerator.is_available():
            self._kernels = sdpa_kernel(SDPBackend.MATH)
        self._kernels.__enter__()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        with ExitStack() as stack:
            stack.push(self._kernels)
            super().__exit__(*raised)
            if not self._captured:  # where nothing is drawn
                set_random_state(self._before)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func in self._plain or not may_draw(func):
            self._plain.add(func)  # the check takes longer than most ops
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        name, arguments = op_name(func), named(func, args, kwargs)
        idle = arguments.get("dropout_p") == 0  # of attention
        if name == "native_dropout":
            idle = arguments["train"] is False or not arguments["p"]
        if idle:
            return func(*args, **kwargs)
        if arguments.get("generator") is not None:
            self._at.drew = True
            raise Unkeyed(
                f"draws from a torch.Generator of the loss's own in {name}. Leave its "
                f"generator out"
            )
        if arguments.get("dropout_state") is not None:
            raise Unkeyed(
                f"draws that cuDNN keeps to itself in {name}. Give the net dropout=0, "
                f"and put a Dropout between its layers"
            )
        if name not in SHOWN:
            return self._hidden(name, func, args, kwargs)
        self._at.drew = True
        if not self._single and (name in _ALONE or self._at.axis is None):
            raise self._apart()
        result = self._bernoulli(name, func, arguments)
        if result is None:
            result = self._others(name, func, args, kwargs)
        self._at.place += 1
        return result

    def _streams(self, device: torch.device) -> Tensor:
        return fold_in(self._keys, self._at.place).to(device)

    def _samples(self, tensor: Tensor) -> Tensor:
        """View a tensor with the samples in an axis of their own, the first."""
        if self._single:
            return tensor.unsqueeze(0)
        axis = self._at.axis
        assert axis is not None
        if axis >= tensor.ndim or tensor.shape[axis] % self._size:
            raise self._apart()
        length = tensor.shape[axis] // self._size
        return tensor.unflatten(axis, (self._size, length)).movedim(axis, 0)

    def _words(self, like: Tensor) -> Tensor:
        """Return a number of 64 bits for each entry of `[B, ...]`."""
        count = like[0].numel()
        return random_bits(self._streams(like.device), count).view(like.shape)

    def _bernoulli(self, name: str, func: Any, arguments: dict[str, Any]) -> Any:
        """Draw booleans of one probability, as for dropout; None for other ops."""
        if name == "native_dropout":
            keep = 1 - arguments["p"]
            target = torch.empty_like(arguments["input"], dtype=torch.bool)
        elif name == "bernoulli" and isinstance(arguments.get("p"), float | int):
            keep, target = arguments["p"], arguments["self"]
            if "out" in arguments or not 0 <= keep <= 1:
                return None  # torch raises, or writes the result
            target = target if writes(func) else torch.empty_like(target)
        else:
            return None
        samples = self._samples(target)
        limit = round(keep * 2**32)
        if limit == 2**32:
            target.fill_(1)
        else:  # two numbers of each hash
            count = samples[0].numel()
            halves = random_bits(self._streams(target.device), (count + 1) // 2)
            drawn = halves.view(torch.int32)[:, :count] < limit - 2**31
            samples.copy_(drawn.view(samples.shape))
        if name == "bernoulli":
            return target
        mask = target.to(arguments["input"].dtype)
        if keep:
            mask /= keep
        return arguments["input"] * mask, target

    def _others(self, name: str, func: Any, args: tuple, kwargs: dict) -> Any:
        """Let torch make the result, and write other numbers over its own."""
        sources: Any = args, kwargs
        if writes(func):  # it may read the tensor that it writes
            copied = {id(tensor): tensor.clone() for tensor in among(args, kwargs)}
            sources = tree_map_only(Tensor, lambda x: copied[id(x)], sources)
        if self._captured:  # a graph would draw numbers only to drop them
            output = _undrawn(func, args, kwargs)
        else:
            self._keep(args, kwargs)
            output = func(*args, **kwargs)
        results = shown_results(func, args, kwargs, output)
        if name in _UNIFORM | _NORMAL and results[0].is_floating_point():
            self._by_hash(name, results[0], named(func, *sources))
        elif name == "bernoulli":
            arguments = named(func, *sources)
            chance = arguments.get("p")
            chance = arguments["self"] if chance is None else chance
            samples = self._samples(results[0])
            chance = self._expanded(chance, results[0])
            samples.copy_(unit(self._words(samples), 53, torch.float64) < chance)
        else:
            self._by_seeds(name, func, sources, results)
        return output

    def _expanded(self, value: Any, like: Tensor) -> Any:
        """Bring an argument of an op into the form of its result."""
        if not isinstance(value, Tensor):
            return value
        return self._samples(value.to(like.device).expand(like.shape)).double()

    def _by_hash(self, name: str, result: Tensor, arguments: dict[str, Any]) -> None:
        samples = self._samples(result)
        drawn = self._words(samples)
        if name in _UNIFORM:
            digits = 2 - math.frexp(torch.finfo(result.dtype).eps)[1]
            uniform = unit(drawn, digits, result.dtype)
            low, high = arguments.get("from", 0.0), arguments.get("to", 1.0)
            samples.copy_(
                uniform if (low, high) == (0, 1) else uniform * (high - low) + low
            )
            return
        uniform = unit(drawn, 53, torch.float64)
        uniform += 2.0**-54  # neither 0 nor 1
        normal = torch.special.ndtri(uniform)
        if arguments.get("std") is not None:
            normal *= self._expanded(arguments["std"], result)
            normal += self._expanded(arguments["mean"], result)
        samples.copy_(normal)

    def _by_seeds(
        self, name: str, func: Any, sources: tuple[tuple, dict], results: list[Tensor]
    ) -> None:
        """Run an op for one sample after another, on memory in the usual order."""
        if self._captured or (self._at.axis != 0 and not self._single):
            raise self._apart()
        shape = results[0].shape
        samples = [self._samples(result) for result in results]
        for row, seed in enumerate(self._streams(torch.device("cpu")).tolist()):

            def one_sample(tensor: Tensor, row: int = row) -> Tensor:
                if not self._single:
                    tensor = tensor if name == "multinomial" else tensor.expand(shape)
                tensor = self._samples(tensor)[row]
                return tensor.clone(memory_format=torch.contiguous_format)

            args, kwargs = tree_map_only(Tensor, one_sample, sources)
            args, kwargs = self._sized(func, args, kwargs)
            default_generator(results[0].device).manual_seed(seed)
            output = func(*args, **kwargs)
            pairs = zip(samples, shown_results(func, args, kwargs, output), strict=True)
            for sample, drawn in pairs:
                sample[row].copy_(drawn)

    def _sized(self, func: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Let an op that has an argument for the size make one sample."""
        if self._single or "size" not in (arguments := named(func, args, kwargs)):
            return args, kwargs
        first, *rest = arguments["size"]
        size = [first // self._size, *rest]
        args = tuple(size if value is arguments["size"] else value for value in args)
        return args, {k: size if k == "size" else v for k, v in kwargs.items()}

    def _hidden(self, name: str, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run an op that does not show the random numbers it may draw."""
        if self._captured:
            raise self._apart()
        self._keep(args, kwargs)
        tensors = among(args, kwargs)
        if self._single:
            device = tensors[0].device if tensors else torch.device("cpu")
            seed = int(self._streams(torch.device("cpu")))
            default_generator(device).manual_seed(seed)
        before = random_state(tensors)
        output = func(*args, **kwargs)
        if drawn_since(before, tensors):
            self._at.drew = True
            self._at.place += 1
            if not self._single:
                raise self._apart()
        return output

    def _apart(self) -> SplitBatch:
        """Return the split into single samples, where draws have no clear order."""
        if self._captured:
            raise Unrepeatable("a random op draws for one sample after another")
        rows = torch.arange(self._size).split(1)
        why = "a random op that draws for all at once in an order of its own"
        return SplitBatch(Partition(rows, where(sys._getframe(1)), "loop", why))

    def _keep(self, args: tuple, kwargs: dict) -> None:
        """Note the state of a device's generator before a number is drawn from it."""
        where = kwargs.get("device") or "cpu"
        state = random_state([*among(args, kwargs), torch.empty(0, device=where)])
        self._before = self._before[0], {**state[1], **self._before[1]}


def _undrawn(func: Any, args: tuple, kwargs: dict) -> Any:
    """Return memory for the numbers of a random op."""
    if writes(func):
        return next(arguments_written(func, args, kwargs))
    arguments, like = named(func, args, kwargs), among(args, kwargs)
    options = {name: arguments.get(name) for name in ("dtype", "layout", "device")}
    if not like:
        return torch.empty(arguments["size"], **options)
    return torch.empty_like(torch.broadcast_tensors(*like)[0], **options)


_UNIFORM = {"uniform", "rand", "rand_like"}
_NORMAL = {"normal", "normal_functional", "randn", "randn_like"}
_ALONE = {"randperm"}
"""Random ops that vmap calls once for each sample."""
