"""Potentials of e3nn, equivariant under rotations. A sample is a molecule."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.entries import SIZE, Net, Use, entry, noise
from tests.zoo.libraries import Library

LIBRARY = "e3nn"

o3 = Library("e3nn.o3")

ATOMS = 4
INSIDE, HARMONICS = "4x0e+2x1o", "1x0e+1x1o"


def forces() -> Use:
    """Two convolutions over all pairs, as in NequIP, and the forces on the atoms."""

    def forward(self, kinds, places):
        places = places[0].requires_grad_()
        source, target = (~torch.eye(ATOMS, dtype=torch.bool)).nonzero().T
        away = places[source] - places[target]
        y = o3.spherical_harmonics(HARMONICS, away, True, normalization="component")
        bumps = torch.exp(-(away.norm(dim=1)[:, None] - self.centres).square())
        h = self.kinds(kinds[0])
        for layer, radial in zip(self.layers, self.radials, strict=True):
            messages = layer(h[source], y, radial(bumps))
            h = h.new_zeros(ATOMS, messages.shape[1]).index_add(0, target, messages)
        energy = self.head(h).sum()
        return energy + torch.autograd.grad(energy, places, create_graph=True)[0][None]

    own = dict(shared_weights=False, internal_weights=False)
    layers = nn.ModuleList(
        o3.FullyConnectedTensorProduct(inside, HARMONICS, INSIDE, **own)
        for inside in ("4x0e", INSIDE)
    )
    model = Net(
        forward,
        centres=torch.linspace(0, 2, 3),
        kinds=nn.Embedding(3, 4),
        layers=layers,
        radials=nn.ModuleList(nn.Linear(3, each.weight_numel) for each in layers),
        head=o3.Linear(INSIDE, "1x0e"),
    )
    atoms = torch.randint(3, (SIZE, ATOMS)), noise(ATOMS, 3)
    return Use(model, (*atoms, noise(ATOMS, 3)), F.mse_loss)


ENTRIES = [entry("NequIP, forces", forces)]
