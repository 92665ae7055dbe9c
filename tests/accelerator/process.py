"""A process that has the device, in which the tests of this folder run.

A device that is registered changes torch for everything else in a process
(`torch.accelerator`, pinned memory), and has to come before the first backward pass.
"""

import importlib
import multiprocessing
import traceback
import warnings
from multiprocessing.connection import Connection

import pytest
import torch

import vgrad


class Child:
    """Runs functions of modules by their names, one after another."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def run(self, module: str, function: str, arguments: dict) -> None:
        """Run a test; its outcome is raised here."""
        try:
            self._connection.send((module, function, arguments))
            kind, text = self._connection.recv()
        except (EOFError, OSError):
            self._process.join()
            code = self._process.exitcode
            self.__init__()  # for the next test
            pytest.fail(f"the process of the device ended with {code}", pytrace=False)
        if kind != "passed":
            {"failed": pytest.fail, "skipped": pytest.skip}[kind](text)

    def end(self) -> None:
        self._connection.close()
        self._process.join()


def _serve(connection: Connection) -> None:
    from tests.accelerator import device

    torch.set_num_threads(1)
    device.register()
    while True:
        try:
            work = connection.recv()
        except EOFError:
            return
        connection.send(_outcome(*work))


def _outcome(module: str, function: str, arguments: dict) -> tuple[str, str]:
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", vgrad.FallbackWarning)
            for text in ("autocast. float16 on a CPU is slow", "`torch.jit.script` is"):
                warnings.filterwarnings("ignore", text)
            getattr(importlib.import_module(module), function)(**arguments)
    except pytest.skip.Exception as skipped:
        return "skipped", str(skipped)
    except BaseException:
        return "failed", traceback.format_exc()
    return "passed", ""
