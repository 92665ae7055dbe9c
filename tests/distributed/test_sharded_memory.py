"""What a rank holds of parameters that are cut among ranks."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import vgrad
from tests.distributed.processes import Processes
from vgrad import optim
from vgrad.distributed import Ranks, shard, sharding
from vgrad.persample.engine import Inputs


class Bytes(TorchDispatchMode):
    """Counts the memory of tensors that ops have made and somebody holds."""

    def __init__(self):
        super().__init__()
        self.peak = self.now = 0
        self._held = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(kind.__name__ in ("Lazy", "DTensor") for kind in types):
            return NotImplemented  # the ops that such a tensor runs come one by one
        found = func(*args, **kwargs)
        for leaf in pytree.tree_leaves(found):
            if type(leaf) is torch.Tensor and leaf.device.type == "cpu":
                self.count(leaf)
        return found

    def count(self, tensor):
        storage = tensor.untyped_storage()
        gone = [key for key, (ref, _) in self._held.items() if ref.expired()]
        for key in gone:
            del self._held[key]
        self._held[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self.now = sum(size for _, size in self._held.values())
        self.peak = max(self.peak, self.now)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.last = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.inner = nn.Linear(width, 4 * width)
        self.outer = nn.Linear(4 * width, width)

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.outer(F.gelu(self.inner(self.last(x))))


class Language(nn.Module):
    """In the proportions of GPT-2: the table is a third of all parameters."""

    def __init__(self, vocabulary, width, depth, length):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def next_tokens(logits, tokens):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _bytes(size, sizes, passes):
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    ranks = Ranks.of("test", mesh, "dp")
    torch.manual_seed(0)
    fmodel, params, _ = vgrad.make_functional_with_buffers(Language(*sizes))
    loss = vgrad.sample_loss(fmodel, next_tokens)
    tokens = torch.randint(sizes[0], (1, sizes[-1]))
    clipped = vgrad.clipped_grad(loss, max_norm=1.0, strategy="recorded", passes=passes)
    one = 4 * sum(value.nbytes for value in params.values())  # with sums and moments
    tx = optim.adamw(1e-3)
    params = shard({name: value.detach() for name, value in params.items()}, mesh)
    with Bytes() as counted, torch.no_grad():
        for value in params.values():
            counted.count(value.to_local())
        state = tx.init(params)
        for _ in range(2):
            inputs = Inputs(params, {}, (tokens, tokens))
            grads = sharding.sharded_call(clipped, ranks, inputs)
            params, state = optim.step(tx, grads.grads, state, params, donate=True)
        assert all(isinstance(value, DTensor) for value in params.values())
        counted.count(torch.zeros(()))
    return counted.now / one, counted.peak / one


def _check(processes, sizes):
    for passes in (1, 2):
        for rest, peak in processes.run(_bytes, 4, sizes, passes):
            assert rest <= 0.26
            assert peak <= 0.42


def test_memory_is_that_of_the_parts_and_of_one_parameter(ranks):
    _check(ranks(4), (2043, 128, 3, 4))


@pytest.mark.large
def test_so_it_is_for_gpt2_small():
    processes = Processes(4, timeout=600)
    try:
        _check(processes, (50257, 768, 12, 16))
    finally:
        processes.stop()
