"""Compute the ends of the spectrum of the loss Hessian, with eigenvectors, and the density of all its eigenvalues.

    H = ∂²E/∂w²  or its GGN,  of one layer's block, of some layers' weights jointly, or of all trainable parameters

Eigenpairs come by Lanczos with one start or two, densities by stochastic Lanczos quadrature (:mod:`pyflatness.numerics.
eigenpairs`); every product with H is exact, over all of the data.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from typing_extensions import Unpack

from ..errors import InputError
from ..hessian.parameter_products import ParameterProducts
from ..hessian.products import Names, Products
from ..messages import check_choice
from ..model.layers import tie_notes
from ..model.selectors import Selector
from ..numerics.eigenpairs import BESIDE, BESIDE_STEPS, Pairs, Search, least_vectors, quadrature
from ..numerics.signs import RandomVectors, Signs
from ..options import CALL, How, Options, check_count, check_flag, check_number, check_probes
from ..passes.memory import Budget
from ..session import public, session
from .spectra import Density, Spectrum

WHICH = ("largest", "smallest", "both")
MAX_PRODUCTS = 1000  # that eigenpairs take, unless the user says otherwise
_NUMBER = 8  # bytes of one


@public(*CALL, "nan_policy", "memory", "seed")
def spectrum(
    model: nn.Module,
    loss: Any = "auto",
    data: Any = ...,
    *,
    layers: Selector | Sequence[Selector] | None = None,
    k: int = 5,
    which: str = "largest",
    copies: bool = True,
    density: bool = False,
    probes: int = 8,
    steps: int = 64,
    tolerance: float | None = None,
    max_products: int = MAX_PRODUCTS,
    curvature: str = "auto",
    **how: Unpack[How],
) -> Spectrum:
    """Return the outermost eigenvalues of the loss Hessian with their eigenvectors, and the density of all of them.

    H y = λ y   for H = ∂²E/∂w², or its GGN. Every product with H is one read of the data.

    Args:
        data: … They are read again and again.
        layers: selectors: the joint block of these layers' weights, without biases; of one layer, its own block. None:
            all trainable parameters of the network.
        k: how many eigenpairs, at each end that is asked for; 0 for the density alone.
        which: ``"largest"``, algebraically, ``"smallest"`` (the most negative), or ``"both"``.
        copies: find every copy of a multiple eigenvalue: from two random starts, whose products are taken together, and
            by a further search where these show two copies. False: one start, which takes fewer products and more
            reads of the data, and may find a single copy of a multiple eigenvalue. With ``k=1`` it changes nothing.
        density: also estimate the density by stochastic Lanczos quadrature.
        probes: the number of random sign vectors for the density.
        steps: the number of products of each probe.
        tolerance: for residuals, relative to the matrix's norm; None: 1e-8 in float64, 1e-5 in float32.
        max_products: the most Hessian-vector products that the search for eigenpairs may take. Those of the density
            come on top, and one for each pair where restarts left their residuals unclear.
        curvature: ``"auto"`` and ``"hessian"`` for the Hessian, ``"ggn"`` for the GGN.
        nan_policy: ``"raise"``, or ``"propagate"`` for eigenvalues of NaN; ``"omit"`` is an error where NaN or infinity
            occur, since an eigenvalue is one of all samples together.
        memory: bytes to hold at a time; vectors take 1 GiB, or this where it is more. At least 2 (pairs + 4) are needed
            for the eigenpairs, and ``steps + 4`` for the density, of 8 N bytes each: without ``memory=`` these may
            take 4 GiB.

    Returns:
        The eigenpairs with their residuals. That no eigenvalue was missed is as certain as that random starts have a
        component along its eigenvector: one that lies by a share g of the matrix's norm beyond the values is missed
        with a chance of about ``tolerance`` / g at most.

    Raises:
        InputError: options that do not fit; vectors that do not fit the memory; an operation without a second
            derivative, or that torch did not write; see :func:`pyflatness.relative_flatness`.
        NonFiniteError: a product with NaN or infinity, under ``nan_policy="raise"``.

    Example:
        >>> import torch, pyflatness as pf
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double().eval()
        >>> data = torch.randn(100, 4).double(), torch.randint(3, (100,))
        >>> found = pf.spectrum(model, torch.nn.CrossEntropyLoss(), data, k=2, which="both")
        >>> len(found.eigenvalues), found.converged, found.eigenvectors["0.weight"].shape
        (4, True, torch.Size([4, 8, 4]))
    """
    k, density, copies = check_count("k", k, 0), check_flag("density", density), check_flag("copies", copies)
    probes, steps = check_probes("probes", probes, 1), check_count("steps", steps, 1)
    if tolerance is not None:
        tolerance = check_number("tolerance", tolerance)
    max_products = check_count("max_products", max_products, 1, "a number of products")
    check_choice("which", which, WHICH)
    if not k and not density:
        raise InputError("k=0 and density=False: nothing is asked for")
    options = Options.of(how, curvature=curvature)
    with session(model, loss, data, options, how, reads=3) as task:
        products = ParameterProducts(task) if layers is None else Products(task.of(layers))
        names = products.names if isinstance(products, ParameterProducts) else tuple(products.modules)
        block = _Block(products, names, task.budget(), options.seed)
        largest, smallest = block.wanted(k, which)
        block.check(largest + smallest, steps if density else 0, max_products)
        precision = tolerance or products.tolerance
        pairs = block.pairs(largest, smallest, precision, max_products, copies=copies)
        found = block.density(probes, steps) if density else None
        task.unite()
        vectors = [products.as_parameters(names, vector) for vector in pairs.vectors]
        return Spectrum(
            eigenvalues=pairs.values.cpu(),
            eigenvectors={name: torch.stack([each[name] for each in vectors]) for name in names} if vectors else {},
            residuals=pairs.residuals.cpu(),
            converged=pairs.converged,
            limited=pairs.limited,
            density=found,
            method="ggn" if options.by_ggn else "hessian",
            samples=products.samples,
            products=block.products,
            size=products.size(names),
            notes=(
                *_notes(task.model, products),
                *task.forward.doubts,
                *([f"ended by max_products={max_products}"] if pairs.limited else []),
            ),
        )


def _notes(model: nn.Module, products: Products) -> list[str]:
    """Return notes on the products, and on tied weights by the names of their layers."""
    tied = {name: tie_notes(model, module) for name, module in products.modules.items()}
    return [*(f"{name}: {note}" for name, notes in tied.items() for note in notes), *products.notes("")]


class _Block:
    """Multiply one block of the Hessian by vectors, and count the products."""

    def __init__(self, products: Products, names: Names, budget: Budget, seed: int) -> None:
        self._times, self._names, self._budget = products, names, budget
        self._seed, self._size, self._device = seed, products.size(names), products.device
        self.products = 0

    def wanted(self, k: int, which: str) -> tuple[int, int]:
        """Return the number of eigenpairs that are wanted at the upper and at the lower end."""
        largest, smallest = k * (which != "smallest"), k * (which != "largest")
        return (largest, smallest) if largest + smallest < self._size else (self._size, 0)  # all that there are

    def check(self, pairs: int, steps: int, most: int) -> None:
        """Raise unless eigenpairs and density (0 ``steps`` without one) fit the memory and ``most`` products."""
        if pairs > most:
            raise InputError(f"max_products={most}: {pairs} eigenpairs take {pairs} products at least")
        least = {f"steps={steps}": min(steps, self._size) + BESIDE_STEPS} if steps else {}
        if pairs:
            least[f"{pairs} eigenpairs"] = least_vectors(pairs, self._size) + BESIDE
        what, vectors = max(least.items(), key=lambda item: item[1])
        needed = vectors * _NUMBER * self._size
        room = self._budget.least_bases
        if needed > room:
            raise InputError(
                f"{what}: {vectors} vectors of {self._size:,} numbers in float64 take {needed:,} bytes, of which there "
                f"are {room:,}; pass memory={needed} if this machine has them, a smaller k= or steps=, or "
                "layers= for the block of fewer weights"
            )

    def pairs(self, largest: int, smallest: int, tolerance: float, most: int, *, copies: bool) -> Pairs:
        """Return the eigenpairs of both ends, by at most ``most`` products."""
        search = Search(
            RandomVectors(self._seed, self._size, self._device),
            tolerance=tolerance,
            room=self._budget.bases // (_NUMBER * self._size) - BESIDE,
            max_products=most,
        )
        found: Pairs = self._found(search.pairs(largest, smallest, copies=copies))
        return found

    def density(self, probes: int, steps: int) -> Density:
        """Return the quadrature of random probes; as many run at a time as fit in memory."""
        steps = min(steps, self._size)
        first = torch.zeros(1, dtype=torch.int64, device=self._device)
        at_once = max(1, self._budget.bases // (_NUMBER * self._size * (steps + BESIDE_STEPS)))
        found = []
        for start in range(0, probes, at_once):
            signs = Signs(self._seed, range(start, min(start + at_once, probes)))(1, first, self._size)
            found.append(self._found(quadrature(signs.squeeze(1).double(), steps)))
        nodes, weights = (torch.cat(each).cpu() for each in zip(*found, strict=True))
        return Density(nodes, weights, self._size)

    def _found(self, asking: Any) -> Any:
        """Return the result of a generator that yields vectors and is sent their products."""
        try:
            wanted = next(asking)
            while True:
                self.products += len(wanted)
                images = [self._times({self._names: wanted})[self._names]]
                del wanted  # a view of memory that the search may release
                wanted = asking.send(images.pop())
        except StopIteration as end:
            return end.value
