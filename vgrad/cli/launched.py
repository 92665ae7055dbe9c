"""A run on several ranks, as torchrun starts them: who writes, and who computes what.

All ranks do the same, on a part of each private batch. The first one writes the files
and prints.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh

from vgrad.distributed import RankError, Ranks, data_parallel, replicated

_PATIENCE = timedelta(seconds=45)
"""How long a rank waits for another one before it takes it for dead."""


class World:
    """The ranks of a run; without a launcher there is one."""

    def __init__(self) -> None:
        """Find them."""
        self._mesh = None
        if distributed.is_available() and distributed.is_initialized():
            size = distributed.get_world_size()
            self._mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return 1 if self._mesh is None else self._mesh.size()

    @property
    def is_first(self) -> bool:
        """Whether this rank writes and prints."""
        return self._mesh is None or self._mesh.get_rank() == 0

    def together(self, what: str) -> contextlib.AbstractContextManager[Any]:
        """Run a block that may fail on one rank, and raises on all then."""
        if self._mesh is None:
            return contextlib.nullcontext()
        return Ranks.of("train", self._mesh, "dp").together(what)

    def of_first(self, state: Any) -> Any:
        """Return the state of the first rank."""
        return state if self._mesh is None else replicated(state, self._mesh)

    def parallel(self, step: Callable) -> Callable:
        """Return a step of all ranks."""
        return step if self._mesh is None else data_parallel(step, self._mesh)

    def part(self, index: Tensor) -> Tensor:
        """Return this rank's part of a batch of indices."""
        if self._mesh is None:
            return index
        rank, size = self._mesh.get_rank(), self._mesh.size()
        return index[len(index) * rank // size : len(index) * (rank + 1) // size]


@contextlib.contextmanager
def ranks() -> Iterator[World]:
    """Join the ranks that a launcher has started, if one has.

    Raises:
        OSError: another rank has failed, or is gone.
    """
    launched = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if launched and not distributed.is_initialized():
        with _joined():
            yield World()
        return
    yield World()


@contextlib.contextmanager
def _joined() -> Iterator[None]:
    """Make the process group of a run, in which the first rank alone prints."""
    backend, first = "gloo", int(os.environ["RANK"]) == 0
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group(backend, timeout=_PATIENCE)
    with open(os.devnull, "w") as nowhere:
        shown = contextlib.redirect_stdout(sys.stdout if first else nowhere)
        try:
            with shown:
                yield
        except RankError as error:
            raise OSError(f"rank {os.environ['RANK']}: {error}") from error
        except (distributed.DistError, RuntimeError) as error:
            raise _lost(error) from error
        finally:
            distributed.destroy_process_group()  # a group left at exit may abort


def _lost(error: Exception) -> Exception:
    """Say that a rank is gone, if that is what an error is about."""
    text = str(error)
    if "gloo" not in text and not isinstance(error, distributed.DistError):
        return error
    return OSError(
        f"rank {os.environ['RANK']}: expected an answer of the other ranks within "
        f"{_PATIENCE.seconds} seconds, got: {text.partition(chr(10))[0]}. What was "
        f"saved is good, and --resume goes on with any number of ranks."
    )
