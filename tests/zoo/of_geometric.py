"""Graph nets of PyTorch Geometric. A sample is a graph; all have equally many nodes."""

import functools
from typing import Any

import torch
from torch import nn

from tests.zoo.entries import (
    SIZE,
    SPLITS,
    D,
    Net,
    Use,
    classes,
    entry,
    noise,
    ragged,
    total,
)
from tests.zoo.libraries import Library

LIBRARY = "torch_geometric"

geometric = Library("torch_geometric.nn")
utils = Library("torch_geometric.utils")

NODES, EDGES = 5, 8


def graphs() -> tuple:
    return noise(NODES, D), torch.randint(NODES, (SIZE, 2, EDGES))


def layers(layer, *, edges: int = 0) -> Use:
    """Two layers and a mean over nodes, as in the examples of the library."""

    def forward(self, x, index, *features):
        batch = torch.zeros(NODES, dtype=torch.long)
        features = [each[0] for each in features]
        x = torch.tanh(self.first(x[0], index[0], *features))
        x = self.second(x, index[0], *features)
        return geometric.global_mean_pool(x, batch, 1)

    model = Net(forward, first=layer(D, 8), second=layer(8, 3))
    features = (noise(EDGES, edges),) if edges else ()
    return Use(model.eval(), (*graphs(), *features, classes()))


def convolution(name: str, **options: Any) -> Use:
    return layers(functools.partial(getattr(geometric, name), **options))


def with_features(name: str, **options: Any) -> Use:
    kind = getattr(geometric, name)
    return layers(functools.partial(kind, edge_dim=2, **options), edges=2)


def isomorphism() -> Use:
    def layer(into: int, out: int) -> nn.Module:
        mlp = nn.Sequential(nn.Linear(into, 8), nn.ReLU(), nn.Linear(8, out))
        return geometric.GINConv(mlp, train_eps=True)

    return layers(layer)


def edge_convolution() -> Use:
    def layer(into: int, out: int) -> nn.Module:
        return geometric.EdgeConv(nn.Linear(2 * into, out), aggr="max")

    return layers(layer)


def principal() -> Use:
    degrees = torch.tensor([1, 2, 1, 1])
    return convolution(
        "PNAConv",
        aggregators=["mean", "max", "std"],
        scalers=["identity", "attenuation"],
        deg=degrees,
    )


def schnet() -> Use:
    """Energy and forces of atoms of some kinds at some places."""

    def pairs(places, batch):
        index = (~torch.eye(NODES, dtype=torch.bool)).nonzero().T
        return index, (places[index[0]] - places[index[1]]).norm(dim=1)

    def forward(self, kinds, places):
        places = places[0].requires_grad_()
        energy = self.body(kinds[0], places).sum()
        return energy + torch.autograd.grad(energy, places, create_graph=True)[0][None]

    sizes = dict(hidden_channels=8, num_filters=6, num_interactions=2, num_gaussians=5)
    model = Net(forward, body=geometric.SchNet(**sizes, interaction_graph=pairs))
    kinds = torch.randint(1, 5, (SIZE, NODES))
    return Use(model, (kinds, noise(NODES, 3), noise(NODES, 3)), total)


def relational() -> Use:
    def forward(self, x, index, kinds):
        return self.layer(x[0], index[0], kinds[0]).mean(0, keepdim=True)

    model = Net(forward, layer=geometric.RGCNConv(D, 3, num_relations=2))
    return Use(model, (*graphs(), torch.randint(2, (SIZE, EDGES)), classes()))


def basic(name: str) -> Use:
    def forward(self, x, index):
        return self.body(x[0], index[0]).mean(0, keepdim=True)

    body = getattr(geometric, name)(D, 8, num_layers=2, out_channels=3, dropout=0.0)
    return Use(Net(forward, body=body), (*graphs(), classes()))


def pooled() -> Use:
    def forward(self, x, index):
        x = self.first(x[0], index[0]).tanh()
        x, index, *_ = self.pool(x, index[0])
        return self.second(x, index).mean(0, keepdim=True)

    parts = dict(first=geometric.GraphConv(D, 8), second=geometric.GraphConv(8, 3))
    model = Net(forward, pool=geometric.TopKPooling(8, ratio=0.5), **parts)
    return Use(model, (*graphs(), classes()))


def nearest() -> Use:
    def forward(self, x, adjacency, mask):
        x = self.layer(x, adjacency, mask).relu()
        return self.head(x.sum(1))

    model = Net(forward, layer=geometric.DenseGCNConv(D, 8), head=nn.Linear(8, 3))
    adjacency = torch.rand(SIZE, NODES, NODES).round()
    return Use(model, (noise(NODES, D), adjacency, ragged(NODES), classes()))


def pooled_densely() -> Use:
    def forward(self, x, adjacency):
        x, adjacency, cut, orthogonal = geometric.dense_mincut_pool(
            x, adjacency, self.assign(x)
        )
        return self.layer(x, adjacency).mean(1) + cut + orthogonal

    parts = dict(assign=nn.Linear(D, 3), layer=geometric.DenseGraphConv(D, 3))
    adjacency = torch.rand(SIZE, NODES, NODES).round()
    return Use(Net(forward, **parts), (noise(NODES, D), adjacency, classes()))


def without_padding() -> Use:
    def forward(self, x, index):
        index = index[0][:, index[0, 0] >= 0]
        return self.layer(x[0], index).mean(0, keepdim=True)

    model = Net(forward, layer=geometric.SAGEConv(D, 3))
    x, index = graphs()
    index = index.masked_fill(~ragged(EDGES)[:, None], -1)
    return Use(model, (x, index, classes()))


ENTRIES = [
    entry("GCN", convolution, "GCNConv", today=SPLITS),
    entry(
        "GCN without self-loops",
        convolution,
        "GCNConv",
        add_self_loops=False,
    ),
    entry("GAT", convolution, "GATConv", today=SPLITS),
    entry("GAT v2 with features of edges", with_features, "GATv2Conv", today=SPLITS),
    entry("GIN", isomorphism),
    entry("GraphSAGE", convolution, "SAGEConv"),
    entry("GraphConv", convolution, "GraphConv"),
    entry("TransformerConv", with_features, "TransformerConv"),
    entry("ChebConv", convolution, "ChebConv", K=2, today=SPLITS),
    entry("TAGConv", convolution, "TAGConv"),
    entry("EdgeConv", edge_convolution),
    entry("PNA", principal),
    entry("RGCN", relational),
    entry("SchNet, forces", schnet),
    entry("model GCN", basic, "GCN", today=SPLITS),
    entry("model GAT", basic, "GAT", today=SPLITS),
    entry("top-k pooling", pooled, today=SPLITS),
    entry("dense GCN with a mask", nearest),
    entry("dense min-cut pooling", pooled_densely),
    entry("SAGE, padded edges left out", without_padding, today=SPLITS),
]
