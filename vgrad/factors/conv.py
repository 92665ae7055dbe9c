"""The factor of a convolution's weight, and the six forms of its norms.

B samples, C channels in, O channels out, G groups, K numbers in a kernel, T positions
of the output. The gradient of one sample is, in every group, a sum over positions of
outer products of the output's gradient and the patch of the input that is seen there.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vgrad.devices import is_host
from vgrad.factors import costs, products, reductions
from vgrad.factors.base import (
    Dense,
    Factor,
    Norms,
    Outer,
    Pair,
    Probes,
    Products,
)
from vgrad.torch_private import kernels

_AT_ONCE = 2**27
"""Numbers of windows in memory at once."""


@dataclass(frozen=True)
class Conv(Pair):
    """`inputs [B, C, *space]` and `outputs [B, O, *space]` with the geometry.

    `pads` are the argument of `F.pad` for the zeros around the inputs.
    """

    stride: tuple[int, ...]
    pads: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def form(self) -> costs.ConvForm:
        """How norms are computed."""
        before, after = reversed(self.pads[::2]), reversed(self.pads[1::2])
        sizes = zip(self.inputs.shape[2:], before, after, strict=True)
        pixels = math.prod(map(sum, sizes))
        positions = math.prod(self.outputs.shape[2:])
        kinds = self.plain, products.in_halves(self.inputs, self.outputs)
        return costs.conv_form(pixels, positions, self.shape, self.groups, *kinds)

    @property
    def plain(self) -> bool:
        """Whether torch's convolutions are plain sums of products, on a host."""
        # Elsewhere an algorithm may mix positions before it rounds, which no bound
        # covers, or round the sum over samples.
        device = self.inputs.device
        return is_host(device) and products.bits(device, "conv") == 24

    def grad(self) -> Tensor:
        """Gradients by the form that is cheapest, not by products of positions."""
        form = self.form
        if form == "groups":
            return self._by_groups()
        if not self.plain or form == "windows":
            return self._by_windows().to(self.inputs.dtype)
        if form == "alone":
            return self._one_by_one()
        return self._by_swapping() if form == "swapped" else self._by_offsets()

    def with_norms(self) -> tuple[Factor, Norms]:
        """Take norms without gradients where they are cheaper so."""
        form = self.form
        if form == "windows":
            return Dense(self._by_windows()).with_norms()
        if form != "gram":
            return super().with_norms()
        if not self.plain:
            norms = self._unfolded().with_norms()[1]
            norms = (part.norm() if isinstance(part, Dense) else part for part in norms)
            return self, [norm._replace(factor=self) for norm in norms]
        b = products.self_products(self._split(self.outputs).flatten(2).mT)
        length = max(math.prod(self.shape[1:]), self.shape[0])
        return self, [Products.of(self._patch_products(), b, self, length)]

    def weighted(self, weights: Tensor) -> Tensor:
        """Weight gradient of an ordinary convolution, of scaled samples."""
        if self.form == "groups" and not self.plain:
            return Dense(self.grad()).weighted(weights)
        if not self.plain:
            pairs = zip(self.outers(), weights.split(self._step), strict=True)
            return reductions.total([part.weighted(chunk) for part, chunk in pairs])
        inputs, outputs = products.exact(self.inputs, self.outputs)
        column = weights.to(inputs.dtype).view(-1, *(1,) * (inputs.ndim - 1))
        if inputs.numel() < outputs.numel():
            inputs = inputs * column
        else:
            outputs = outputs * column
        step = max(1, reductions.ROWS_AT_ONCE // math.prod(outputs.shape[2:]))
        parts = zip(inputs.split(step), outputs.split(step), strict=True)
        return reductions.total([self._weight_gradient(*part, 1) for part in parts])

    def project(self, probes: Probes) -> Tensor:
        """Convolve with the right sides of the probes, multiply with the left ones."""
        if not self.plain:
            return torch.cat([part.project(probes) for part in self.outers()])
        if self.groups > 1 or probes.left is None:
            return super().project(probes)
        if not probes.cheaper_by_sides(math.prod(self.outputs.shape[2:])):
            return super().project(probes)
        inputs, right = products.exact(self._padded(), probes.right)
        outputs, left = products.exact(self.outputs, probes.left)
        positions = outputs.flatten(2)
        seen = positions.new_zeros(self.size, len(right), positions.shape[2])
        kernels = right.view(len(right), self.shape[1], -1)
        for number, window in enumerate(self._windows(inputs)):
            seen += kernels[:, :, number] @ window.flatten(2)
        return probes.summed((left @ positions).mT, seen.mT)

    @property
    def _step(self) -> int:
        """How many samples have their windows in memory at once."""
        seen = math.prod(self.outputs.shape[2:]) * math.prod(self.shape[1:])
        return max(1, _AT_ONCE // max(1, seen * self.groups))

    def outers(self) -> Iterator[Outer]:
        """Yield products of outputs and windows, of some samples after the other."""
        pairs = zip(*(side.split(self._step) for side in self.sides), strict=True)
        return (self._of(*pair)._unfolded() for pair in pairs)

    def _unfolded(self) -> Outer:
        """Return the product of outputs and the windows of inputs that they meet."""
        seen, count = self._padded(), len(self.stride)
        geometry = zip(self.shape[2:], self.stride, self.dilation, strict=True)
        for axis, (size, step, gap) in enumerate(geometry, start=2):
            seen = seen.unfold(axis, gap * (size - 1) + 1, step)[..., ::gap]
            seen = seen.narrow(axis, 0, self.outputs.shape[axis])
        axes = range(3, 3 + count), [2], range(3 + count, 3 + 2 * count)
        seen = seen.unflatten(1, (self.groups, self.shape[1]))
        seen = seen.permute(0, 1, *itertools.chain(*axes))
        outputs = self.outputs.flatten(2).unflatten(1, (self.groups, -1)).mT
        sizes = *outputs.shape[:3], math.prod(self.shape[1:])
        return Outer(seen.reshape(sizes), outputs, self.shape)

    def _by_windows(self) -> Tensor:
        """Multiply outputs with the windows of inputs that they meet."""
        parts = [part.formed() for part in self.outers()]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _by_groups(self) -> Tensor:
        # On a device in the dtype at hand, since norms are taken of these numbers.
        pair = products.exact(*self.sides) if self.plain else self.sides
        inputs, outputs = (side.flatten(0, 1)[None] for side in pair)
        grads = self._weight_gradient(inputs, outputs, self.size)
        return grads.view(self.size, *self.shape).to(self.inputs.dtype)

    def _one_by_one(self) -> Tensor:
        inputs, outputs = products.exact(self.inputs, self.outputs)
        pairs = zip(inputs.split(1), outputs.split(1), strict=True)
        grads = [self._weight_gradient(*pair, 1) for pair in pairs]
        return torch.stack(grads).to(self.inputs.dtype)

    def _by_swapping(self) -> Tensor:
        """Convolve every input channel with the outputs, which are its kernels."""
        # Stride and dilation change places too. Some rows of the outputs at a time, as
        # one convolution sums over all positions in float32.
        inputs, outputs = products.exact(self._padded(), self.outputs)
        step = max(1, costs.FEW_POSITIONS // math.prod(outputs.shape[3:]))
        inputs = inputs.unflatten(1, (self.groups, -1)).flatten(0, 1).transpose(0, 1)
        extent = self.dilation[0] * (self.shape[2] - 1) + 1
        parts = []
        for number, part in enumerate(outputs.split(step, 2)):
            seen = self.stride[0] * (part.shape[2] - 1) + extent
            rows = inputs.narrow(2, number * step * self.stride[0], seen)
            parts.append(self._convolved(rows, part.flatten(0, 1)[:, None]))
        grads = reductions.total(parts).unflatten(1, (self.size, -1))
        return grads.movedim(0, 2).to(self.inputs.dtype)

    def _convolved(self, inputs: Tensor, outputs: Tensor) -> Tensor:
        op: Callable = (F.conv1d, F.conv2d, F.conv3d)[len(self.stride) - 1]
        swapped = {"stride": self.dilation, "dilation": self.stride}
        grads = op(inputs, outputs, groups=inputs.shape[1], **swapped)
        for axis, size in enumerate(self.shape[2:], start=2):
            grads = grads.narrow(axis, 0, size)
        return grads

    def _by_offsets(self) -> Tensor:
        """Multiply, for each number of the kernel, outputs with the inputs it sees."""
        inputs, outputs = products.exact(self._padded(), self.outputs)
        left = self._split(outputs).flatten(2)
        kernel = self.shape[2:]
        sizes = (self.size, math.prod(kernel), *self.shape[:2])
        grads = self.inputs.new_empty(sizes)
        for number, window in enumerate(self._windows(self._split(inputs))):
            right, out = window.flatten(2).mT, grads[:, number]
            if self.groups == 1 and out.dtype == left.dtype:
                torch.bmm(left, right, out=out)
            else:
                out.copy_(torch.bmm(left, right).view(out.shape))
        # The kernel's axis comes last for the user, and stays first in memory.
        return grads.movedim(1, -1).unflatten(-1, kernel)

    def _patch_products(self) -> Tensor:
        """Inner products of the patches seen at two positions, [B * G, T, T]."""
        # A sum, over the kernel, of shifted products of pixels; products of patches
        # would take K times as many operations, since each pixel is in K of them.
        inputs = self._split(products.exact(self._padded())[0])
        space, count = inputs.shape[2:], len(inputs)
        pixels = products.self_products(inputs.flatten(2).mT)
        pixels = pixels.view(count, *space, *space)
        sums = pixels.new_zeros(())
        for window in self._windows(pixels, leading=1, times=2):
            sums = sums + window if sums.ndim == 0 else sums.add_(window)
        positions = math.prod(self.outputs.shape[2:])
        return sums.reshape(count, positions, positions)

    def _windows(
        self, tensor: Tensor, *, leading: int = 2, times: int = 1
    ) -> Iterator[Tensor]:
        """Yield, for each number of the kernel, the positions of inputs it meets."""
        for offset in itertools.product(*map(range, self.shape[2:])):
            window = tuple(
                slice(at * gap, at * gap + step * (count - 1) + 1, step)
                for at, gap, step, count in zip(
                    offset,
                    self.dilation,
                    self.stride,
                    self.outputs.shape[2:],
                    strict=True,
                )
            )
            yield tensor[(slice(None),) * leading + window * times]

    def _split(self, tensor: Tensor) -> Tensor:
        """Make each group a sample of its own, [B * G, channels / G, *space]."""
        if self.groups == 1:
            return tensor
        return tensor.unflatten(1, (self.groups, -1)).flatten(0, 1)

    def _padded(self) -> Tensor:
        return F.pad(self.inputs, self.pads) if any(self.pads) else self.inputs

    def _weight_gradient(self, inputs: Tensor, outputs: Tensor, samples: int) -> Tensor:
        # Only the sizes of the weight are read, so it need not exist.
        sizes = (samples * self.shape[0], *self.shape[1:])
        padding = self.pads[::-2]
        if padding != self.pads[-2::-2] or min(padding) < 0:
            inputs, padding = F.pad(inputs, self.pads), (0,) * len(padding)
        return kernels.convolution_backward(
            outputs,
            inputs,
            inputs.new_empty(()).expand(sizes),
            None,
            self.stride,
            padding,
            self.dilation,
            False,
            (0,) * len(padding),
            samples * self.groups,
            [False, True, False],
        )[1]
