"""Formats are those of the tools whose names they have: to the bit, where the tools are installed."""

import pytest
import torch
from torch import nn

import pyflatness as pf
from support.combinations import every

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _weight(dtype):
    torch.manual_seed(0)
    return (torch.randn(64, 256) * torch.rand(64, 1)).to(dtype)


def _same(name, tool, weight, kept):
    planned = pf.changes.named(name, tool).kept(weight)
    assert planned.dtype == kept.dtype == weight.dtype
    assert torch.equal(planned, kept), (
        f"{name} of {tool}, {weight.dtype}: {int((planned != kept).sum())} entries differ"
    )


@pytest.mark.soak
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["int2", "int3-g32", "int4", "int6-g64", "int8", "fp8"])
def test_torchao_keeps_what_is_planned(name, dtype):
    pytest.importorskip("torchao", reason="torchao is not installed")
    from torchao.quantization import Float8WeightOnlyConfig, IntxWeightOnlyConfig, PerAxis, PerGroup, PerRow, quantize_

    layer = nn.Linear(256, 64, bias=False, dtype=dtype)
    layer.weight.data = _weight(dtype)
    bits, _, group = name.partition("-g")
    if name == "fp8":
        config = Float8WeightOnlyConfig(granularity=PerRow())
    else:
        granularity = PerGroup(int(group)) if group else PerAxis(0)
        config = IntxWeightOnlyConfig(weight_dtype=getattr(torch, bits), granularity=granularity)
    quantize_(layer, config)
    _same(name, "torchao", _weight(dtype), layer.weight.dequantize())


SCHEMES = {
    "int2": {"num_bits": 2},
    "int3-g32": {"num_bits": 3, "group_size": 32, "strategy": "group"},
    "int4": {"num_bits": 4},
    "int8-g64": {"num_bits": 8, "group_size": 64, "strategy": "group"},
    "fp8": {"num_bits": 8, "type": "float"},
    "mxfp4": {"num_bits": 4, "type": "float", "group_size": 32, "strategy": "group", "scale_dtype": torch.uint8},
    "nvfp4": {
        "num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group",
        "scale_dtype": torch.float8_e4m3fn,
    },
}  # fmt: skip


@pytest.mark.soak
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SCHEMES)
def test_compressed_tensors_keep_what_is_planned(name, dtype):
    tensors = pytest.importorskip("compressed_tensors.quantization", reason="compressed-tensors is not installed")
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    given = {"type": "int", "symmetric": True, "strategy": "channel", **SCHEMES[name]}
    args = tensors.QuantizationArgs(**given, zp_dtype=given.get("scale_dtype"))
    weight, size = _weight(dtype), args.group_size
    rows = weight if size is None else weight.unflatten(1, (-1, size))
    whole = generate_gparam(weight.amin(), weight.amax()) if name == "nvfp4" else None
    ends = rows.amin(-1, keepdim=size is None), rows.amax(-1, keepdim=size is None)
    scale, zero = calculate_qparams(*ends, args, global_scale=whole)
    _same(name, "llm-compressor", weight, fake_quantize(weight, scale, zero, args, global_scale=whole))


@pytest.mark.soak
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["int2", "int3", "int4-g32", "int8"])
def test_model_optimizer_keeps_what_is_planned(name, dtype):
    quantizers = pytest.importorskip("modelopt.torch.quantization.nn", reason="nvidia-modelopt is not installed")
    from modelopt.torch.quantization.config import QuantizerAttributeConfig

    bits, _, group = name.partition("-g")
    where = {"block_sizes": {-1: int(group)}} if group else {"axis": 0}
    quantizer = quantizers.TensorQuantizer(QuantizerAttributeConfig(num_bits=int(bits[3:]), **where))
    _same(name, "modelopt", _weight(dtype), quantizer(_weight(dtype)))


@pytest.mark.soak
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["int2-g32", "int3", "int4-g128", "int8"])
def test_auto_round_without_tuning_keeps_what_is_planned(name, dtype):
    rounding = pytest.importorskip("auto_round.data_type.int", reason="auto-round is not installed")
    bits, _, group = name.partition("-g")
    kept, *_ = rounding.quant_tensor_sym(_weight(dtype), bits=int(bits[3:]), group_size=int(group or -1))
    _same(name, "auto-round", _weight(dtype), kept)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"])
def test_gguf_keeps_what_is_planned(name):
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    kind, weight = gguf.GGMLQuantizationType[name.upper()], _weight(torch.float32)
    packed = gguf.quants.quantize(weight.numpy(), kind)
    _same(name, "gguf", weight, torch.from_numpy(gguf.quants.dequantize(packed, kind)))
    assert pf.changes.named(name, "gguf").bits_of(weight) == 8 * packed.nbytes / weight.numel()


@pytest.mark.soak
@pytest.mark.parametrize("dtype", DTYPES)
def test_bitsandbytes_keep_what_is_planned(dtype):
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    packed, state = functional.quantize_4bit(_weight(dtype), quant_type="nf4", blocksize=64)
    _same("nf4", "bitsandbytes", _weight(dtype), functional.dequantize_4bit(packed, state))


@every(together=1, bits=[2, 3, 4, 8], tool=["torchao", "llm-compressor", "gptqmodel", "auto-round", "modelopt"])
def test_integers_are_the_nearest_levels_of_their_tool(tool, bits):
    weight, top = _weight(torch.float32), 2 ** (bits - 1)
    largest = weight.gather(1, weight.abs().argmax(dim=1, keepdim=True))
    steps = {"modelopt": top - 1, "auto-round": -top}.get(tool, top - 0.5)
    scale = (largest if tool == "auto-round" else largest.abs()) / steps
    scale = scale.half().float() if tool == "auto-round" else scale
    kept = pf.changes.named(f"int{bits}", tool).kept(weight)
    levels = kept / scale
    torch.testing.assert_close(levels, levels.round(), atol=1e-4, rtol=0)
    least = 1 - top if tool == "modelopt" else -top
    assert least <= levels.round().min() <= levels.round().max() <= top - 1
    inside = (weight / scale < top - 0.5) & (weight / scale > least - 0.5)
    assert ((kept - weight).abs() <= 0.5001 * scale.abs())[inside].all()


def test_an_embedding_is_rounded_by_token():
    torch.manual_seed(0)
    table = nn.Embedding(7, 4)
    kept = pf.changes.of_format(table, "int3")[""] + table.weight.detach()
    torch.testing.assert_close(kept, pf.changes.named("int3").kept(table.weight.detach()))
    scales = table.weight.detach().abs().amax(dim=1) / 3.5
    assert all(len((row / scale).round().unique()) <= 8 for row, scale in zip(kept, scales, strict=True))


def test_a_name_says_whose_format_it_is():
    assert pf.changes.named("int4").tool == "torchao"
    assert pf.changes.named("mxfp4").tool == "llm-compressor"
    assert pf.changes.named("modelopt:int4").tool == pf.changes.named("int4", "modelopt").tool == "modelopt"
    assert pf.changes.named("keep", "gguf").tool == ""
    with pytest.raises(pf.errors.InputError, match="'q4_0' is no format of torchao; gguf has it"):
        pf.changes.named("q4_0", "torchao")
    for name, message in (
        ("q4_0", r"'q4_0' is no format that is known; gguf has it, as 'gguf:q4_0' or with tool='gguf'; there are int2"),
        ("nf4", "bitsandbytes has it, as 'bitsandbytes:nf4'"),
        ("int16", "'int16' is no format that is known; integers have 2 to 8 bits; there are int2"),
        ("int4-g0", "a group has at least one weight"),
        ("foo", r"'foo' is no format that is known; there are int2 .* gguf:q4_0, bitsandbytes:nf4, and pf"),
    ):
        with pytest.raises(pf.errors.InputError, match=message):
            pf.changes.named(name)
    with pytest.raises(pf.errors.InputError, match="tool: 'mlx' is none of those with formats: torchao, "):
        pf.changes.named("mlx:int4")


def test_rows_of_zeros_stay_zero_but_for_fp8_of_torchao():
    weight = _weight(torch.float32)
    weight[3] = 0
    for tool, names in {"torchao": ["int2"], "llm-compressor": ["int4", "fp8", "mxfp4", "nvfp4"], "modelopt": ["int3"],
                        "auto-round": ["int4"], "gguf": ["q4_0", "q8_0"], "bitsandbytes": ["nf4"]}.items():  # fmt: skip
        for name in names:
            assert not pf.changes.named(name, tool).kept(weight)[3].any()
    with pytest.raises(pf.errors.InputError, match="format 'fp8': what it makes of the weight has NaN"):
        pf.changes.named("fp8").kept(weight)
