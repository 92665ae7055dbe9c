"""Potentials of e3nn, equivariant under rotations. A sample is a molecule."""

import torch
from torch import nn

from tests.zoo.entries import SIZE, Net, Use, entry, noise, total
from tests.zoo.libraries import Library

LIBRARY = "e3nn"

o3 = Library("e3nn.o3")

ATOMS = 4
INSIDE, HARMONICS = "4x0e+2x1o", "1x0e+1x1o"


def forces() -> Use:
    """Convolutions over all pairs, as in NequIP, and the forces on the atoms."""

    def forward(self, kinds, places):
        places, h = places[0].requires_grad_(), self.kinds(kinds[0])
        source, target = (~torch.eye(ATOMS, dtype=torch.bool)).nonzero().T
        away = places[source] - places[target]
        y = o3.spherical_harmonics(HARMONICS, away, True, normalization="component")
        bumps = torch.exp(-(away.norm(dim=1)[:, None] - torch.arange(3)).square())
        for layer, radial in zip(self.layers, self.radials, strict=True):
            messages = layer(h[source], y, radial(bumps))
            h = h.new_zeros(ATOMS, messages.shape[1]).index_add(0, target, messages)
        energy = self.head(h).sum()
        return energy + torch.autograd.grad(energy, places, create_graph=True)[0][None]

    own = dict(shared_weights=False, internal_weights=False)
    layers = [
        o3.FullyConnectedTensorProduct(inside, HARMONICS, INSIDE, **own)
        for inside in ("4x0e", INSIDE)
    ]
    parts = dict(kinds=nn.Embedding(3, 4), layers=nn.ModuleList(layers))
    parts["radials"] = nn.ModuleList(nn.Linear(3, each.weight_numel) for each in layers)
    model = Net(forward, **parts, head=o3.Linear(INSIDE, "1x0e"))
    atoms = torch.randint(3, (SIZE, ATOMS)), noise(ATOMS, 3)
    return Use(model, (*atoms, noise(ATOMS, 3)), total)


ENTRIES = [entry("NequIP, forces", forces)]
