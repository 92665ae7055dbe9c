"""Hooks in the graph, by which one backward pass makes the factors of ops by rule."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from vgrad.lowering.grad_flags import own_backward_pass
from vgrad.persample.engine.captured import check_unchanged, stamped
from vgrad.persample.engine.guard import UnsupportedOp
from vgrad.persample.engine.sites import Site, Sites
from vgrad.persample.rules.table import Maker
from vgrad.torch_private.autograd import graph_nodes
from vgrad.torch_private.tensors import viewed


class Taps:
    """The hooks of one run of the loss; they hand factors on to the sites."""

    def __init__(self, sites: Sites) -> None:
        """Start without hooks."""
        self._sites = sites
        self._open = self._last = False
        self._waiting: dict[int, list] = {}

    @contextmanager
    def open(self, *, last: bool) -> Iterator[None]:
        """Run a backward pass in this block; makers are kept until the last one."""
        self._open, self._last = True, last
        try:
            yield
        finally:
            self._open = False

    def close(self) -> None:
        """Drop the makers of nodes to which no backward pass came."""
        for left in self._waiting.values():
            left.clear()

    def check_open(self) -> None:
        """Refuse what reaches a hook in another backward pass, one of the loss."""
        if not self._open:
            raise own_backward_pass("loss")

    def tap(
        self,
        op: str,
        output: Tensor,
        uses: list[tuple[Site, Maker]],
        *,
        ends: bool,
        kept: bool = True,
    ) -> Tensor:
        """Hook the node of an op's output.

        With `ends` the backward pass ends there; `kept` says that the makers refer to
        the tensors they need.
        """
        whole, output = _with_node(output)
        number, shape = whole.output_nr, output.shape
        left = [
            (site, maker, stamped(op, maker) if kept else []) for site, maker in uses
        ]
        for site, _ in uses:
            self._sites.expect(site)

        def hook(grads: tuple[Tensor | None, ...]) -> Any:
            self.check_open()
            g = grads[number]
            if g is not None:
                g = g.reshape(shape)
                g = g.clone() if self._sites.owns else g
            again = [] if self._last else left.copy()
            while left:
                site, maker, stamps = left.pop()
                check_unchanged(stamps)
                factor = None if g is None else maker(g)
                del maker, stamps  # so that inputs are freed as early as possible
                self._sites.arrived(site, factor, op, g)
                del factor
            left.extend(again)
            return (None,) * len(grads) if ends else None

        node: Any = whole.grad_fn
        node.register_prehook(hook)
        self._waiting[node._sequence_nr()] = left
        return output

    def check_reached(self, losses: Tensor) -> None:
        """Refuse a graph with hooks to which the backward pass did not come."""
        waiting = {number for number, uses in self._waiting.items() if uses}
        if waiting and not waiting.isdisjoint(
            node._sequence_nr() for node in graph_nodes([losses])
        ):
            raise UnsupportedOp(
                "loss: expected ops that a function mode sees, got one that it does "
                "not, whose result requires grad through something else than "
                'parameters, as compiled code may. Use strategy="vmap" or "loop".'
            )


def _with_node(output: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tensor that has the node to hook, and the output, copied if need be.

    An op that writes into a view replaces the view's node, never its base's.
    """
    base = viewed(output)
    if base is None or base.grad_fn is None:
        return output, output
    if _same_memory(base, output):
        return base, output
    copy = output.clone()
    return copy, copy


def _same_memory(base: Tensor, view: Tensor) -> bool:
    """Tell whether a view holds all numbers of its base in their order."""
    if base.shape == view.shape and base.stride() == view.stride():
        return True
    contiguous = base.is_contiguous() and view.is_contiguous()
    return contiguous and base.numel() == view.numel()
