"""What the recorder has to know of autograd's nodes, and of what hooks keep."""

from typing import Any

from torch import Tensor

from vgrad.persample.table import Maker


def check_unchanged(op: str, captured: list[tuple[Tensor, int]]) -> None:
    """Refuse to go on with inputs of another version than was captured."""
    for tensor, version in captured:
        if tensor._version != version:
            raise RuntimeError(
                f"{op}: expected an input that stays as it is until the backward pass, "
                f"but an op of the loss wrote into it in place."
            )


def numbers(losses: Tensor) -> set[int]:
    """Return the numbers of all nodes of a graph."""
    found: set[int] = set()
    nodes: list[Any] = [losses.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and node._sequence_nr() not in found:
            found.add(node._sequence_nr())
            nodes += [each for each, _ in node.next_functions]
    return found


def captured(maker: Maker) -> list[Tensor]:
    """Return the tensors that a function refers to."""
    cells = getattr(maker, "__closure__", None) or ()
    values = (cell.cell_contents for cell in cells)
    return [value for value in values if isinstance(value, Tensor)]


def same_memory(base: Tensor, view: Tensor) -> bool:
    """Tell whether a view holds all numbers of its base in their order."""
    if base.shape == view.shape and base.stride() == view.stride():
        return True
    contiguous = base.is_contiguous() and view.is_contiguous()
    return contiguous and base.numel() == view.numel()
