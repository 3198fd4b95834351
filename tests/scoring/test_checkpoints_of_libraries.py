"""Checkpoints as libraries write them, made here without these: read rightly, or refused by what they are."""

import json
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from pyflatness.errors import InputError
from pyflatness.scoring import checkpoints

distributed = pytest.importorskip("torch.distributed.checkpoint")


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def scored(path: Path, model: nn.Module | None = None) -> tuple[nn.Module, tuple[str, ...]]:
    (found,) = checkpoints.find([path])
    checkpoint, model = checkpoints.read(found), network() if model is None else model
    return model, checkpoint.notes + checkpoints.load(model, checkpoint.state)


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as why:
        scored(path)
    return str(why.value)


def same(model: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))


def test_torch_s_average_is_read_without_its_count(tmp_path: Path) -> None:
    average = AveragedModel(network())
    average.update_parameters(network())
    torch.save(average.state_dict(), tmp_path / "swa.pt")
    model, notes = scored(tmp_path / "swa.pt")
    assert same(model, average.module)
    assert notes[0] == "the average under 'module.' was taken, not 'n_averaged' beside it"
    again = AveragedModel(network())
    assert scored(tmp_path / "swa.pt", again)[1] == ()
    assert same(again, average)


def test_an_exponential_average_is_taken_and_not_the_network_beside_it(tmp_path: Path) -> None:
    online, average = network(), network()
    state = {"initted": torch.tensor(True), "step": torch.tensor(3)}
    for prefix, part in (("online_model", online), ("ema_model", average)):
        state |= {f"{prefix}.{name}": tensor for name, tensor in part.state_dict().items()}
    torch.save(state, tmp_path / "ema.pt")
    model, notes = scored(tmp_path / "ema.pt")
    assert same(model, average)
    assert notes[0] == "the average under 'ema_model.' was taken, not 'initted', 'step', 'online_model' beside it"


def test_averages_in_a_list_have_no_names(tmp_path: Path) -> None:
    average = {"decay": 0.99, "num_updates": 3, "shadow_params": [*network().parameters()], "collected_params": None}
    torch.save(average, tmp_path / "shadow.pt")
    assert "shadow_params, without names; put them into the model" in refusal(tmp_path / "shadow.pt")
    torch.save({"model": network().state_dict(), "ema": average}, tmp_path / "beside.pt")
    assert scored(tmp_path / "beside.pt")[1] == ("the weights under 'model' were taken, not those under 'ema'",)


@pytest.mark.filterwarnings("ignore")
def test_folders_of_distributed_checkpoints_name_what_makes_a_file_of_them(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    model, folder = network(), tmp_path / "runs" / "step_10"
    distributed.save({"state": {"model": model.state_dict(), "step": 3}}, checkpoint_id=folder, no_dist=True)
    for path in (folder, tmp_path / "runs"):
        assert "a folder of torch.distributed.checkpoint" in refusal(path)
        assert "dcp_to_torch_save(folder, file)" in refusal(path)
    dcp_to_torch_save(folder, tmp_path / "whole.pt")
    assert same(scored(tmp_path / "whole.pt")[0], model)


def test_what_skorch_and_accelerate_save_beside_the_weights_is_left_out(tmp_path: Path) -> None:
    names = ("criterion.pt", "sampler.bin", "sampler_1.bin", "dl_state_dict.bin", "dl_state_dict_2.bin")
    for name in names:
        torch.save(OrderedDict(), tmp_path / name)
    for name in ("params.pt", "samplers.pt"):
        torch.save(network().state_dict(), tmp_path / name)
    assert [path.name for path in checkpoints.find([tmp_path])] == ["params.pt", "samplers.pt"]


def test_a_program_is_told_from_a_damaged_file(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "program.pt", "w") as archive:
        archive.writestr("program/archive_format", "pt2")
        archive.writestr("program/models/model.json", "{}")
    assert "a program of torch.export (.pt2), which is no file of weights" in refusal(tmp_path / "program.pt")


class Quantised(torch.Tensor):
    """A weight of a class of its own, as those of torchao."""


def test_subclasses_of_tensors_say_what_to_save(tmp_path: Path) -> None:
    state = network().state_dict()
    state["0.weight"] = state["0.weight"].as_subclass(Quantised)
    torch.save(state, tmp_path / "quantised.pt")
    assert "not only tensors and plain containers" in refusal(tmp_path / "quantised.pt")
    with torch.serialization.safe_globals([Quantised]):  # as torchao has it once it is imported
        message = refusal(tmp_path / "quantised.pt")
    assert "0.weight is a test_checkpoints_of_libraries.Quantised, no plain tensor" in message
    assert "w.dequantize()" in message
    torchao = checkpoints._explained(
        checkpoints.pickle.UnpicklingError("Unsupported global: GLOBAL torchao.quantization.Int8Tensor was not"),
        tmp_path,
    )
    assert "torchao.quantization.Int8Tensor, no plain tensor" in torchao


def test_adapters_are_told_from_networks(tmp_path: Path) -> None:
    torch.save({"base_model.model.0.lora_A.weight": torch.zeros(2, 4)}, tmp_path / "adapter_model.bin")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    assert "an adapter of PEFT, the change of a network and not one; PeftModel.from_pretrained" in refusal(tmp_path)


def test_eight_bit_floats_without_their_scale_have_a_note(tmp_path: Path) -> None:
    state = network().state_dict()
    state["0.weight"] = state["0.weight"].to(torch.float8_e4m3fn)
    torch.save(state, tmp_path / "fp8.pt")
    assert scored(tmp_path / "fp8.pt")[1] == (
        "0.weight are 8-bit floats without a scale, by which a quantised weight is multiplied: taken as they are",
    )
    state["0.weight_scale"] = torch.ones(1)
    torch.save(state, tmp_path / "fp8.pt")
    assert "0.weight are 8-bit floats with scales beside them (0.weight_scale)" in refusal(tmp_path / "fp8.pt")


def test_a_mixture_of_experts_as_it_is_saved(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", "5.5")
    pytest.importorskip("safetensors")
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.MixtralConfig(vocab_size=11, num_key_value_heads=2, num_local_experts=3, **sizes)
    saved, other = transformers.MixtralForCausalLM(config), transformers.MixtralForCausalLM(config)
    saved.save_pretrained(tmp_path / "mixture")
    names = [*checkpoints.read(tmp_path / "mixture" / "model.safetensors").state]
    assert not {*names} <= {*saved.state_dict()}
    model, notes = scored(tmp_path / "mixture", other)
    assert same(model, saved)
    assert notes == ("transformers' own conversion named the weights",)
    state = checkpoints.read(tmp_path / "mixture" / "model.safetensors").state
    state.pop(names[0])
    with pytest.raises(InputError, match="does not fit the model: Missing"):
        checkpoints.load(other, state)
