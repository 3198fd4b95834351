"""What results print: their class and facts in words, with their own numbers, and no raw dataclass."""

import dataclasses
import inspect
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pyflatness as pf
from pyflatness import errors, messages
from pyflatness.messages import with_error
from support.public import CALLS

LOSS = nn.CrossEntropyLoss()
DATA = torch.randn(24, 4, generator=torch.Generator().manual_seed(0)).double(), torch.arange(24) % 3


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double().eval()


@pytest.mark.parametrize(
    ("value", "stderr", "text"),
    [
        (140.327, 39, "140 ± 39"),
        (68.5236, 19.6, "69 ± 20"),
        (68.5236, 0.0996, "68.52 ± 0.10"),  # the error has two digits of its own, once it is rounded
        (0.685236, 0.0996, "0.69 ± 0.10"),
        (2.0, 0.1, "2.00 ± 0.10"),
        (1234.5, 678.0, "1230 ± 680"),
        (-0.001, 0.5, "0.00 ± 0.50"),
        (68523612.0, 2.04e6, "6.85e+07 ± 2e+06"),
        (1.23456e-7, 3.21e-9, "1.235e-07 ± 3.2e-09"),
        (0.500001234, 1.2e-5, "0.500001 ± 1.2e-05"),
        (1.23456e-9, 3.21e-7, "0 ± 3.2e-07"),
        (1.06608123, None, "1.06608"),
        (1.06608123, math.nan, "1.06608"),
        (1.06608123, math.inf, "1.06608 ± inf"),
        (math.nan, 0.1, "nan ± 0.1"),
        (3.0, 0.0, "3 ± 0"),
    ],
)
def test_a_number_has_the_digits_of_its_error(value: float, stderr: float | None, text: str) -> None:
    assert with_error(value, stderr) == text


def test_a_spectrum_says_which_error_is_which(model: nn.Module) -> None:
    for probes, words in ((1, "(1 probe)"), (2, "(2 probes)")):
        found = pf.spectrum(model, LOSS, DATA, k=2, density=True, probes=probes, steps=6)
        heading, first, *_ = str(found).splitlines()
        assert heading == "eigenvalues found ± residual, within which the matrix has an eigenvalue"
        assert first.split()[0] == f"{float(found.eigenvalues[0]):.6g}"
        trace, error = found.density.moment(1)
        assert f"density: trace {with_error(trace, error)} {words}, ± the standard error" in str(found)
    assert "eigenvalues found" not in str(pf.spectrum(model, LOSS, DATA, k=0, density=True, probes=1, steps=6))


def test_worst_cases(model: nn.Module) -> None:
    found = pf.worst_case_sharpness(model, LOSS, DATA, rho=0.05, steps=3, starts=2, bound=True)
    ends = f"{float(found.starts.min()):.6g} to {float(found.starts.max()):.6g}"
    assert str(found).startswith(f"WorstCase({found.value:.6g}, 2 starts from {ends}, bound of the quadratic model ")
    assert str(found).endswith(f"loss {found.loss:.6g}, gradient norm {found.gradient_norm:.4g}, ρ = 0.05, 24 samples)")
    one = pf.measures.keskar_sharpness(model, LOSS, DATA, steps=2)
    assert str(one).startswith(f"WorstCase({one.value:.6g}, 1 start, loss ")


def test_a_line_between_two_networks(model: nn.Module) -> None:
    other = {name: 2 * value for name, value in model.state_dict().items()}
    found = pf.linear_interpolation(model, LOSS, DATA, other, points=3)
    first, last = (f"{float(found.losses[place]):.6g}" for place in (0, -1))
    assert str(found).startswith(
        f"training loss {first} at α = 0, {last} at α = 1; barrier {found.barrier:.6g}\n3 points"
    )


def test_gaps(model: nn.Module) -> None:
    test = DATA[0][:7] + 1, DATA[1][:7]
    found = pf.generalization_gap(model, LOSS, DATA, test)
    accuracy = f"of the accuracy {with_error(found.accuracy_gap, found.accuracy_gap_stderr)}"
    assert str(found).startswith(f"GeneralizationGap({with_error(found.gap, found.gap_stderr)}, {accuracy}, train Perf")
    assert f"Performance(loss {with_error(found.test.loss, found.test.loss_stderr)}, accuracy" in str(found)
    assert str(found.test).endswith(", 7 samples)")
    values = pf.generalization_gap(nn.Linear(4, 1).double().eval(), "mse_loss", *((x, x[:, :1]) for x in [DATA[0]] * 2))
    assert "accuracy" not in str(values)


def test_pac_bayes(model: nn.Module) -> None:
    found = pf.measures.pac_bayes(model, LOSS, DATA, probes=2, tolerance=0.1)
    assert f"flatness {with_error(found.flatness, found.flatness_stderr)}" in str(found)
    assert f", bound {found.bound:.6g}, accuracy {found.accuracy:.6g}, 24 samples)" in str(found)
    assert str(found).startswith(f"PacBayes(σ = {with_error(found.sigma, found.stderr)}, ")


def test_robustness(model: nn.Module) -> None:
    found = pf.theory.matrix_robustness(model, LOSS, DATA, matrix=torch.eye(5).double(), rho=[0.1, 0.3])
    low, high = (f"{float(end):.4g}" for end in found.rises.aminmax())
    assert str(found).startswith(f"MatrixRobustness(rises from {low} to {high} for α from 0.1 to 0.3, ε = ")
    largest = pf.theory.largest_robustness(model, LOSS, DATA, rho=0.1, steps=2)
    assert str(largest).startswith(f"LargestRobustness({largest.rise:.6g}, ")
    assert "matrix 5 × 5, " in str(largest)


def test_an_interpolation() -> None:
    line = nn.Linear(4, 1).double().eval()
    found = pf.theory.interpolation_error(line, (DATA[0], DATA[0][:, :1]))
    assert str(found).startswith(f"InterpolationError(sharpness {found.sharpness:.6g}, at interpolation ")
    assert f"residual {found.residual:.4g}, {found.parameters} parameters, 24 samples" in str(found)


def test_label_constancy_and_densities() -> None:
    features, head = DATA[0], torch.randn(3, 4, generator=torch.Generator().manual_seed(1)).double()
    found = pf.theory.label_constancy(
        features, head, labels=lambda phi: (phi[:, 0] > 0).long(), rho=[0.1, 0.2], probes=2
    )
    assert f"for δ from 0.1 to 0.2, C = {found.constant:.4g}, m = 4, 24 samples, 2 probes)" in str(found)
    densities = pf.theory.density_constants(features, 1.0)
    assert str(densities).startswith(f"DensityConstants(log C_1 = {densities.log_first:.6g}, log C_2 = ")


def test_no_public_result_prints_as_a_raw_dataclass() -> None:
    """Every class that a public call says it returns has a text of its own."""
    returned = {inspect.signature(call).return_annotation for call in CALLS.values()}
    results = {kind for kind in returned if isinstance(kind, type) and dataclasses.is_dataclass(kind)}
    assert len(results) > 15
    assert hasattr(dataclasses.make_dataclass("Raw", ["x"]).__repr__, "__wrapped__")  # by which one is told
    assert {kind.__name__ for kind in results if hasattr(kind.__repr__, "__wrapped__")} == set()


# --- text made safe to print, and to put into a CSV file --------------------------------------------------------------


FORMULAS = tuple("=+-@\t\r\n＝＋－＠")
anything = st.text(st.characters() | st.sampled_from("=+-@'\\nrtxuU019af\t\r\n\x1b\udcff"))


@given(anything)
def test_cells_are_safe_and_read_back(name: str) -> None:
    cell = messages.to_cell(name)
    assert messages.from_cell(cell) == name
    assert cell.isprintable()
    assert not cell.startswith(FORMULAS)
    cell.encode()


@given(anything)
def test_what_is_printed_is_one_printable_line(name: str) -> None:
    shown = errors.printable(name)
    assert shown.isprintable()
    assert shown == name or not name.isprintable()
    shown.encode()


def test_ordinary_names_stay_as_they_are() -> None:
    for name in ("runs/seed 3/lr=0.1,é.safetensors", "layer1.0.conv1", "", "re:a+b"):
        assert errors.printable(name) == messages.to_cell(name) == messages.from_cell(name) == name
    assert messages.to_cell("=cmd|' /C calc'!A1") == "'=cmd|' /C calc'!A1"
    assert messages.to_cell("'quoted'") == "''quoted'"
    assert messages.to_cell("a\\b\x1b[31m\udcff") == r"a\\b\x1b[31m\udcff"
