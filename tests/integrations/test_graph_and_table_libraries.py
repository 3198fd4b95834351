"""Graph networks, ensembles for tables and tensor layers of other libraries, each with its own package.

A case is a row of the table in ``docs/models.md``. It skips where its package is not installed.
"""

import copy
from types import SimpleNamespace
from typing import TypeVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pyflatness as pf
from pyflatness.errors import InputError

pytestmark = [pytest.mark.soak, pytest.mark.filterwarnings("ignore")]  # of the libraries' own
X = torch.randn(9, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.arange(9) % 3


def _check_traces(model, forward=None, uncovered=()):
    """Hold each trace against nested autograd in that weight, and all other matrices of weights against a list."""
    report = pf.measure(model, "cross_entropy", (X, Y), measures=["trace"], forward=forward)
    assert sorted(report.uncovered) == sorted(uncovered)
    parameters = dict(model.named_parameters())
    for layer in report.layers:
        name = layer if layer in parameters else f"{layer}.weight"
        weight = parameters[name].detach()

        def risk(given, name=name):
            outputs = torch.func.functional_call(model, {name: given}, (X,))
            return F.cross_entropy(outputs if forward is None else outputs.mean(1), Y)

        hessian = torch.autograd.functional.hessian(risk, weight).reshape(weight.numel(), -1)
        assert report[layer, "trace"].value == pytest.approx(float(hessian.trace()), rel=1e-9), layer


def _check_batches(model, loss, forward, several, single):
    """Hold values of batches of graphs against those of one graph a batch."""
    found, expected = (pf.measure(model, loss, data, forward=forward) for data in (several, single))
    assert found.uncovered == expected.uncovered == {}
    for layer, measure, estimate in expected:
        assert found[layer, measure].value == pytest.approx(estimate.value, rel=1e-12)


@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv", "GraphConv", "TransformerConv", "TAGConv"])
def test_torch_geometric(name):
    pytest.importorskip("torch_geometric")
    from torch_geometric import nn as layers
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader

    torch.manual_seed(0)

    def graph(size):
        nodes = torch.randn(size, 4, dtype=torch.float64)
        return Data(x=nodes, edge_index=torch.randint(0, size, (2, 3 * size)), y=torch.randint(0, 3, (1,)))

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            kind = getattr(layers, name)
            self.first, self.second, self.head = kind(4, 6), kind(6, 6), nn.Linear(6, 3)

        def forward(self, graphs):
            hidden = self.first(graphs.x, graphs.edge_index).tanh()
            hidden = self.second(hidden, graphs.edge_index).tanh()
            return self.head(layers.global_mean_pool(hidden, graphs.batch))

    graphs = [graph(size) for size in (3, 5, 2, 7, 4)]
    several, single = (DataLoader(graphs, batch_size=size) for size in (3, 1))
    _check_batches(Network().double().eval(), "cross_entropy", lambda net, b: (net(b), b.y), several, single)


@pytest.mark.parametrize("kind", ["BondMessagePassing", "AtomMessagePassing"])
def test_chemprop(kind):
    pytest.importorskip("chemprop")
    import numpy
    from chemprop import data, models
    from chemprop import nn as layers

    torch.manual_seed(0)
    texts = ["CCO", "c1ccccc1O", "CC(=O)NC", "CCN(CC)CC", "O=C(O)c1ccccc1"]
    points = [data.MoleculeDatapoint.from_smi(text, numpy.array([float(i)])) for i, text in enumerate(texts)]
    passing = getattr(layers, kind)(d_h=12, depth=3)
    head = layers.RegressionFFN(input_dim=12, hidden_dim=8)
    model = models.MPNN(passing, layers.MeanAggregation(), head).double().eval()

    def forward(net, batch):
        graphs = copy.copy(batch.bmg)
        graphs.V, graphs.E = graphs.V.double(), graphs.E.double()
        return net(graphs, batch.V_d, batch.X_d), batch.Y.double()

    molecules = data.MoleculeDataset(points)
    several, single = (data.build_dataloader(molecules, batch_size=size, shuffle=False) for size in (3, 1))
    _check_batches(model, "mse_loss", forward, several, single)


@pytest.mark.parametrize("kind", ["SchNet", "PaiNN", "SO3net", "FieldSchNet"])
def test_schnetpack(kind, monkeypatch):
    # A name of a type that torch 2.13 has no more, and that schnetpack 2.1.1 imports.
    monkeypatch.setattr(torch.utils.data.dataloader, "T_co", TypeVar("T_co"), raising=False)
    pytest.importorskip("schnetpack")
    from schnetpack import atomistic, model, properties, representation
    from schnetpack import nn as layers
    from schnetpack.data.loader import _atoms_collate_fn as collate

    torch.manual_seed(0)

    def molecule(size):
        first, second = (~torch.eye(size, dtype=torch.bool)).nonzero().t()
        return {
            properties.Z: torch.randint(1, 9, (size,)),
            properties.R: torch.randn(size, 3, dtype=torch.float64),
            properties.n_atoms: torch.tensor([size]),
            properties.idx_i: first,
            properties.idx_j: second,
            properties.offsets: torch.zeros(len(first), 3, dtype=torch.float64),
            "energy": torch.randn(1, dtype=torch.float64),
        }

    more = {"lmax": 1} if kind == "SO3net" else {}
    radial = {"radial_basis": layers.GaussianRBF(6, cutoff=5.0), "cutoff_fn": layers.CosineCutoff(5.0)}
    atoms = getattr(representation, kind)(n_atom_basis=8, n_interactions=2, **radial, **more)
    before, behind = atomistic.PairwiseDistances(), atomistic.Atomwise(8, output_key="energy")
    plain = {"input_dtype_str": "float64", "do_postprocessing": False}
    network = model.NeuralNetworkPotential(atoms, input_modules=[before], output_modules=[behind], **plain)
    molecules = [molecule(size) for size in (3, 5, 2, 4, 6)]
    several, single = [molecules[:3], molecules[3:]], [[one] for one in molecules]

    def forward(net, batch):
        held = collate(batch.molecules)
        return net({**held})["energy"], held["energy"]

    several, single = ([SimpleNamespace(molecules=some) for some in batches] for batches in (several, single))
    _check_batches(network.double().eval(), "mse_loss", forward, several, single)


@pytest.mark.parametrize("kind", ["FourierFT", "Vera"])
def test_adapters_of_vectors(kind):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    sizes = {"n_frequency": 7} if kind == "FourierFT" else {"r": 4}
    model = peft.get_peft_model(net, getattr(peft, f"{kind}Config")(target_modules=["0", "2"], **sizes)).double().eval()
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    for name in trained:
        nn.init.normal_(model.get_parameter(name))
    _check_traces(model, uncovered=trained)


def test_pykan():
    kan = pytest.importorskip("kan")
    model = kan.KAN(width=[5, 4, 3], grid=3, k=3, seed=0, auto_save=False).double()
    _check_traces(model, uncovered=["symbolic_fun.0.affine", "symbolic_fun.1.affine"])


@pytest.mark.parametrize("kind", ["tabm", "tabm-mini", "tabm-packed"])
def test_tabm(kind):
    tabm = pytest.importorskip("tabm")
    torch.manual_seed(0)
    sizes = {"n_num_features": 5, "cat_cardinalities": [], "d_out": 3, "n_blocks": 2, "d_block": 8, "k": 4}
    model = tabm.TabM.make(**sizes, arch_type=kind, dropout=0.0).double().eval()
    _check_traces(model, lambda net, batch: (net(batch[0]).mean(1), batch[1]))


@pytest.mark.parametrize(
    ("kind", "uncovered"),
    [
        ("LinearEmbeddings", []),
        ("LinearReLUEmbeddings", []),
        ("PeriodicEmbeddings", ["0.periodic.weight"]),
        ("PiecewiseLinearEmbeddings", []),
    ],
)
def test_rtdl_num_embeddings(kind, uncovered):
    library = pytest.importorskip("rtdl_num_embeddings")
    torch.manual_seed(0)
    bins = library.compute_bins(torch.randn(100, 5), n_bins=4)
    given = (bins, 4) if kind.startswith("Piecewise") else (5, 4)
    more = {"activation": False, "version": "B"} if kind.startswith("Piecewise") else {}
    more |= {"lite": False} if kind.startswith("Periodic") else {}
    layers = getattr(library, kind)(*given, **more), nn.Flatten(), nn.Linear(20, 3)
    _check_traces(nn.Sequential(*layers).double().eval(), uncovered=uncovered)


@pytest.mark.parametrize("factors", ["cp", "tucker", "blocktt"])
def test_tensorly_torch(factors):
    library = pytest.importorskip("tltorch")
    torch.manual_seed(0)
    layer = library.FactorizedLinear((2, 3), (2, 4), rank=0.5, factorization=factors, implementation="factorized")
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), layer, nn.Tanh(), nn.Linear(8, 3)).double().eval()
    named = [name for name, _ in model.named_parameters() if name.startswith("2.w")]
    _check_traces(model, uncovered=named)


def test_keras(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    keras = pytest.importorskip("keras")
    model = keras.Sequential([keras.layers.Input((5,)), keras.layers.Dense(3)]).eval()
    for call in (pf.measure, pf.importance, pf.spectrum):
        with pytest.raises(InputError, match="it is a Keras model"):
            call(model, "cross_entropy", (X.float(), Y))
