"""Ranks for tests: processes on this machine that are kept from test to test.

They are forked from a server that has imported what they need, and meet through a
file, so that nothing waits for a port.
"""

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

SERVER = multiprocessing.get_context("forkserver")
PRELOADED = ["pytest", "torch._dynamo", "torch.distributed.tensor"]
PRELOADED += ["vgrad.distributed", "vgrad.cli.run", "dp_accounting"]
SERVER.set_forkserver_preload(PRELOADED)

TIMEOUT = 30
"""Seconds after which a rank that waits for another one gives up."""


def mesh_of(size: int, axis: str = "dp") -> tuple[Any, int]:
    """Return a mesh of all ranks, and the number of this one."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=(axis,))
    return mesh, mesh.get_local_rank(axis)


def _on_mesh(function: Callable, size: int, axis: str, *arguments: Any) -> Any:
    return function(mesh_of(size, axis)[0], *arguments)


class Processes:
    """Some ranks of one process group, gloo on the CPU."""

    def __init__(self, size: int, *, threads: int = 1, timeout: int = TIMEOUT) -> None:
        self.size = size
        self._timeout = timeout
        self._folder = tempfile.TemporaryDirectory()
        path = str(Path(self._folder.name) / "store")
        self._ends, self._ranks = [], []
        for rank in range(size):
            own, other = SERVER.Pipe()
            given = (other, path, rank, size, threads, timeout)
            process = SERVER.Process(target=_serve, args=given, daemon=True)
            process.start()
            other.close()
            self._ends.append(own)
            self._ranks.append(process)

    def run(self, function: Callable, *arguments: Any) -> list:
        """Call a function of a module on every rank; what each one returned, in order.

        An error of any rank is raised here, with all of their tracebacks.
        """
        results = self.outcomes(function, *arguments)
        failed = [
            f"rank {rank}:\n{found}"
            for rank, (fine, found) in enumerate(results)
            if not fine
        ]
        if failed:
            raise AssertionError("\n".join(failed))
        return [found for _, found in results]

    def on_mesh(self, function: Callable, *arguments: Any, axis: str = "dp") -> list:
        """Call a function of the mesh of all ranks, and of arguments, on every rank."""
        return self.run(_on_mesh, function, self.size, axis, *arguments)

    def outcomes(self, function: Callable, *arguments: Any) -> list[tuple[bool, Any]]:
        """Return whether each rank came through, and its result or its traceback."""
        for end in self._ends:
            end.send((function, arguments))
        found = []
        for rank, end in enumerate(self._ends):
            if not end.poll(2 * self._timeout):
                self.stop()
                raise AssertionError(f"rank {rank} hangs")
            try:
                found.append(end.recv())
            except EOFError:
                found.append((False, "it has died"))
        return found

    def stop(self) -> None:
        """End the processes."""
        for process in self._ranks:
            process.kill()
            process.join()
        for end in self._ends:
            end.close()
        self._folder.cleanup()


def _serve(
    end: Any, path: str, rank: int, size: int, threads: int, timeout: int
) -> None:
    """Do what comes through the pipe, as one rank."""
    import torch
    from torch import distributed

    torch.set_num_threads(threads)
    distributed.init_process_group(
        "gloo",
        store=distributed.FileStore(path, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
    )
    while True:
        try:
            function, arguments = end.recv()
        except EOFError:
            return
        torch.manual_seed(rank)
        try:
            end.send((True, function(*arguments)))
        except Exception:
            end.send((False, traceback.format_exc()))
