"""SPECs of models and data, and ``pyflatness layers``."""

from pathlib import Path

from pyflatness.scoring import specs
from support.score_runs import status


def test_a_model_in_a_package_of_the_working_directory(tiny, tmp_path, monkeypatch, capsys):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "inner.py").write_text(
        "import functools, torch\n"
        "class Nets:\n"
        "    convolution = functools.partial(torch.nn.Conv2d, 3, 7)\n"
        "def lazy():\n"
        "    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.LazyLinear(2), torch.nn.Conv2d(3, 6, 1))\n"
    )
    monkeypatch.chdir(tmp_path)

    assert status("layers", "--model", "package.inner:Nets.convolution", "--model-args", '{"kernel_size": 1}') == 0
    out = capsys.readouterr().out
    assert "(the model)" in out
    assert "Conv2d" in out
    assert "7 × 3" in out
    assert status("layers", "--model", "package.inner:lazy") == 0
    out = capsys.readouterr().out
    assert "6 × 3" in out
    assert "LazyLinear" in out
    assert "4 × 3" not in out
    assert status("layers", "--model", "package.inner:Nets.convolution", "--model-args", '{"kernel_size": 3}') == 0
    assert "7 × 27" in capsys.readouterr().out


def test_files_of_one_name_do_not_mix(tiny: str, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tiny.py").write_text("def data():\n    return 1\n")
    first, second = specs.resolve(f"{tiny}:data"), specs.resolve(f"{tmp_path}/other/tiny.py:data")
    assert second() == 1
    assert specs.resolve(f"{tiny}:data") is first
    assert specs.resolve(f"{tmp_path}/other/tiny.py:data") is second
