"""Features of the samples of a training set, in files.

N samples with k features of each parameter. The index has the projection and all that
features depend on; every other file has a fixed number of samples, and is bound to the
index. All are hashed. No file names another one, and nothing that is read is run.
"""

import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import data

from vgrad import batches as _batches
from vgrad import checks, files
from vgrad.contents import contents
from vgrad.curvature import Curvature, Kronecker
from vgrad.curvature.kronecker import Block, eigen
from vgrad.dp.sampling import PoissonLoader, StepBatches
from vgrad.functional.losses import SampleLoss
from vgrad.persample import Options, per_sample_projection
from vgrad.persample.engine import Transform
from vgrad.persample.grad import Gradients
from vgrad.persample.projection import Projection
from vgrad.ranks import Ranks, differences
from vgrad.tree import double, map_tensors
from vgrad.typing import Buffers, LossFn, Params, Tree

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Id = int | str
Sample = list[Any]
"""The id of a sample, and a hash of its data."""
Piece = tuple[int, Tree, list[Sample]]
"""Samples of one file: the number of the first one, and the data."""

_NAME = "index.safetensors"
_INDEX, _FEATURES = "index of a store", "features of a store"
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float64)}


class Store:
    """Features of a training set's samples, in the folder that `write` has made.

    Iteration yields `{name: [n, k]}` for one file after another, in the order of the
    samples; "" is the name of a joined projection. Tensors are mapped from the disk. A
    file is hashed before it is first used, which finds damage, but not malice.

    Features reveal the samples: **a store is as secret as the data**. Its files can be
    read by their owner alone.

    Args:
        folder: of `write`.
        description: of `write`, where that had one.

    Raises:
        FileNotFoundError: the folder has no store, or lacks a file of it.
        ValueError: the store is not complete, or a file is damaged or of another store.
    """

    def __init__(self, folder: str | Path, *, description: str | None = None) -> None:
        self._folder = Path(folder)
        self._description = description
        self._sides, self._index = files.read_tensors(
            self._folder / _NAME, _INDEX, called=f"the {_INDEX}", checked=set()
        )
        self.binding = _binding(self._index)
        self._checked: set[str] = set()

    def __repr__(self) -> str:
        return f"Store({str(self._folder)!r})"

    def __len__(self) -> int:
        if not self._index["samples"]:
            raise ValueError(
                f"{self!r}: expected a complete store, got one whose writing was "
                f"stopped. Call Store.write again."
            )
        return self._index["samples"]

    def __iter__(self) -> Iterator[Params]:
        return (features for features, _ in self._files())

    @property
    def ids(self) -> list[Id]:
        """The ids of the samples, by default their numbers."""
        return [each for _, samples in self._files() for each, _ in samples]

    def check(self, loss: LossFn, params: Params, buffers: Buffers) -> None:
        """Raise a ValueError unless the features are of this loss and this model."""
        facts = _facts("Store.check", loss, params, buffers, self._description)
        _compare("Store.check", self._index["facts"], facts)

    def project(
        self,
        loss: LossFn,
        params: Params,
        buffers: Buffers,
        /,
        *batch: Tree,
        **options: Unpack[Options],
    ) -> Params:
        """Project gradients of other samples, or of another loss: {name: [B, k]}.

        The directions are the store's; the options are in `vgrad.persample.Options`.
        """
        return _by_name(self._projection(loss, **options)(params, buffers, *batch))

    def _projection(self, loss: LossFn, **options: Unpack[Options]) -> Transform[Any]:
        settings: Any = dict(self._index["projection"])
        if settings.pop("sides") is not None:
            names, side = self._index["features"], self._sides.get
            dim = {n: (side(f"{n}.left"), side(f"{n}.right")) for n in names}
            settings = {"dim": dim}
        return per_sample_projection(loss, **settings, **options)

    def empirical_fisher(self) -> Kronecker:
        """Mean over the samples of outer products of features, [k, k] for each name.

        Its vectors are features. It is the empirical Fisher matrix if the loss is a
        negative log likelihood.
        """
        return self._matrix((part, len(ids)) for part, ids in self._files())

    def curvature(
        self,
        matrix: Curvature,
        params: Params,
        buffers: Buffers,
        batches: Iterable[tuple[Tree, ...]],
        *,
        diagonal: bool = False,
        **options: Unpack[Options],
    ) -> Kronecker:
        """Curvature along the store's directions, [k, k] for each name: `P H_p P^T`.

        Its vectors are features. `diagonal` leaves the rest of it out: with
        eigenvectors of `curvature.ekfac` as directions, it is that matrix.

        Args:
            matrix: such as `curvature.ggn(fmodel, "categorical")`.
            batches: of its inputs, of all samples or of some.

        Cost: the gradients of all columns of a batch, and [k, k] in float64.
        """
        facts = self._index["facts"]
        now = {"params": files.digest(params), "buffers": files.digest(buffers)}
        _compare("Store.curvature", {name: facts[name] for name in now}, now)
        project = self._projection(_linear)

        def features() -> Iterator[tuple[Params, int]]:
            given = params, buffers, batches, options
            for each, output in matrix.measured(Store.curvature, Gradients(), *given):
                rows = {name: grads.flatten(0, 1) for name, grads in each.items()}
                yield _by_name(project(params, buffers, rows)), len(output)

        return self._matrix(features(), diagonal)

    @torch.no_grad()
    def _matrix(
        self, parts: Iterable[tuple[Params, int]], diagonal: bool = False
    ) -> "OfFeatures":
        sums: dict[str, Any] = {}
        count = 0
        for features, samples in parts:
            for name, each in features.items():
                rows = double(each)
                found = rows.square().sum(0) if diagonal else rows.mT @ rows
                sums[name] = sums.get(name, 0.0) + found
            count += samples
        blocks = {}
        for name, found in sums.items():
            values, vectors = eigen("Store.curvature(batches)", name, found / count)
            blocks[name] = Block(vectors, None, values.unsqueeze(1))
        shapes = {name: torch.Size((len(b.values),)) for name, b in blocks.items()}
        return OfFeatures(blocks, shapes, self.binding)

    @classmethod
    @torch.no_grad()
    def write(
        cls,
        folder: str | Path,
        projection: Transform[Any],
        params: Params,
        buffers: Buffers,
        batches: Iterable[tuple[Tree, ...]],
        *,
        ids: Sequence[Id] | None = None,
        first: int = 0,
        description: str | None = None,
        samples_per_file: int = 1024,
        mesh: "DeviceMesh | None" = None,
        progress: bool = False,
    ) -> "Store":
        """Write the features of samples, and return the store.

        A call that was stopped, at any moment, is made again with the same arguments:
        samples that are there are skipped, and none is lost or there twice. To append
        samples, pass them with the number of the `first` one, `len(store)`.

        On a mesh every rank passes the same batches and computes whole files. Any
        number of ranks writes the same bytes.

        Args:
            projection: of `vgrad.per_sample_projection`.
            batches: a list or a loader, in the same order each time.
            ids: of the samples in `batches`, numbers or texts, no two the same.
            description: text that stands for the loss, and has to change with it. It is
                needed for a loss that is not of `vgrad.sample_loss`, or whose criterion
                is a function of one's own, since code is not compared.
            samples_per_file: whose features are in memory at once.
            progress: show a bar, with the size on the disk; needs `vgrad[demo]`.

        Raises:
            ValueError: the folder has features of another model, loss or projection, or
                of other samples; the message names the difference.
            OSError: the disk lacks the room.
            BlockingIOError: another process writes the store.

        Example:
            >>> import tempfile, torch, vgrad
            >>> from vgrad.attribution import Store
            >>> model = torch.nn.Linear(3, 2)
            >>> fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
            >>> loss = vgrad.sample_loss(fmodel, torch.nn.functional.mse_loss)
            >>> project = vgrad.per_sample_projection(loss, (2, 2), seed=0)
            >>> batches = [(torch.ones(4, 3), torch.zeros(4, 2))]
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     store = Store.write(folder, project, params, buffers, batches)
            ...     [part] = store
            >>> {name: each.shape for name, each in part.items()}
            {'weight': torch.Size([4, 4]), 'bias': torch.Size([4, 2])}
        """
        function, path = "Store.write", Path(folder)
        ranks = Ranks.of_all(function, mesh)
        with ranks.together(function) as agreed:
            [first] = checks.whole(function, least=0, first=first)
            [size] = checks.whole(function, least=1, samples_per_file=samples_per_file)
            count, empty = _counted(batches)
            sides, settings = _settings(projection)
            shapes = _by_name(projection(params, buffers, *empty))
            loss = projection.options.loss
            index = {
                "kind": _INDEX,
                "facts": _facts(function, loss, params, buffers, description),
                "projection": settings,
                "features": {n: [str(x.dtype), x.shape[1]] for n, x in shapes.items()},
                "samples_per_file": size,
                "samples": 0,
            }
            if not _is_new(path):
                old = cls(path)._index
                _compare(function, _flat(old), _flat(index))
                index["samples"] = old["samples"]
            if first > index["samples"]:
                raise ValueError(
                    f"{function}(first={first}): expected at most {index['samples']}, "
                    f"the number of samples in {path}."
                )
            known = cls(path).ids[:first] if first else []  # which reads all files
            if ids is None and known != [*range(first)]:
                raise ValueError(
                    f"{function}(first={first}): expected ids, which the samples "
                    f"before have, got none: numbers may be among these."
                )
            ids = None if ids is None else _checked_ids(ids, known)
            text = f"{count} samples, {_check_room(path, index, first + count):.3g} MB"
            agreed.same |= {"index": _binding(index), "first": first, "count": count}
        with ExitStack() as stack:
            write = partial(files.write_tensors, path / _NAME, sides, private=True)
            with ranks.together(f"{function}, index"):
                if ranks.rank == 0:
                    path.mkdir(mode=0o700, parents=True, exist_ok=True)
                    stack.enter_context(files.locked(path, "writing a store"))
                    if _is_new(path):
                        write(index)
            compute = partial(projection, params, buffers)
            shown = (
                _bar(text, count) if progress and ranks.rank == 0 else nullcontext(int)
            )
            seen, end = hashlib.sha256(), first
            with ranks.together(f"{function}, features") as agreed, shown as advance:
                store = cls(path)  # whose index another process may have written
                _compare(function, _flat(store._index), _flat(index))

                def note(samples: list[Sample]) -> None:
                    nonlocal end
                    end += len(samples)
                    seen.update(json.dumps(samples).encode())
                    advance(len(samples))

                pieces = _pieces(batches, ids, first, size, note)
                for number, some in itertools.groupby(
                    pieces, lambda each: each[0] // size
                ):
                    if number % ranks.size == ranks.rank:
                        store._complete(number, some, compute)
                if ids is not None and end - first != len(ids):
                    raise ValueError(
                        f"{function}(ids): expected one for each of the {end - first} "
                        f"samples, got {len(ids)}."
                    )
                agreed.same["data"] = seen.hexdigest()
            with ranks.together(f"{function}, end"):
                if ranks.rank == 0 and end > index["samples"]:
                    write(index | {"samples": end})
        return cls(path, description=description)

    def _files(self) -> Iterator[tuple[Params, list[Sample]]]:
        size = self._index["samples_per_file"]
        for start in range(0, len(self), size):
            features, samples = self._read(start // size)
            rows = len(self) - start  # a call that was stopped may have written more
            yield {name: each[:rows] for name, each in features.items()}, samples[:rows]

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:08d}.safetensors"

    def _read(self, number: int) -> tuple[Params, list[Sample]]:
        """Map the features of a file, and return the ids and hashes of its samples."""
        path, index = self._path(number), self._index
        found, own = files.read_tensors(
            path, _FEATURES, called=_FEATURES, checked=self._checked
        )
        samples, size = own.get("samples", ()), index["samples_per_file"]
        least = min(size, index["samples"] - number * size)
        whole = least <= len(samples) <= size and own.get("number") == number
        if not whole or own.get("store") != self.binding:
            raise ValueError(
                f"{path}: expected {least} samples of this store, got a file of "
                f"another store, another place or an earlier time. Delete it, and call "
                f"Store.write with all batches."
            )
        return {name: found[name] for name in index["features"]}, samples

    def _complete(
        self, number: int, pieces: Iterator[Piece], compute: Callable[..., Any]
    ) -> None:
        """Add the samples that a file has not; refuse others than those it has.

        Samples of a call that was stopped are replaced where they differ.
        """
        path, size = self._path(number), self._index["samples_per_file"]
        features, samples = self._read(number) if path.is_file() else ({}, [])
        parts, changed = [features] if features else [], False
        for place, rows, own in pieces:
            offset = place - number * size
            there = samples[offset : offset + len(own)]
            pairs = enumerate(zip(there, own, strict=False))
            same = next((row for row, (a, b) in pairs if a != b), len(there))
            if same < len(there):
                if place + same < self._index["samples"]:
                    raise ValueError(
                        f"Store.write(batches, ids): expected sample {place + same} to "
                        f"be {there[same][0]!r} as in {path}, got {own[same][0]!r} or "
                        f"other data. Pass the same batches, not shuffled; or new ones "
                        f"with first=len(store)."
                    )
                samples = samples[: offset + same]
                parts = [{n: each[: len(samples)] for n, each in features.items()}]
            if same < len(own):
                new = map_tensors(itemgetter(slice(same, None)), rows)
                found = _by_name(compute(*new))
                parts.append({name: each.cpu() for name, each in found.items()})
                samples, changed = samples + own[same:], True
        if changed:
            joined = {n: torch.cat([each[n] for each in parts]) for n in parts[0]}
            own = {"store": self.binding, "number": number, "samples": samples}
            files.write_tensors(path, joined, {"kind": _FEATURES} | own, private=True)


@dataclass(frozen=True)
class OfFeatures(Kronecker):
    """A curvature matrix of the features of one store, by its hash."""

    store: str


def _linear(params: Params, buffers: Buffers, grads: Params) -> Tensor:
    """Return a loss with these gradients."""
    return torch.stack([(params[n] * each).sum() for n, each in grads.items()]).sum()


def _pieces(
    batches: Iterable[Any],
    ids: list[Id] | None,
    place: int,
    size: int,
    note: Callable[[list[Sample]], None],
) -> Iterator[Piece]:
    """Cut batches where a file ends."""
    names: Iterator[Any] = itertools.count(place)
    if ids is not None:
        names = itertools.chain(ids, itertools.repeat(None))  # counted by `note`
    for batch in _batches.each("Store.write", batches):
        read, start = _batches.read("Store.write", batch), 0
        flat = [each.detach().cpu().contiguous() for each in read.tensors]
        kinds = map_tensors(lambda each: (each.dtype, each.shape[1:]), read.tree)
        kind = repr(kinds).encode()  # with items that are no tensors
        hashes = [_hash_of(kind, row) for row in zip(*flat, strict=True)]
        samples = [[next(names), each] for each in hashes]
        note(samples)
        while start < read.size:
            rows = slice(start, min(read.size, start + size - place % size))
            yield place, map_tensors(itemgetter(rows), read.tree), samples[rows]
            place, start = place + rows.stop - start, rows.stop


def _hash_of(kind: bytes, tensors: Iterable[Tensor]) -> str:
    found = hashlib.blake2b(kind, digest_size=8)
    for each in tensors:
        found.update(each.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _by_name(found: Params | Tensor) -> Params:
    return {"": found} if isinstance(found, Tensor) else found


def _checked_ids(ids: Any, known: list[Id]) -> list[Id]:
    ids = ids.tolist() if hasattr(ids, "tolist") else [*ids]
    texts = all(type(each) in (int, str) for each in ids)
    if not texts or len({*ids, *known}) < len(ids) + len(known):
        raise ValueError(
            "Store.write(ids): expected whole numbers or texts, no two the same, and "
            "none that the store has."
        )
    return ids


def in_order(function: str, batches: Any) -> Iterator[tuple[Tree, ...]]:
    """Read batches; refuse a loader that shuffles, which permutes the scores."""
    parts, shuffles = [batches], getattr(batches, "in_order", True) is False
    for each in parts:  # then its samplers, and theirs
        own = (getattr(each, n, None) for n in ("batch_sampler", "sampler", "_sampler"))
        parts += [sampler for sampler in own if sampler is not None]
        shuffles |= isinstance(each, _SHUFFLED) or getattr(each, "shuffle", 0) is True
    unknown = [each for each in parts[1:] if type(each) not in _ORDERED]
    once = any(hasattr(each, "__next__") for each in unknown)
    if unknown and not shuffles and not once:
        pairs = zip(parts[1], itertools.islice(parts[1], 4096), strict=False)
        shuffles = not all(np.array_equal(*each) for each in pairs)
    if shuffles:
        raise ValueError(
            f"{function}(batches): expected samples in one order, by which scores are "
            f"told apart, got a {type(batches).__name__} that shuffles or draws. Pass "
            f"DataLoader(dataset, batch_size) without shuffle and samplers."
        )
    return _batches.each(function, batches)


_SHUFFLED = (data.RandomSampler, data.SubsetRandomSampler, data.WeightedRandomSampler)
_SHUFFLED += (PoissonLoader, StepBatches)
_ORDERED = data.SequentialSampler, data.BatchSampler


def _counted(batches: Any) -> tuple[int, Tree]:
    """Return the number of samples, about, and a batch of none."""
    in_order("Store.write", batches)
    first = next(iter(batches), None) if hasattr(batches, "__len__") else None
    if not isinstance(first, tuple | list):
        raise TypeError(
            f"Store.write(batches): expected a list or a loader of tuples, with a "
            f"length, got {checks.shown(batches)}."
        )
    size = _batches.read("Store.write", first).size
    return len(batches) * size, map_tensors(itemgetter(slice(0)), tuple(first))


def _check_room(folder: Path, index: dict[str, Any], samples: int) -> float:
    """Return the size of so many samples in MB; refuse more than the disk can take."""
    widths = index["features"].values()
    total = samples * sum(_DTYPES[dtype].itemsize * k for dtype, k in widths)
    left = total - sum(each.stat().st_size for each in folder.glob("*.safetensors"))
    above = folder.absolute(), *folder.absolute().parents
    free = shutil.disk_usage(next(filter(Path.exists, above))).free
    if left > free:
        raise OSError(
            f"Store.write({folder}): expected {left / 1e6:.3g} MB on the disk for "
            f"features of {samples} samples, got {free / 1e6:.3g} MB. Project on fewer "
            f"directions."
        )
    return total / 1e6


@contextmanager
def _bar(text: str, count: int) -> Iterator[Callable[[int], Any]]:
    rich = checks.package("rich.progress", "demo")
    with rich.Progress() as bar:
        task = bar.add_task(text, total=count)
        yield lambda done: bar.advance(task, done)


# The description of features.


def _facts(
    function: str, loss: Any, params: Params, buffers: Buffers, text: str | None
) -> dict[str, str]:
    """Return everything but the projection that features depend on, as text."""
    facts = {"params": files.digest(params), "buffers": files.digest(buffers)}
    model, criterion, copies = (
        loss.parts if isinstance(loss, SampleLoss) else [None] * 3
    )
    for place, value in {
        "loss.fmodel": model and dict(model.named_modules())[""],
        "loss.criterion": criterion if text is None else None,
        "loss.augmentations": copies if text is None else None,
    }.items():
        for path, each in contents(value).items():
            if isinstance(each, Tensor):
                facts[f"{place}.{path}"] = files.digest({"": each})
            elif isinstance(each, str) and not path.endswith("device"):
                facts[f"{place}.{path}".rstrip(".")] = each
    if text is not None:
        return facts | {"loss": repr(text)}
    function_of = getattr(criterion, "func", criterion)
    code = isinstance(function_of, FunctionType)
    if not isinstance(loss, SampleLoss) or (
        code and not function_of.__module__.startswith("torch.")
    ):
        raise ValueError(
            f"{function}(loss): expected vgrad.sample_loss(fmodel, criterion) with a "
            f"criterion of torch or a module, got code of your own, which is not "
            f"compared. Pass description=, a text that changes with it."
        )
    if isinstance(criterion, nn.Module):
        facts["loss.criterion.tensors"] = files.digest(criterion.state_dict())
    return facts


def _settings(projection: Any) -> tuple[Params, dict[str, Any]]:
    """Return the sides of a projection by name, and its settings."""
    own: Any = getattr(projection, "quantity", None)
    options: Any = getattr(projection, "options", None)
    fixed = isinstance(own, Projection) and options.randomness == "error"
    if not fixed or options.has_aux or options.scales is not None:
        raise ValueError(
            f"Store.write(projection): expected a vgrad.per_sample_projection, without "
            f"aux, scales and random numbers, got {checks.shown(projection)}."
        )
    sides = {
        f"{name}.{side}": each.detach().cpu().contiguous()
        for name, pair in (own.sides or {}).items()
        for side, each in zip(("left", "right"), pair, strict=True)
        if each is not None
    }
    digest = None if own.sides is None else files.digest(sides)
    dim = [*own.sizes] if own.pairs else own.sizes[0]
    settings = {"dim": dim, "seed": own.seed, "kind": own.kind, "sides": digest}
    return sides, settings


# The index.


def _is_new(folder: Path) -> bool:
    """Return whether there is no store; refuse a folder with other files."""
    if (folder / _NAME).exists():
        return False
    own = {f".{_NAME}.partial"}  # of a process that was killed
    if folder.exists() and not {each.name for each in folder.iterdir()} <= own:
        raise FileExistsError(
            f"{folder}: expected a store, or a new or an empty folder, got other files "
            f"and no {_NAME}. Name another folder."
        )
    return True


def _binding(index: dict[str, Any]) -> str:
    """Hash everything in an index but the number of samples."""
    text = json.dumps(index | {"samples": 0}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _flat(index: Mapping[str, Any]) -> dict[str, str]:
    """Return everything in an index but the number of samples, as text."""
    flat = {"samples_per_file": str(index["samples_per_file"])}
    for group in ("projection", "features"):
        flat |= {f"{group}.{name}": str(each) for name, each in index[group].items()}
    return flat | index["facts"]


def _compare(function: str, stored: dict[str, str], now: dict[str, str]) -> None:
    if stored != now:
        raise ValueError(
            f"{function}: expected the model, loss and projection of the store, got "
            f"others: {differences([stored, now])}, in the store and now."
        )
