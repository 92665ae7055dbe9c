"""A graph of ops as plain Python, without ops that take time and compute nothing."""

import operator
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from vgrad.torch_private.kernels import unsafe_view
from vgrad.torch_private.tensors import OPS, makes_memory, shared, written

_aten = torch.ops.aten

_SAME = {_aten.detach.default, _aten.alias.default, _aten.lift_fresh.default}
"""Ops that return what they are given."""

_VIEWS = {
    *(_aten.view.default, _aten.unsqueeze.default, _aten.squeeze.dim),
    *(_aten.squeeze.default, _aten.squeeze.dims, _aten.permute.default),
    *(_aten.t.default, _aten.transpose.int, _aten.expand.default),
    *(_aten.slice.Tensor, _aten.select.int, unsafe_view.default),
}
"""Ops that return the memory that they are given, in another shape."""

_SEVERAL = {_aten.split.Tensor, _aten.unbind.int}
"""Ops that return several such tensors, one after the other along an axis."""

_NUMBER = _aten.scalar_tensor.default
"""The op that makes a number a tensor."""


class _Place(NamedTuple):
    """Where the numbers of a tensor are in memory."""

    size: tuple[int, ...]
    stride: tuple[int, ...]


def replayed(module: fx.GraphModule) -> Callable[..., Sequence[Tensor]]:
    """Return a function that calls the ops of a graph, one by one."""
    graph = fx.Graph()
    output = graph.graph_copy(module.graph, {})
    graph.output(output)
    own = fx.GraphModule(module, graph)
    _simplify(own)
    return _plain(own)


def _simplify(module: fx.GraphModule) -> None:
    """Take out ops that compute nothing; the numbers stay, bit by bit.

    A chain of views becomes one, of the tensor that has the memory. Numbers are made
    once, unless callers get them, who may write into them.
    """
    graph = module.graph
    results = {*graph.output_node().all_input_nodes}
    changed = written_to(graph) | _in_memory_of([*results])
    known: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        (source, start), place = _base(node), _place(node)
        if node in results and source.op == "placeholder":
            continue  # an argument may require grad where what is made of it does not
        if node.target in _SAME:
            node.replace_all_uses_with(node.args[0])
        elif node.target is _NUMBER and node not in changed:
            name = f"_number_{node.name}"
            module.register_buffer(name, node.target(*node.args, **node.kwargs))
            node.op, node.target, node.args, node.kwargs = "get_attr", name, (), {}
        elif source is not node and place is not None:
            if start == 0 and place == _place(source):
                node.replace_all_uses_with(source)
                continue
            if _begins_its_memory(source):
                node.target = _aten.as_strided.default
                node.args, node.kwargs = (source, *map(list, place), start), {}
            key = (node.target, repr(node.args), repr(node.kwargs))
            if key in known:
                node.replace_all_uses_with(known[key])
            known.setdefault(key, node)
    graph.eliminate_dead_code()
    module.recompile()


def _plain(module: fx.GraphModule) -> Callable[..., Sequence[Tensor]]:
    """Return a graph as a function of Python that calls the kernels directly.

    The code that torch makes looks up each op by four names and calls it by way of two
    functions, which takes as long as a small kernel.
    """
    code = module.graph.python_code(root_module="self")
    names = dict(code.globals)
    known: dict[str, str] = {}

    def local(match: re.Match) -> str:
        path = match.group(1)
        if path not in known:
            known[path] = f"_op_{len(known)}"
            op = operator.attrgetter(path)(torch.ops)
            names[known[path]] = getattr(op, "_op", op)
        return known[path]

    source = re.sub(r"\btorch\.ops\.([\w.]+)(?=\()", local, code.src)
    exec(compile(source, "<graph>", "exec"), names)
    return partial(names["forward"], module)


def written_to(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes whose memory an op writes to, and those that lie in it."""
    return _in_memory_of(
        [
            _argument(node, *place[:2])
            for node in graph.nodes
            if isinstance(node.target, OPS)
            for place in written(node.target)
        ]
    )


def _in_memory_of(left: list[Any]) -> set[fx.Node]:
    """Return nodes, also in lists, and those in whose memory they may lie."""
    found: set[fx.Node] = set()
    while left:
        each = left.pop()
        if isinstance(each, list | tuple):
            left += each
        elif isinstance(each, fx.Node) and each not in found:
            found.add(each)
            left += _shared(each)
    return found


def _shared(node: fx.Node) -> list[Any]:
    """Return the arguments whose memory a node may be in."""
    if node.target in _VIEWS or not isinstance(node.target, OPS):
        return node.all_input_nodes
    return [_argument(node, *place) for place in shared(node.target)]


def _argument(node: fx.Node, place: int, name: str) -> Any:
    return node.args[place] if place < len(node.args) else node.kwargs.get(name)


def _base(node: fx.Node) -> tuple[fx.Node, int]:
    """Return the node that a chain of views is of, and where in it they begin."""
    start = 0
    while True:
        several: Any = node.args[0] if node.args else None
        if node.target is operator.getitem and several.target in _SEVERAL:
            source = several.args[0]
        elif node.target in _VIEWS | _SAME:
            source = several
        else:
            return node, start
        place = _place(source)
        if place is None:
            return node, start
        start += _skipped(node, place)
        node = source


def _skipped(node: fx.Node, place: _Place) -> int:
    """Return how many numbers a view leaves out in front, of a tensor there."""
    if node.target is operator.getitem:
        several: Any = node.args[0]
        _, *rest = several.args
        width = rest.pop(0) if several.target is _aten.split.Tensor else 1
        number: Any = node.args[1]
        return number * width * place.stride[rest[0] if rest else 0]
    if node.target not in (_aten.slice.Tensor, _aten.select.int):
        return 0
    given: list[Any] = [*node.args[1:3], 0, 0]
    axis, first = given[:2]
    size = place.size[axis]
    first = 0 if first is None else first
    first = first + size if first < 0 else first
    return min(max(first, 0), size) * place.stride[axis]


def _begins_its_memory(node: fx.Node) -> bool:
    """Tell whether an op returns memory of its own; an input may begin anywhere."""
    several: Any = node.args[0] if node.target is operator.getitem else node
    return makes_memory(several.target)


def _place(node: fx.Node) -> _Place | None:
    """Return the shape and strides of what a node returns."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.is_conj() or value.is_neg():
        return None
    return _Place(tuple(value.shape), value.stride())
