"""A pretend accelerator, and counts of whatever a real one would have to do.

    from tests.accelerator import device

    device.register()
    model = torch.nn.Linear(4, 2).to("pretend")
    counts = device.count(lambda: model(torch.ones(3, 4, device="pretend")))
    counts.launches, counts.waits, counts.to_host, counts.to_device
    print(counts.table("launch"))  # the lines of vgrad that launch most, with their ops

It shows logic (mixed devices, waits, copies, counts), never speed. An op is one launch,
also where CUDA takes several kernels for it (a sort, a sum into equal indices).
"""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils import cpp_extension

NAME = "pretend"
SOURCE = Path(__file__).with_name("device.cpp")
PACKAGE = str(Path(__file__).parents[2] / "vgrad") + os.sep


@cache
def register() -> None:
    """Register the device in this process, for good.

    It has to come before anything in the process goes backward: autograd starts its
    threads, one for each device, at the first backward pass.
    """
    torch.utils.rename_privateuse1_backend(NAME)
    core = _core()
    module: Any = types.ModuleType(f"torch.{NAME}")
    generator = core.default_generator()
    module.default_generators = (generator,)
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module.device = lambda device: nullcontext()
    module.synchronize = lambda device=None: torch.accelerator.synchronize()
    module.manual_seed = module.manual_seed_all = generator.manual_seed
    module.get_rng_state = lambda device=NAME: generator.get_state()
    module.set_rng_state = lambda state, device=NAME: generator.set_state(state)
    for name in ("memory_allocated", "memory_reserved"):
        setattr(module, name, getattr(torch.accelerator, name))
    module.mem_get_info = torch.accelerator.get_memory_info
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


def why_not() -> str | None:
    """Return why the device cannot be built here, or None where it can or is."""
    if (_folder() / f"{_LIBRARY}.so").exists():
        return None
    compiler = cpp_extension.get_cxx_compiler()
    if not shutil.which(compiler):
        return f"no C++ compiler here ({compiler}) to build the device with"
    return None


@cache
def _core() -> Any:
    return _load(build())


def build() -> Path:
    """Build the library once for this source and torch, in the cache of the user."""
    folder = _folder()
    library = folder / f"{_LIBRARY}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of processes that start together, one builds
        if not library.exists():
            _compile(folder, library)
    return library


_LIBRARY = "pretend_accelerator"


def _folder() -> Path:
    sources = (SOURCE, SOURCE.with_name("cells.h"))
    text = (*(path.read_text() for path in sources), torch.__version__, sys.version)
    key = hashlib.sha256(repr(text).encode()).hexdigest()[:16]
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "vgrad-tests" / key


def _compile(folder: Path, library: Path) -> None:
    from setuptools import Distribution

    extension = cpp_extension.CppExtension(
        _LIBRARY, [str(SOURCE)], extra_compile_args=["-O1", "-w"]
    )
    build_extension = cpp_extension.BuildExtension.with_options(use_ninja=False)
    command = build_extension(Distribution({"ext_modules": [extension]}))
    command.build_lib = command.build_temp = str(folder / "build")
    command.ensure_finalized()
    with redirect_stdout(sys.stderr):
        command.run()
    (built,) = (folder / "build").glob(f"{_LIBRARY}*.so")
    built.replace(library)
    shutil.rmtree(folder / "build")


def _load(library: Path) -> Any:
    spec = importlib.util.spec_from_file_location(_LIBRARY, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Operand(NamedTuple):
    """A tensor that an op read or wrote; `bytes` count a number of it once."""

    shape: tuple[int, ...]
    dtype: str
    bytes: int


class Event(NamedTuple):
    """A launch, a wait or a copy, and the line of the package that caused it."""

    kind: str  # launch, wait, to_host, to_device
    op: str
    line: str
    inputs: list[Operand]
    outputs: list[Operand]


class Counts:
    """All events of a block, in order."""

    def __init__(self, within: str = PACKAGE) -> None:
        self.events: list[Event] = []
        self._within = within
        self._thread = threading.get_ident()

    def of(self, kind: str) -> int:
        return sum(event.kind == kind for event in self.events)

    @property
    def launches(self) -> int:
        return self.of("launch")

    @property
    def waits(self) -> int:
        return self.of("wait")

    @property
    def to_host(self) -> int:
        return self.of("to_host")

    @property
    def to_device(self) -> int:
        return self.of("to_device")

    def ops(self, kind: str = "launch") -> Counter[str]:
        return Counter(event.op for event in self.events if event.kind == kind)

    def lines(self, kind: str = "launch") -> dict[str, Counter[str]]:
        """Return the lines by their events of a kind, most first, with their ops."""
        found: dict[str, Counter[str]] = {}
        for event in self.events:
            if event.kind == kind:
                found.setdefault(event.line, Counter())[event.op] += 1
        return dict(sorted(found.items(), key=lambda each: -each[1].total()))

    def table(self, kind: str = "launch", most: int = 30) -> str:
        lines = self.lines(kind)
        rows = [
            f"{ops.total():5d}  {line}: "
            + ", ".join(f"{op} {number}" for op, number in ops.most_common())
            for line, ops in list(lines.items())[:most]
        ]
        return "\n".join([*rows, f"{self.of(kind):5d}  in all"])

    def __call__(self, kind: str, op: str, inputs: list, outputs: list) -> None:
        operands = [[Operand(*each) for each in some] for some in (inputs, outputs)]
        op = op.removeprefix("aten::")
        self.events.append(Event(kind, op, self._line(), *operands))

    def _line(self) -> str:
        # Backward passes run in threads of the device, for a line of the caller's.
        for frame in (sys._getframe(), sys._current_frames().get(self._thread)):
            while frame is not None:
                file = frame.f_code.co_filename
                if file.startswith(self._within):
                    where = file.removeprefix(self._within)
                    return f"{where}:{frame.f_lineno} {frame.f_code.co_name}"
                frame = frame.f_back
        return "outside"


@contextmanager
def counted(within: str = PACKAGE) -> Iterator[Counts]:
    """Count all events of a block; lines are those of files under `within`."""
    counts = Counts(within)
    _core().observe(counts)
    try:
        yield counts
    finally:
        _core().observe(None)


def count(function: Callable[[], object], warm: int = 2) -> Counts:
    """Return the counts of one call after `warm` others."""
    for _ in range(warm):
        function()
    with counted() as counts:
        function()
    return counts


@contextmanager
def capacity(size: int) -> Iterator[None]:
    """Give the device so many bytes of memory for a block."""
    _core().set_capacity(size)
    try:
        yield
    finally:
        _core().set_capacity(2**32)


def host_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the host on the memory of one of the device, uncounted."""
    return _core().host_view(tensor)
