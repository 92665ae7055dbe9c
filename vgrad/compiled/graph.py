"""A function of tensors as a graph of the ops that it called, and its replay."""

import operator
import random
import re
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from vgrad import conditions, tree
from vgrad.compiled.guards import Closure
from vgrad.conditions import Unrepeatable
from vgrad.generators import random_state
from vgrad.loss.values import stopped_at
from vgrad.torch_private import modes
from vgrad.torch_private.kernels import default_generator
from vgrad.torch_private.tensors import (
    OPS,
    SHOWN,
    arguments_written,
    makes_memory,
    may_draw,
    memory,
    op_name,
    with_attributes,
    writes,
)
from vgrad.torch_private.tracing import DispatchMode, Tensors, TensorWeakRef

_aten = torch.ops.aten


class Place(NamedTuple):
    """A tensor as it lies in memory: the node that made the memory, and where in it."""

    root: fx.Node
    offset: Any
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    plain: bool  # whether it is strided, and no conjugate or negative view


class Graph(NamedTuple):
    """A captured function: `module(*inputs, *closed) -> [*outputs, flag]`."""

    module: fx.GraphModule
    places: dict[fx.Node, Place]
    written: Counter[fx.Node]  # the nodes whose memory ops write into, and how many
    template: Any  # the result, with an empty tensor for each of its tensors
    closed: list[Tensor]  # tensors of the closure, further inputs
    values: Closure  # that must not have changed
    nodes: int
    draws: bool  # whether there are random ops

    def result(self, outputs: Sequence[Tensor]) -> Any:
        """Put the outputs where the function has them."""
        values = iter(outputs)
        return tree.map_tensors(partial(next, values), self.template)


def captured(function: Callable, arguments: tuple) -> Graph:
    """Run a function, and keep its ops and the values that it closes over.

    The last output of the graph is a flag: whether one of the conditions holds that
    were taken not to. Then its other outputs are not to be used.
    """
    tensors, leaves = tree.tensors(arguments), tree.tree_leaves(arguments)
    values, inputs = Closure([function, *filter(callable, leaves)]), _stand_ins(tensors)
    tape, draws, empty = _Tape(inputs), _Draws(tensors), torch.empty(0)
    before = random.getstate(), str(np.random.get_state())
    try:
        with ExitStack() as stack, conditions.collect_checks() as found:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore", UserWarning)  # eager mode has given them
            # Backward passes run here, and not in a GPU's thread, which has no mode.
            alone = torch.autograd.set_multithreading_enabled(False)
            for each in (alone, torch.no_grad(), _NoValues(), tape, draws):
                stack.enter_context(each)
            given = iter(inputs)
            result = function(*tree.map_tensors(lambda _: next(given), arguments))
            draws.check()
            flag = found[0] if found else torch.tensor(False)
            flag = torch.stack(found).any() if found[1:] else flag
            tape.end([*tree.tensors(result), flag])
            template = tree.map_tensors(lambda _: empty, result)
            del result  # of which the tape would take tensors for closed ones
    except Exception as error:
        text = str(error).partition("\n")[0]
        if not isinstance(error, Unrepeatable):
            text = f"{type(error).__name__}: {text}"
        raise Unrepeatable(f"{text} {stopped_at(error)}".rstrip()) from error
    if before != (random.getstate(), str(np.random.get_state())):
        raise Unrepeatable("it draws random numbers from Python or numpy")
    if not values.hold():
        raise Unrepeatable("it changes values that it closes over")
    values.also(closed := tape.closed())
    if not {*tape.inputs[len(tensors) :]}.isdisjoint(tape.written):
        raise Unrepeatable("it writes into a tensor that it closes over")
    module = fx.GraphModule(tape.literals, tape.graph)
    module.graph.eliminate_dead_code()
    module.recompile()
    ops = [node.target for node in module.graph.nodes if node.op == "call_function"]
    return Graph(
        module,
        tape.places,
        tape.written,
        template,
        closed,
        values,
        nodes=len(ops),
        draws=any(map(may_draw, ops)),
    )


def _stand_ins(tensors: list[Tensor]) -> list[Tensor]:
    """Return other objects for tensors, one that is there twice stays one."""
    # An argument that is closed over too must not become the graph's argument.
    stand_ins = {id(x): x.detach().requires_grad_(x.requires_grad) for x in tensors}
    return [with_attributes(stand_ins[id(each)], each) for each in tensors]


class _NoValues(TorchFunctionMode):
    """Refuses reads of values by Python, of which torch tells no mode of ops."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if conditions.checks_collected():
            name, data = modes.op_name(func), (*args, *(kwargs or {}).values())
            lists = (each for each in data if isinstance(each, list | tuple))
            if (
                name in _READS
                or (func in _MAKERS and any(map(tree.tensors, lists)))
                or (name == "tensor_split" and len(tree.tensors(data)) > 1)
            ):
                raise Unrepeatable(f"{name} hands values to Python")
        return func(*args, **(kwargs or {}))


_MAKERS = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor}
"""Functions that read the values of tensors in a list."""

_READS = {"item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__"}
_READS |= {"__index__", "__complex__", "__dlpack__", "equal", "allclose", "is_nonzero"}
_READS |= {"data_ptr", "__repr__", "__str__"}


class _Tape(DispatchMode):
    """Notes the ops below torch's transforms and autograd as the nodes of a graph.

    Refuses ops that read values, as of an index that is a tensor, or whose results have
    shapes that depend on values. Literals of the code, and numbers computed from them
    alone, may be read.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.graph, self.literals = fx.Graph(), nn.Module()
        self.places: dict[fx.Node, Place] = {}
        self.written: Counter[fx.Node] = Counter()
        self.inputs: list[fx.Node] = []
        self._nodes: Any = Tensors()
        self._known: set[fx.Node] = set()  # whose memory depends on literals alone
        self._closed: list[tuple[fx.Node, TensorWeakRef]] = []
        for each in tensors:
            self._input(f"input_{len(self.inputs)}", each)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not conditions.checks_collected():  # values of shapes and options alone
            return func(*args, **kwargs)
        if func is _aten.lift_fresh.default and args[0] not in self._nodes:
            # The function may write into it later.
            name = f"literal_{len(self.places)}"
            self.literals.register_buffer(name, args[0].clone())
            kept = self.graph.get_attr(name)
            node = self.graph.call_function(_aten.clone.default, (kept,))
            self._known.add(node)
            self._note(node, args[0], {})
            return args[0]
        given = tree.map_tensors(self._node, (args, kwargs))
        inputs = tree.tensors((args, kwargs))
        roots = [self.places[self._nodes[each]].root for each in inputs]
        known = self._known.issuperset(roots)
        if not known:
            _check_values(func, args)
        output = func(*args, **kwargs)
        if known and torch.Tag.data_dependent_output in func.tags:
            return output
        known &= not may_draw(func)
        written = tree.tensors([*arguments_written(func, args, kwargs)])
        changed = [self.places[self._nodes[each]].root for each in written]
        self.written.update(changed)
        self._known.difference_update(() if known else changed)
        node = self.graph.call_function(func, *given)
        self._note(node, output, dict(zip(map(memory, inputs), roots, strict=True)))
        if known:
            self._known.update(self._nodes[each] for each in tree.tensors([output]))
        return output

    def end(self, outputs: list[Tensor]) -> None:
        """Take tensors for the results."""
        self.graph.output([*map(self._node, outputs)])

    def closed(self) -> list[Tensor]:
        """Return the tensors that the function closes over, the last inputs.

        They outlive its run. Others come of code that the tape does not see.
        """
        found: list[Tensor] = []
        for node, reference in self._closed:
            if (tensor := reference()) is None:
                shape = tuple(self.places[node].shape)
                raise Unrepeatable(
                    f"it makes a tensor of shape {shape} by code that is not torch's"
                )
            found.append(tensor)
        return found

    def _node(self, tensor: Tensor) -> fx.Node:
        if tensor not in self._nodes:
            self._input(f"closed_{len(self._closed)}", tensor)
            self._closed.append((self._nodes[tensor], TensorWeakRef(tensor)))
        return self._nodes[tensor]

    def _input(self, name: str, tensor: Tensor) -> None:
        last = self.inputs[-1:]
        at = self.graph.inserting_after if last else self.graph.inserting_before
        with at(*last):
            self.inputs.append(self.graph.placeholder(name))
        self._note(self.inputs[-1], tensor, {})

    def _note(self, node: fx.Node, output: Any, roots: dict[Any, fx.Node]) -> None:
        """Note the nodes of a result's tensors; `roots` made the memory of inputs."""
        if isinstance(output, list | tuple):
            for number, each in enumerate(output):
                part = self.graph.call_function(operator.getitem, (node, number))
                self._note(part, each, roots)
        if not isinstance(output, Tensor):
            return
        own = memory(output)
        root = node if own is None else roots.get(own, node)
        plain = output.layout is torch.strided
        where = (output.storage_offset(), output.shape, output.stride())
        self.places[node] = Place(
            root,
            *(where if plain else (0, output.shape, ())),
            output.dtype,
            output.device,
            plain and not (output.is_conj() or output.is_neg()),
        )
        self._nodes[output] = node


def _check_values(func: Any, args: tuple) -> None:
    """Refuse ops that read values, or whose results have shapes that depend on them."""
    if torch.Tag.data_dependent_output in func.tags:
        raise Unrepeatable("an op takes the value of a tensor for a number")
    if torch.Tag.dynamic_output_shape in func.tags:
        indices = args[1] if func is _aten.index.Tensor else ()
        masks = {torch.bool, torch.uint8}  # which select entries, and not by numbers
        kinds = {each.dtype for each in indices if each is not None}
        if func is not _aten.index.Tensor or masks & kinds:
            raise Unrepeatable(f"the shape of a result of {func} depends on values")


# Random ops, drawn once where a checkpoint runs them again.


class _Draw(NamedTuple):
    """A random op, and the state of its generator before and after."""

    before: Tensor
    after: Tensor
    op: str  # and its arguments, shapes for tensors
    result: Any  # a copy, to which no later op writes


class _Draws(DispatchMode):
    """Repeats the results of random ops where the generator's state is restored."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        host, others = random_state(tensors)
        self._states = {torch.device("cpu"): host, **others}  # after the last new draw
        self._drawn: list[_Draw] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not may_draw(func):
            return func(*args, **kwargs)
        if kwargs.get("generator") is not None:
            raise Unrepeatable("it draws from a generator of its own")
        tensors = tree.tensors((args, kwargs))
        device = torch.device(
            tensors[0].device if tensors else kwargs.get("device") or "cpu"
        )
        generator = default_generator(device)
        before = generator.get_state()
        shapes = tree.map_tensors(lambda x: (x.shape, x.device), args)
        op = f"{func} {shapes} {kwargs}"
        for draw in self._drawn:
            if _equal(draw.before, before):
                with conditions.static_values():  # which leaves it out of the graph
                    again = tree.tensors(func(*args, **kwargs))
                same = map(_equal, again, tree.tensors(draw.result))
                hidden = writes(func) and op_name(func) not in SHOWN
                if op != draw.op or hidden or not all(same):
                    raise Unrepeatable(
                        f"{op_name(func)} draws from a state a second time"
                    )
                if writes(func):
                    return tensors[0].copy_(draw.result)
                return tree.map_tensors(Tensor.clone, draw.result)
        result, after = func(*args, **kwargs), generator.get_state()
        if not _equal(before, after):
            self._check(device, before)
            self._states[device] = after
            kept = tree.map_tensors(Tensor.clone, result)
            self._drawn.append(_Draw(before, after, op, kept))
        return result

    def check(self) -> None:
        """Refuse a function that leaves generators in another state than its graph."""
        for device in self._states:
            self._check(device, default_generator(device).get_state())

    def _check(self, device: torch.device, state: Tensor) -> None:
        if device in self._states and not _equal(self._states[device], state):
            raise Unrepeatable("it seeds torch's generators, or puts them back")


def _equal(one: Tensor, other: Tensor) -> bool:
    with conditions.static_values():
        return torch.equal(one, other)


# The replay.


def replayed(graph: Graph) -> Callable[..., Sequence[Tensor]]:
    """Return a function that calls the ops of a graph, one by one.

    Ops that compute nothing are left out; a chain of views is one of the memory.
    """
    copy, copies = fx.Graph(), {}
    copy.output(copy.graph_copy(graph.module.graph, copies))
    module = fx.GraphModule(graph.module, copy)
    results = graph.module.graph.output_node().all_input_nodes
    views: dict[Place, fx.Node] = {}
    for node, own in copies.items():
        place = graph.places.get(node)
        if place is None or node.op != "call_function" or node is place.root:
            continue
        root, source = place.root, copies[place.root]
        whole = graph.places[root]
        alike = place.plain and whole.plain and place.dtype == whole.dtype
        # An argument may require grad where a view of it does not.
        returned = node in results and root.op == "placeholder"
        writing = isinstance(node.target, OPS) and writes(node.target)
        if not alike or returned or writing:
            continue
        if place[1:4] == whole[1:4]:
            own.replace_all_uses_with(source)
        elif place in views:
            own.replace_all_uses_with(views[place])
        else:
            # An input may begin anywhere in its memory.
            maker: Any = root.args[0] if root.target is operator.getitem else root
            if makes_memory(maker.target):
                own.target = _aten.as_strided.default
                layout = [*place.shape], [*place.stride], place.offset
                own.args, own.kwargs = (source, *layout), {}
            views[place] = own
    copy.eliminate_dead_code()
    module.recompile()
    return _as_function(module)


def _as_function(module: fx.GraphModule) -> Callable[..., Sequence[Tensor]]:
    """Return a graph as a function of Python that calls the kernels directly."""
    # Torch's own code looks up an op by four names and calls two functions around it.
    code = module.graph.python_code(root_module="self")
    names = dict(code.globals)
    ops: dict[str, str] = {}

    def local(match: re.Match) -> str:
        path = match.group(1)
        if path not in ops:
            ops[path] = f"_op_{len(ops)}"
            op = operator.attrgetter(path)(torch.ops)
            names[ops[path]] = getattr(op, "_op", op)
        return ops[path]

    source = re.sub(r"\btorch\.ops\.([\w.]+)(?=\()", local, code.src)
    exec(compile(source, "<graph>", "exec"), names)
    return partial(names["forward"], module)
