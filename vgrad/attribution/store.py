"""Features of the samples of a training set, in files.

N samples with k features of each parameter. The index has the projection, hashes of the
parameters, and the features of a probe, by which a loss is known again. Every other
file has the samples of one call and is bound to the index. All are hashed. No file
names another one, and nothing that is read is run.
"""

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor
from torch.utils import data

from vgrad import batches as _batches
from vgrad import checks, files
from vgrad.curvature import Curvature, Kronecker
from vgrad.curvature.kronecker import Block, eigen
from vgrad.dp.loading import PoissonLoader
from vgrad.dp.sampling import StepBatches
from vgrad.persample import Options, per_sample_projection
from vgrad.persample.engine import Transform
from vgrad.persample.grad import Gradients
from vgrad.persample.projection import Projection
from vgrad.ranks import differences
from vgrad.tree import double
from vgrad.typing import Buffers, LossFn, Params, Tree

Id = int | str

_NAME = "index.safetensors"
_INDEX, _FEATURES = "index of a store", "features of a store"

TOLERANCE = 1e-4
"""Relative to their norm, how far features of the probe may be from the store's."""


class Store:
    """Features of a training set's samples, in the folder that `write` has made.

    Iteration yields `{name: [n, k]}` for one file after another, in the order of the
    samples; "" is the name of a joined projection. Tensors are mapped from the disk. A
    file is hashed before it is first used, which finds damage, but not malice.

    Features reveal the samples: **a store is as secret as the data**. Its files can be
    read by their owner alone.

    Args:
        folder: of `write`.
        probe: of `write`, where that had one.

    Raises:
        FileNotFoundError: the folder has no store, or lacks a file of it.
        ValueError: a file is damaged or of another store.
    """

    def __init__(
        self, folder: str | Path, *, probe: tuple[Tree, ...] | None = None
    ) -> None:
        self._folder, self._probe = Path(folder), probe
        self._tensors, self._index = files.read_tensors(
            self._folder / _NAME, _INDEX, called=f"the {_INDEX}", checked=set()
        )
        self.binding = _binding(self._index)
        self._checked: set[str] = set()

    def __repr__(self) -> str:
        return f"Store({str(self._folder)!r})"

    def __len__(self) -> int:
        return sum(self._index["samples"])

    def __iter__(self) -> Iterator[Params]:
        return (features for features, _ in self._files())

    @property
    def ids(self) -> list[Id]:
        """The ids of the samples, by default their numbers."""
        return [entry for _, ids in self._files() for entry in ids]

    def check(self, loss: LossFn, params: Params, buffers: Buffers) -> None:
        """Raise a ValueError unless the features are of this loss and this model.

        Parameters and buffers are compared by a hash, and features of the probe to
        `1e-4` of their norm: code is not compared, but what it computes is.
        """
        function = "Store.check"
        _compare(function, self._index["facts"], _facts(params, buffers))
        probe = _probe_of(function, self._index["signature"], self._probe, params)
        self._compare_probe(function, self.project(loss, params, buffers, *probe))

    def _compare_probe(self, function: str, features: Params) -> None:
        stored = {name: self._tensors[f"{name}.probe"] for name in features}
        total = torch.stack([double(value).norm() for value in stored.values()]).norm()
        for name, expected in stored.items():
            gap = double(features[name].cpu() - expected).norm()
            if not gap <= TOLERANCE * (double(expected).norm() + 1e-2 * total):
                raise ValueError(
                    f"{function}: expected the loss of the store, got one whose "
                    f"features of the probe differ by {float(gap):.2g} at {name!r}. "
                    f"Pass the loss and model of Store.write, or write another store."
                )

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
            names, side = self._index["features"], self._tensors.get
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
        _compare("Store.curvature", self._index["facts"], _facts(params, buffers))
        project = self._projection(_linear)

        def features() -> Iterator[tuple[Params, int]]:
            arguments = Gradients(), params, buffers, batches, options
            for columns, output in matrix.measured(Store.curvature, *arguments):
                rows = {name: grads.flatten(0, 1) for name, grads in columns.items()}
                yield _by_name(project(params, buffers, rows)), len(output)

        return self._matrix(features(), diagonal)

    @torch.no_grad()
    def _matrix(
        self, parts: Iterable[tuple[Params, int]], diagonal: bool = False
    ) -> "OfFeatures":
        sums: dict[str, Any] = {}
        count = 0
        for features, samples in parts:
            for name, feature in features.items():
                rows = double(feature)
                square = rows.square().sum(0) if diagonal else rows.mT @ rows
                sums[name] = sums.get(name, 0.0) + square
            count += samples
        blocks = {}
        for name, total in sums.items():
            values, vectors = eigen("Store.curvature(batches)", name, total / count)
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
        probe: tuple[Tree, ...] | None = None,
    ) -> "Store":
        """Write a file with the features of samples, and return the store.

        The first call makes the store, and each other one adds its samples. Their
        features are in memory until the file is written: pass a large training set part
        by part. A call that was stopped leaves the store as it was, so a loop goes on
        at `len(store)`.

        A store is bound to its loss by features of a probe, two samples of numbers from
        a seed, of the shapes and dtypes of the first batch. No sample is kept.

        Args:
            projection: of `vgrad.per_sample_projection`.
            batches: a list or a loader, in the order of the columns of scores.
            ids: of the samples in `batches`, numbers or texts, no two the same; by
                default their numbers.
            probe: a batch in place of the seed's, where the loss does not take whole
                numbers of 0 and 1 and normal ones, or samples have items that are no
                tensors. It is not kept: pass it again, to `Store(folder, probe=...)`.

        Raises:
            ValueError: the folder has features of another model, loss or projection;
                the message names the difference.
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
        tensors, settings = _settings(projection)
        read = in_order(function, batches)
        first = next(read)
        signature = None if probe is not None else _signature(function, first)
        rows = _of_probe(projection, params, buffers, signature, probe)
        tensors |= {f"{name}.probe": value for name, value in rows.items()}
        index = {
            "kind": _INDEX,
            "facts": _facts(params, buffers),
            "projection": settings,
            "features": {n: [str(x.dtype), x.shape[1]] for n, x in rows.items()},
            "signature": signature,
            "probe": files.digest(rows),
            "samples": [],
        }

        def same() -> Store:
            store = cls(path, probe=probe)
            _compare(function, _flat(store._index), _flat(index))
            store._compare_probe(function, rows)
            return store

        if not _is_new(path):
            same()
        parts = [
            {name: value.cpu() for name, value in _by_name(features).items()}
            for features in (
                projection(params, buffers, *batch)
                for batch in itertools.chain([first], read)
            )
        ]
        features = {n: torch.cat([part[n] for part in parts]) for n in parts[0]}
        count = len(next(iter(features.values())))
        sample_ids = None if ids is None else _checked_ids(ids, count)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with files.locked(path, "writing a store"):
            if _is_new(path):
                files.write_tensors(path / _NAME, tensors, index, private=True)
            store = same()
            store._add(features, sample_ids or [*range(len(store), len(store) + count)])
        return cls(path, probe=probe)

    def _add(self, features: Params, ids: list[Id]) -> None:
        """Add a file, and name it in the index."""
        samples = self._index["samples"]
        metadata = {"kind": _FEATURES, "store": self.binding, "number": len(samples)}
        path = self._path(len(samples))
        files.write_tensors(path, features, metadata | {"ids": ids}, private=True)
        index = self._index | {"samples": [*samples, len(ids)]}
        files.write_tensors(self._folder / _NAME, self._tensors, index, private=True)

    def _files(self) -> Iterator[tuple[Params, list[Id]]]:
        if not self._index["samples"]:
            raise ValueError(
                f"{self!r}: expected a store with samples, got one whose first write "
                f"was stopped. Call Store.write again."
            )
        return map(self._read, range(len(self._index["samples"])))

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:08d}.safetensors"

    def _read(self, number: int) -> tuple[Params, list[Id]]:
        """Map the features of a file, and return the ids of its samples."""
        path, index = self._path(number), self._index
        tensors, metadata = files.read_tensors(
            path, _FEATURES, called=_FEATURES, checked=self._checked
        )
        ids, count = metadata.get("ids", ()), index["samples"][number]
        complete = len(ids) == count and metadata.get("number") == number
        if not complete or metadata.get("store") != self.binding:
            raise ValueError(
                f"{path}: expected {count} samples of this store, got a file of "
                f"another store or another place. Write the store again."
            )
        return {name: tensors[name] for name in index["features"]}, ids


@dataclass(frozen=True)
class OfFeatures(Kronecker):
    """A curvature matrix of the features of one store, by its hash."""

    store: str


def _linear(params: Params, buffers: Buffers, grads: Params) -> Tensor:
    """Return a loss with these gradients."""
    return torch.stack([(params[n] * grad).sum() for n, grad in grads.items()]).sum()


def _by_name(features: Params | Tensor) -> Params:
    return {"": features} if isinstance(features, Tensor) else features


def _checked_ids(ids: Any, count: int) -> list[Id]:
    ids = ids.tolist() if hasattr(ids, "tolist") else [*ids]
    texts = all(type(entry) in (int, str) for entry in ids)
    if not texts or len({*ids}) < len(ids) or len(ids) != count:
        raise ValueError(
            f"Store.write(ids): expected {count} whole numbers or texts, one for each "
            f"sample and no two the same, got {len(ids)}."
        )
    return ids


def in_order(function: str, batches: Any) -> Iterator[tuple[Tree, ...]]:
    """Read batches; refuse a loader that shuffles, which permutes the scores."""
    parts, shuffles = [batches], getattr(batches, "in_order", True) is False
    names = "batch_sampler", "sampler", "_sampler"
    for part in parts:  # then its samplers, and theirs
        samplers = (getattr(part, name, None) for name in names)
        parts += [sampler for sampler in samplers if sampler is not None]
        shuffles |= isinstance(part, _SHUFFLED) or getattr(part, "shuffle", 0) is True
    unknown = [part for part in parts[1:] if type(part) not in _ORDERED]
    once = any(hasattr(part, "__next__") for part in unknown)
    if unknown and not shuffles and not once:
        pairs = zip(parts[1], itertools.islice(parts[1], 4096), strict=False)
        shuffles = not all(np.array_equal(*pair) for pair in pairs)
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


# The probe.


def _signature(function: str, batch: tuple[Tree, ...]) -> list[Any]:
    """Return dtypes and shapes of the items of a sample."""
    if not all(isinstance(item, Tensor) for item in batch):
        raise ValueError(
            f"{function}(batches): expected samples of tensors, of which a probe can "
            f"be made, got others. Pass probe=, a batch of a few samples that you keep."
        )
    return [[str(x.dtype).removeprefix("torch."), [*x.shape[1:]]] for x in batch]


def _probe_of(
    function: str, signature: list[Any] | None, probe: Any, params: Params
) -> tuple[Tree, ...]:
    """Return the caller's probe, or two samples of numbers from a seed."""
    if signature is None:
        if probe is None:
            raise ValueError(
                f"{function}: expected the probe that Store.write had, got none. Pass "
                f"it as Store(folder, probe=...)."
            )
        return tuple(probe)
    source, items = torch.Generator().manual_seed(0), []
    device = next((value.device for value in params.values()), torch.device("cpu"))
    for dtype, shape in signature:
        kind = getattr(torch, dtype)
        if kind.is_floating_point or kind.is_complex:
            item = torch.randn(2, *shape, generator=source)
        else:
            item = torch.randint(2, (2, *shape), generator=source)
        items.append(item.to(device, kind))
    return tuple(items)


def _of_probe(
    projection: Any, params: Params, buffers: Buffers, signature: Any, probe: Any
) -> Params:
    """Return the features of a probe; refuse one that tells nothing."""
    batch = _probe_of("Store.write", signature, probe, params)
    try:
        features = _by_name(projection(params, buffers, *batch))
    except Exception as error:
        if probe is not None:
            raise
        raise ValueError(
            f"Store.write(projection): expected a loss that takes numbers of a seed, "
            f"got {type(error).__name__}: {error}. Pass probe=, a batch that it takes."
        ) from error
    if not all(bool(value.isfinite().all()) for value in features.values()):
        raise ValueError(
            "Store.write(projection): expected finite features of the probe, got NaN "
            "or infinity. Pass probe=, a batch with finite gradients."
        )
    names = [name for name in (*params, "") if name in features]
    return {name: features[name].cpu().contiguous() for name in names}


# The index.


def _facts(params: Params, buffers: Buffers) -> dict[str, str]:
    return {"params": files.digest(params), "buffers": files.digest(buffers)}


def _settings(projection: Any) -> tuple[Params, dict[str, Any]]:
    """Return the sides of a projection by name, and its settings."""
    quantity: Any = getattr(projection, "quantity", None)
    options: Any = getattr(projection, "options", None)
    fixed = isinstance(quantity, Projection) and options.randomness == "error"
    if not fixed or options.has_aux or options.scales is not None:
        raise ValueError(
            f"Store.write(projection): expected a vgrad.per_sample_projection, without "
            f"aux, scales and random numbers, got {checks.shown(projection)}."
        )
    sides = {
        f"{name}.{side}": vectors.detach().cpu().contiguous()
        for name, pair in (quantity.sides or {}).items()
        for side, vectors in zip(("left", "right"), pair, strict=True)
        if vectors is not None
    }
    if (drawn := quantity.directions) is None:
        settings = {"dim": [], "seed": None, "kind": "rademacher"}
        return sides, {**settings, "sides": files.digest(sides)}
    dim = [*drawn.sizes] if drawn.pairs else drawn.sizes[0]
    return sides, {"dim": dim, "seed": drawn.seed, "kind": drawn.kind, "sides": None}


def _is_new(folder: Path) -> bool:
    """Return whether there is no store; refuse a folder with other files."""
    if (folder / _NAME).exists():
        return False
    leftovers = {f".{_NAME}.partial"}  # of a process that was killed
    if folder.exists() and not {path.name for path in folder.iterdir()} <= leftovers:
        raise FileExistsError(
            f"{folder}: expected a store, or a new or an empty folder, got other files "
            f"and no {_NAME}. Name another folder."
        )
    return True


def _binding(index: dict[str, Any]) -> str:
    """Hash everything in an index but the numbers of samples."""
    text = json.dumps(index | {"samples": 0}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _flat(index: Mapping[str, Any]) -> dict[str, str]:
    """Return everything in an index but the numbers of samples, as text."""
    flat = {"signature": str(index["signature"])}
    for group in ("projection", "features"):
        flat |= {f"{group}.{name}": str(value) for name, value in index[group].items()}
    return flat | index["facts"]


def _compare(function: str, stored: dict[str, str], now: dict[str, str]) -> None:
    if stored != now:
        raise ValueError(
            f"{function}: expected the model, loss and projection of the store, got "
            f"others: {differences([stored, now])}, in the store and now."
        )
