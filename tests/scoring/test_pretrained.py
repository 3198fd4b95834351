"""Networks that libraries know by name: ``hf:``, ``timm:``, ``torchvision:``."""

import importlib.machinery
import importlib.metadata
import json
import re
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

import pyflatness as pf
from pyflatness.scoring import checkpoints, pretrained, specs
from pyflatness.scoring.worker import Maker
from support import word_models
from support.hugging_face import FAMILIES

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


def made(spec: str, **arguments: object) -> nn.Module:
    return Maker(spec, arguments, "--model").network()


def refusal(spec: str, **arguments: object) -> str:
    with pytest.raises(pf.errors.InputError) as caught:
        made(spec, **arguments)
    return str(caught.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return word_models.saved(tmp_path / "model")


def test_a_folder(folder: Path) -> None:
    expected = word_models.llama().state_dict()
    net = made(f"hf:{folder}")
    assert type(net) is transformers.LlamaForCausalLM
    assert not net.training
    assert all(torch.equal(value, expected[name]) for name, value in net.state_dict().items())
    assert {p.dtype for p in made(f"hf:{folder}", dtype="bfloat16").parameters()} == {torch.bfloat16}
    assert next(made(f"hf:{folder}", device="meta").parameters()).is_meta
    (folder / "model.safetensors").unlink()
    assert "model.safetensors" in refusal(f"hf:{folder}")
    assert made(f"hf:{folder}", weights=False).state_dict().keys() == expected.keys()


def test_a_folder_that_is_no_model(tmp_path: Path, folder: Path) -> None:
    assert refusal(f"hf:{tmp_path}").startswith(f"--model: hf:{tmp_path}: the folder has no config.json")
    for file in folder.glob("token*"):
        file.unlink()
    with pytest.raises(pf.errors.InputError, match=r"if it has no tokenizer, pass tokenizer=.*tokenizer\.json"):
        pretrained.tokenizer(str(folder))


def test_every_kind_of_head_is_the_one_that_was_saved(tmp_path: Path) -> None:
    for name in ("BERT, masked", "T5", "ViT", "Mixtral"):
        net, _ = FAMILIES[name]()
        net.save_pretrained(tmp_path / name)
        found = made(f"hf:{tmp_path / name}")
        assert type(found) is type(net)
        assert all(torch.equal(value, net.state_dict()[key]) for key, value in found.state_dict().items())


def test_the_local_cache(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the library of the hub lays it out: a folder for each commit, and branches that name commits."""
    cache = tmp_path / "hub" / "models--people--stories"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("0" * 40)
    (cache / "snapshots").mkdir()
    folder.rename(cache / "snapshots" / ("0" * 40))
    word_models.saved(cache / "snapshots" / ("1" * 40), seed=1)
    (cache / "refs" / "later").write_text("1" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache.parent))
    first, later = made("hf:people/stories"), made("hf:people/stories@later")
    assert torch.equal(first.lm_head.weight, word_models.llama().lm_head.weight)
    assert torch.equal(later.lm_head.weight, word_models.llama(1).lm_head.weight)
    assert re.search(
        "there is no such folder, .* nothing is downloaded unless download is true", refusal("hf:people/others")
    )
    assert pretrained.tokenizer("hf:people/stories")("the cat")["input_ids"] == [2, 4]


def test_no_code_of_a_model_is_run(folder: Path) -> None:
    ran = folder / "ran"
    (folder / "own.py").write_text(f"open({str(ran)!r}, 'w')\nclass Own: pass\nclass OwnConfig: pass\n")
    config = json.loads((folder / "config.json").read_text())

    def rewrite(**entries: object) -> None:
        (folder / "config.json").write_text(json.dumps({**config, **entries}))

    assert "never run" in refusal(f"hf:{folder}", trust_remote_code=True)
    of_own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    rewrite(auto_map=of_own)
    assert type(made(f"hf:{folder}")) is transformers.LlamaForCausalLM
    rewrite(auto_map=of_own, model_type="own", architectures=["Own"])
    assert "code that comes with it, and such code is never run" in refusal(f"hf:{folder}")
    for name in ("Own", "pipeline", "AutoModel", "__version__", "LlamaTokenizer"):
        rewrite(architectures=[name])
        assert f"'{name}' is no model of transformers" in refusal(f"hf:{folder}")
    rewrite(architectures=None)
    assert "config.json names no architecture" in refusal(f"hf:{folder}")
    assert type(made(f"hf:{folder}", architecture="LlamaForCausalLM")) is transformers.LlamaForCausalLM
    rewrite(
        attn_implementation="people/kernel", _attn_implementation="people/kernel", _attn_implementation_internal="x/y"
    )
    assert made(f"hf:{folder}").config._attn_implementation in ("sdpa", "eager")
    assert not ran.exists()


def test_pickled_weights_are_not_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model.safetensors.away")
    torch.save(word_models.llama().state_dict(), folder / "pytorch_model.bin")
    assert "safetensors" in refusal(f"hf:{folder}")


def test_weights_that_would_be_random_are_an_error(folder: Path) -> None:
    message = refusal(f"hf:{folder}", architecture="LlamaForSequenceClassification")
    assert "the files lack 1 weights of LlamaForSequenceClassification, which would be random: score.weight" in message


@pytest.mark.parametrize(
    ("version", "good"), [("5.4.9", False), ("4.57.1", False), ("5.5.0", True), ("6.0.0.dev0", True)]
)
def test_releases_with_known_holes_are_refused(folder, monkeypatch, version, good):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    if good:
        assert callable(specs.resolve(f"hf:{folder}"))
    else:
        assert "releases before 5.5 run code of theirs (CVE-2026-4372, CVE-2026-5241)" in refusal(f"hf:{folder}")


def test_names_that_are_none(tmp_path: Path) -> None:
    assert "no such folder, and it is no name of a repository" in refusal(f"hf:{tmp_path}/missing")
    assert "the name of an architecture is wanted" in refusal("timm:hf-hub:people/model")


@pytest.mark.parametrize(
    ("library", "wanted"), [("transformers", "'pyflatness[hf]'"), ("timm", "timm"), ("torchvision", "")]
)
def test_a_library_that_is_missing(library: str, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    kind = {"transformers": "hf"}.get(library, library)
    with pytest.raises(
        pf.errors.MissingExtraError, match=re.escape(f"models of {library} need it: pip install {wanted}")
    ):
        specs.resolve(f"{kind}:resnet18")


def test_timm_and_torchvision_are_called_as_they_want(monkeypatch: pytest.MonkeyPatch) -> None:
    """By stand-ins with their signatures."""

    def stand_in(name: str, **functions: object) -> types.ModuleType:
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    def create_model(model_name: str, pretrained: bool = False, **options: object) -> nn.Module:
        assert (model_name, pretrained) == ("vit_tiny_patch16_224", False)
        return nn.Linear(3, options["num_classes"])

    def get_model(name: str, weights: object = None, **config: object) -> nn.Module:
        assert (name, weights) == ("resnet18", None)
        return nn.Linear(3, 4, **config)

    stand_in("timm", create_model=create_model)
    stand_in("torchvision", models=stand_in("torchvision.models", get_model=get_model))
    net = made("timm:vit_tiny_patch16_224", num_classes=7, dtype="float64")
    assert (net.out_features, net.weight.dtype, net.training) == (7, torch.float64, False)
    assert made("torchvision:resnet18", bias=False, device="meta").weight.is_meta
    assert not pretrained.is_trained("timm:vit_tiny_patch16_224", {"num_classes": 7})
    assert pretrained.is_trained("torchvision:resnet18", {"weights": "DEFAULT"})
    assert pretrained.is_trained("hf:x", {})


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    folder = word_models.saved(tmp_path / "sharded", seed=3, max_shard_size="5KB")
    index = folder / "model.safetensors.index.json"
    assert len({*json.loads(index.read_text())["weight_map"].values()}) == 2
    net = made(f"hf:{folder}", weights=False)
    checkpoints.load(net, checkpoints.read(index).state)
    assert torch.equal(net.lm_head.weight, word_models.llama(3).lm_head.weight)
    assert torch.equal(net.lm_head.weight, made(f"hf:{folder}").lm_head.weight)
