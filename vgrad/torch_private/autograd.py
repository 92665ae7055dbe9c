"""Tensors that autograd saves, checkpoints that recompute them, and nodes of graphs."""

import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor
from torch._C import _autograd  # pyright: ignore[reportAttributeAccessIssue]
from torch.autograd import function as _functions
from torch.autograd.graph import saved_tensors_hooks
from torch.autograd.variable import Variable
from torch.nn.modules._functions import BackwardHookFunction as ModuleHooks
from torch.utils import checkpoint as checkpoints
from torch.utils.checkpoint import CheckpointFunction as Reentrant
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import BackwardHook

from vgrad.torch_private import modes
from vgrad.torch_private.tensors import OPS, leaf, version_of

__all__ = ["ModuleHooks", "Reentrant"]

# `ModuleHooks` is the identity on whose nodes torch puts the backward hooks of modules.


# The classes of all nodes that torch compiles in. Nodes of an autograd.Function have
# classes of Python, and nodes that a library compiles share one class.
_COMPILED: Any = torch._C
_OWN = {kind for kind in vars(_COMPILED._functions).values() if isinstance(kind, type)}


def graph_nodes(
    tensors: Iterable[Tensor], stop: Callable[[Any], bool] | None = None
) -> list[Any]:
    """Return the nodes of the graphs of these tensors, but none at or behind a stop."""
    nodes: list[Any] = []
    pending: list[Any] = [tensor.grad_fn for tensor in tensors]
    seen: set[Any] = {None}
    while pending:
        node = pending.pop()
        if node in seen or (stop is not None and stop(node)):
            continue
        seen.add(node)
        nodes.append(node)
        for following, _ in node.next_functions:
            pending.append(following)
    return nodes


def coarsest(tensor: Tensor) -> float:
    """Return the largest rounding of a gradient in the graph of a tensor."""
    metadata = [info for node in graph_nodes([tensor]) for info in node._input_metadata]
    return max((torch.finfo(info.dtype).eps for info in metadata), default=0.0)


def foreign_nodes(tensors: Iterable[Tensor]) -> list[str]:
    """Name the nodes of these graphs whose backward passes are not torch's own."""
    nodes = graph_nodes(tensors)
    if _OWN.issuperset(map(type, nodes)):
        return []
    others = [node for node in nodes if type(node) not in _OWN]
    functions = [getattr(type(node), "_forward_cls", None) for node in others]
    # Functions of vgrad write into memory of their own alone.
    modules = [getattr(function, "__module__", "") for function in functions]
    pairs = zip(others, modules, strict=True)
    return [node.name() for node, module in pairs if not module.startswith("vgrad.")]


def is_foreign_op(func: Callable) -> bool:
    """Return whether a function is an op of `torch.ops` that a library registered."""
    return isinstance(func, OPS) and not str(func).startswith(("aten.", "prims."))


Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""The functions that pack a tensor which autograd saves, and unpack it."""


innermost_hooks = _autograd._top_saved_tensors_default_hooks
"""With False, as `hooks`, without a call of Python, for code that is not traced."""


def hooks() -> Hooks | None:
    """Return the hooks on saved tensors that are at work, the innermost ones."""
    return innermost_hooks(False)


# Dynamo, which cannot trace it, may take the answer for a constant. That is
# torch.compiler.assume_constant_result without an import of all of Dynamo.
hooks._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def plain() -> AbstractContextManager:
    """Save tensors as they are in this block, whatever hooks are around it."""
    if hooks() is None:
        return nullcontext()
    return saved_tensors_hooks(_unchanged, _unchanged)


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor.detach()  # the tensor itself would make a cycle


def keeps_values(pack: Callable) -> bool:
    """Return whether hooks keep values: of checkpoints and `save_on_cpu`."""
    return getattr(pack, "__qualname__", "").startswith((_FIRST, *_OTHERS))


# The classes of hooks in torch/utils/checkpoint.py, of the first run and of the re-run.
_FIRST, *_OTHERS = "_checkpoint_hook.", "_recomputation_hook.", "save_on_cpu."


def unpack_at_once(check: Callable[[Tensor, Tensor], None]) -> None:
    """Have the hooks at work unpack each tensor that they pack, for a check of both."""
    pack, unpack = _autograd._top_saved_tensors_default_hooks(False)

    def packed(tensor: Tensor) -> Any:
        handle = pack(tensor)
        check(tensor, unpack(handle))
        return handle

    _autograd._pop_saved_tensors_default_hooks()
    _autograd._push_saved_tensors_default_hooks(packed, unpack)


def repeats(pack: Callable, around: Callable[[], AbstractContextManager]) -> None:
    """Enter a block around the re-run of the checkpoint of a hook.

    By then the modes, transforms and values around the checkpoint are gone.
    """
    if not getattr(pack, "__qualname__", "").startswith(_FIRST):
        return
    cells = zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=True)
    frame = dict(cells)["frame"].cell_contents  # a `_CheckpointFrame`
    run = frame.recompute_fn
    # Only under transforms: a read here makes the hooks of a region around this one
    # run it once more.
    versions = _versions(_inputs(frame)) if modes.inside_transform() else []

    def recompute(*args: Any) -> Any:
        if _versions(args) != versions:
            raise RuntimeError(
                "checkpoint: expected arguments that stay as they are until the "
                "backward pass, but an op wrote into one in place. Copy it first."
            )
        with around():
            return run(*args)

    frame.recompute_fn = recompute


def _inputs(frame: Any) -> Sequence[Any]:
    if hasattr(frame, "get_inputs"):
        return frame.get_inputs()
    saver = frame.input_saver.grad_fn  # in older versions of torch
    return saver.get_args(saver.saved_tensors)


def close(error: BaseException) -> None:
    """End the hooks of checkpoints that an exception has passed, innermost first."""
    # Before torch 2.13 they stay at work until its traceback is freed.
    if _CLOSED_BY_TORCH:
        return
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        if frame.f_code is _CHECKPOINT and "gen" in frame.f_locals:
            frame.f_locals["gen"].close()


_CLOSED_BY_TORCH = torch.__version__ >= "2.13"  # by `checkpoint`
_CHECKPOINT = inspect.unwrap(checkpoint).__code__


def _versions(args: Sequence[Any]) -> list[int]:
    # Of wrapped tensors, which autograd does not check.
    wrapped = [t for t in args if isinstance(t, Tensor) and modes.is_wrapped(t)]
    return [version_of(modes.unwrap_all(tensor)) for tensor in wrapped]


SAVES_ARGUMENTS = getattr(checkpoints, "_NoopSaveInputs", None)
"""The autograd.Function by which a checkpoint saves its arguments before torch 2.12.

It has no vmap rule, and a checkpoint reads the `grad_fn` of its result alone.
"""


class SavedArguments:
    """The arguments of a checkpoint: the result of `SAVES_ARGUMENTS`, and its node."""

    saved_tensors = ()

    def __init__(self, *args: Any) -> None:
        self._records = torch.is_grad_enabled()
        active = hooks()
        self._args = [
            _saved(arg, active) if isinstance(arg, Tensor) else lambda arg=arg: arg
            for arg in args
        ]

    @property
    def grad_fn(self) -> "SavedArguments | None":
        """The node, None without grad mode, where a checkpoint saves nothing."""
        return self if self._records else None

    def get_args(self, _: Sequence[Tensor]) -> list[Any]:
        """Return the arguments."""
        return [arg() for arg in self._args]


def _saved(tensor: Tensor, active: Hooks | None) -> Callable[[], Tensor]:
    # As torch does from 2.12 on, by `_make_saved_tensor`.
    if active is None:
        version = version_of(tensor)

        def unchanged() -> Tensor:
            if version_of(tensor) != version:
                raise RuntimeError(
                    "checkpoint: one of the variables needed for gradient computation "
                    "has been modified by an inplace operation. Copy it first."
                )
            return tensor

        return unchanged
    pack, unpack = active
    with torch.no_grad():
        packed = pack(tensor)
    requires_grad = tensor.requires_grad

    def unpacked() -> Tensor:
        with torch.no_grad():
            value = unpack(packed)
        return leaf(value) if requires_grad else value

    return unpacked


def hooked_call() -> Any:
    """Return the `BackwardHook` that torch sets up for a call of a module, or None."""
    frame = sys._getframe()
    while frame is not None and frame.f_code is not _SETS_UP:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]


_SETS_UP = BackwardHook._apply_on_tensors.__code__


def reenters(loss: Tensor) -> bool:
    """Return whether a graph has a re-entrant checkpoint, which sets `.grad` alone."""
    return any(isinstance(node, _OF_REENTRANT) for node in graph_nodes([loss]))


def gradients(
    output: Tensor, inputs: tuple[Tensor, ...], grad: Tensor, *, retain_graph: bool
) -> Sequence[Tensor | None]:
    """Return the gradients at some inputs, from one at the output, of its shape."""
    # `torch.autograd.grad` compares the shapes in twice the time of a small pass.
    return _ENGINE.run_backward(
        (output,),
        (grad,),
        retain_graph,
        False,
        inputs,
        allow_unreachable=True,
        accumulate_grad=False,
    )


_ENGINE: Any = Variable._execution_engine


REENTRANT_ERROR = (
    "checkpoint(use_reentrant=True): expected a checkpoint that autograd can "
    "differentiate for other gradients than .grad, got a re-entrant one. Pass "
    "use_reentrant=False."
)

_OF_REENTRANT = Reentrant._backward_cls  # pyright: ignore[reportAttributeAccessIssue]


# Under transforms `Function.apply` hands a call to `custom_function_call`, which modes
# see, but raises for a class that inherits `setup_context`. It looks at that attribute
# once, and reads the answer twice: whether to bind arguments to the signature of
# `forward`, which in the old style begins with a context, and whether not to raise.
_MODULE: Any = _functions
_BASE = _MODULE.Function.setup_context
_BOUND: Any = getattr(_MODULE, "_bind_default_args", None)  # of torch 2.14 on
_NODES: Any = _autograd
_PUSH: Any = getattr(_NODES, "_push_node_creation_hook", None)  # likewise
_LOCK = threading.Lock()
_BLOCKS: list[None] = []
_HERE: ContextVar[Any] = ContextVar("here", default=None)  # the last such `forward`


@contextmanager
def for_all(*, old_style: bool) -> Iterator[None]:
    """Refuse hooks on nodes in this thread's block; show calls in the old style."""
    with _LOCK:
        _BLOCKS.append(None)
        _patch(_INHERITED, _bound, _pushed)
    shown = old_style or type(_HERE.get()) is list  # by a loss around this one
    token = _HERE.set([] if shown else ())
    try:
        yield
    finally:
        _HERE.reset(token)
        with _LOCK:
            _BLOCKS.pop()
            if not _BLOCKS:
                _patch(staticmethod(_BASE), _BOUND, _PUSH)


def _patch(setup_context: Any, bind: Any, push: Any) -> None:
    _MODULE.Function.setup_context = setup_context
    if _PUSH is not None:
        _MODULE._bind_default_args, _NODES._push_node_creation_hook = bind, push


class _Inherited:
    """The `setup_context` of classes in the old style, which counts as their own."""

    def __get__(self, _: Any, function: Any) -> Any:
        if type(_HERE.get()) is not list or not modes.inside_transform():
            return _BASE
        _HERE.get()[:] = [function.forward]
        return self

    def __ne__(self, other: object) -> Any:
        return self

    def __bool__(self) -> bool:  # read by torch before 2.14, which binds for itself
        return not (_HERE.get() or [None]).pop()


_INHERITED: Any = _Inherited()


def _bound(forward: Callable, args: tuple, kwargs: dict | None) -> Any:
    old = (_HERE.get() or [None]).pop() == forward
    return (args, kwargs or {}) if old else _BOUND(forward, args, kwargs)


def _pushed(hook: Callable) -> None:
    if _HERE.get() is not None:
        raise RuntimeError("node_creation_hook inside of a loss for all")
    _PUSH(hook)


with torch.inference_mode(False), torch.enable_grad():
    _PROBE = torch.ones((), device="cpu", requires_grad=True).view(())
_CHANGED = _PROBE.detach()


@_PROBE.register_hook
def _popped(_: Tensor) -> Tensor | None:
    # It fails where there is none, which is all that torch tells of such hooks, and
    # harms none: after each node of a backward pass their stack is put back.
    with suppress(RuntimeError):
        _NODES._pop_node_creation_hook()
        return _CHANGED


def node_hooks() -> bool:
    """Return whether hooks on the creation of nodes are at work."""
    if _PUSH is None:
        return False
    run, on = Variable._execution_engine.run_backward, (_PROBE,)
    return run(on, on, True, False, on, False, accumulate_grad=False)[0] is _CHANGED
