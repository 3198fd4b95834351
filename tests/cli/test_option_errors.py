"""Values of options that cannot be: one error that has the option's name on the command line and what is wanted."""

import subprocess
import sys

import numpy as np
import pytest

import pyflatness as pf
from pyflatness.scoring import data_specs
from support.score_runs import arguments_of, saved, status


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--probes", "0"], "--probes 0: a number of random probes"),
        (["--probes", "-3"], "--probes -3: a number of random probes"),
        (["--probes", "some"], "--probes 'some': a number of random probes"),
        (["--rtol", "2"], "--rtol 2.0: a relative error from 0 to less than 1 is wanted"),
        (["--probes", "3", "--rtol", "0.1"], "--rtol 0.1 says how many probes to take"),
    ],
)
def test_options_of_numbers(given, message, tiny):
    said = status(*arguments_of(tiny, *given, saved(tiny, 1, "1.safetensors")))
    assert said.startswith(f"Error: {message}")


@pytest.mark.parametrize("wrong", [-1, 0, 1.5, "x", True])
@pytest.mark.parametrize("option", ["count", "batch_size"])
def test_counts_of_samples_in_files(option, wrong, tmp_path):
    path = tmp_path / "data.npz"
    np.savez(path, x=np.zeros((4, 3)), y=np.zeros(4, int))
    read = data_specs.resolve(str(path))
    inputs, _ = read(**{option: 2})
    assert len(inputs) == (2 if option == "count" else 4)
    with pytest.raises(pf.errors.InputError, match=f"{option}={wrong!r}: a number of samples is wanted, at least 1"):
        read(**{option: wrong})


def test_the_error_names_the_option_of_the_data(tiny, tmp_path):
    path = tmp_path / "data.npz"
    np.savez(path, x=np.zeros((4, 3)), y=np.zeros(4, int))
    arguments = arguments_of(tiny, "--data-args", '{"count": -1}', saved(tiny, 1, "1.safetensors"))
    arguments[arguments.index("--data") + 1] = str(path)
    assert status(*arguments) == "Error: --data: count=-1: a number of samples is wanted, at least 1"


_SCORES = """
import sys, torch, pyflatness as pf
network = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).eval()
data = torch.randn(20, 3), torch.randint(2, (20,))
scores = pf.score({"a": network}, "cross_entropy", data, measures=["relative_flatness", "trace", "weight_norm"])
assert not scores.errors, scores.errors
sys.exit("torch._dynamo" in sys.modules)
"""


def test_scoring_does_not_load_the_compiler_of_torch():
    """Loading it takes seconds, which would be those of the first unit of each process."""
    subprocess.run([sys.executable, "-c", _SCORES], check=True)
