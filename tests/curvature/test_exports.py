"""Files for other tools: exactly the planned layers have exactly the planned bits, by each tool's own rules."""

import json
import re

import pytest
import torch
from torch import nn

import pyflatness as pf

CE = nn.CrossEntropyLoss()


def _numbered(count=12):
    """Layers whose names are prefixes of one another, as 0.1 and 0.11, or mean something in patterns."""
    torch.manual_seed(0)
    layers = [part for _ in range(count) for part in (nn.Linear(32, 32), nn.Tanh())]
    model = nn.Sequential(nn.Sequential(*layers), nn.Linear(32, 32))
    model.add_module("1[0]", nn.Linear(32, 32))
    model.add_module("1*", nn.Linear(32, 32))
    return model.eval()


DATA = torch.randn(20, 32), torch.randint(32, (20,))


def _plan(tool, formats, model=None, **how):
    model = model or _numbered()
    names = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    fixed = {name: formats[place % len(formats)] for place, name in enumerate(names)}
    return pf.allocate(model, CE, DATA, formats, bits=64, fixed=fixed, tool=tool, measured=False, probes=1, **how)


def _written(tmp_path, plan, tool):
    plan.export(tool, tmp_path / "plan")
    return (tmp_path / "plan").read_text()


TOOLS = {
    "torchao": ["int4", "int3-g16", "keep"],
    "transformers": ["int4", "int3-g16", "keep"],
    "llm-compressor": ["int4", "fp8", "keep"],
    "gptqmodel": ["int4", "int3-g16", "keep"],
    "auto-round": ["int4-g32", "int2-g32", "keep"],
    "modelopt": ["int4", "int3-g16", "keep"],
    "bitsandbytes": ["nf4", "keep"],
}


@pytest.mark.parametrize("tool", TOOLS)
def test_a_plan_of_nothing_but_keep_is_written_for_each_tool(tool, tmp_path):
    assert _written(tmp_path, _plan(tool, ["keep"]), tool)


@pytest.mark.parametrize("tool", [tool for tool in TOOLS if tool != "torchao"])
def test_formats_of_another_tool_are_refused(tool, tmp_path):
    plan = pf.allocate(_numbered(1), CE, DATA, ["torchao:fp8"], bits=8, measured=False)
    if tool == "transformers":
        plan.export(tool, tmp_path / "plan")
        return
    with pytest.raises(pf.errors.InputError, match=r"layer '0\.0': its format 'torchao:fp8' is rounded as torchao"):
        plan.export(tool, tmp_path / "plan")


def test_what_a_tool_does_not_keep_is_named(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 96), nn.ReLU(), nn.Linear(96, 32), nn.Linear(32, 30)).eval()
    data = DATA[0], torch.randint(30, (20,))
    plan = pf.allocate(model, CE, data, ["int4-g64", "keep"], bits=64, fixed={"2": "int4-g64", "*": "keep"})
    with pytest.raises(pf.errors.InputError, match="layer '2': torchao takes no groups of 64 in rows of 96"):
        plan.export("torchao", tmp_path / "plan")
    plan = pf.allocate(model, CE, data, ["int4-g32"], bits=64, tool="auto-round")
    assert [*plan.choice] == ["0", "2"]
    assert "auto-round leaves a layer of 30 × 32 at 16 bits" in plan.why_uncovered["3.weight"]
    with pytest.raises(pf.errors.InputError, match="layer '3': auto-round leaves a layer of 30 × 32"):
        pf.allocate(model, CE, data, ["int4-g32"], bits=64, tool="auto-round", layers="3")


def test_nvfp4_of_layers_that_have_one_scale_together_is_refused():
    model, data = _llama(tied=False)
    named = "model.layers.0.mlp.gate_proj"
    with pytest.raises(
        pf.errors.InputError, match=f"layer '{named}': llm-compressor has one scale of nvfp4 for gate_proj"
    ):
        pf.allocate(model, CE, data, ["nvfp4"], bits=8, layers=named, tool="llm-compressor")
    plan = pf.allocate(
        model, CE, data, ["nvfp4", "int8"], bits=8, tool="llm-compressor", probes=1, measured=False,
        fixed={"lm_head": "nvfp4"},
    )  # fmt: skip
    assert plan.choice["lm_head"] == "nvfp4"
    assert plan.choice[named] == "int8"


def test_the_table_has_what_the_tool_stores():
    plan = _plan("torchao", ["int3"], _numbered(1))
    rows = plan.to_frame()
    assert rows["bits"].tolist() == [3] * 4
    assert rows["bytes"].tolist() == [32 * 32 + 32 * 5] * 4
    assert "1,536 bytes as planned, 4,736 as torchao stores them" in str(plan)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("tool", "formats"),
    [("torchao", ["int3", "int8", "keep"]), ("llm-compressor", ["int3", "int8", "keep"]), ("gguf", ["q4_0", "q8_0"])],
)
def test_a_size_is_in_the_bytes_that_the_tool_stores(tool, formats, tied):
    model, data = _llama(tied)
    how = {"tool": tool, "probes": 1, "measured": False, "layers": ["model.embed_tokens", "lm_head", "*.0.*"]}
    fine, coarse = (
        sum(row["bytes"] for row in pf.allocate(model, CE, data, [one], bits=64, **how)._rows())
        for one in (formats[-1], formats[0])
    )
    size = (fine + coarse) // 2
    plan = pf.allocate(model, CE, data, formats, size=size, **how)
    stored = sum(row["bytes"] for row in plan._rows())
    assert coarse < stored <= size
    assert len({*plan.choice.values()}) > 1
    assert f"{stored:,} as {tool} stores them" in str(plan)
    frontier = plan.frontier()
    assert sum(row["bytes"] for row in frontier.plans[0]._rows()) == frontier._rows()[0]["bytes"] == coarse
    assert "bits a weight, as planned" in str(frontier)
    assert f"{coarse:,}" in str(frontier)
    message = f"{coarse - 1} bytes: the cheapest choice takes .* {coarse} bytes as {tool} stores them: {formats[0]} for"
    with pytest.raises(pf.errors.InputError, match=message):
        pf.allocate(model, CE, data, formats, size=coarse - 1, **how)


@pytest.mark.parametrize("tool", ["torchao", "bitsandbytes", "llm-compressor"])
def test_a_shared_weight_that_a_tool_leaves_as_it_is_is_stored_once(tool):
    model, data = _llama(tied=True)
    layers = ["model.embed_tokens", "lm_head"]
    plan = pf.allocate(model, CE, data, ["keep"], bits=64, tool=tool, probes=1, measured=False, layers=layers)
    assert [row["bytes"] for row in plan._rows()] == [32 * 32 * 4, 0]


def test_of_a_tool_that_stores_a_byte_for_all_formats_a_size_takes_the_best():
    how = {"tool": "torchao", "measured": False, "probes": None}
    plan = pf.allocate(_numbered(1), "kl", DATA, ["int3", "int8"], size=4 * (32 * 32 + 32 * 5), **how)
    assert {*plan.choice.values()} == {"int8"}


class Llama(nn.Module):
    """The names of a Llama, its head tied or not."""

    def __init__(self, tied):
        super().__init__()
        self.model, self.lm_head = nn.Module(), nn.Linear(32, 32, bias=False)
        self.model.embed_tokens, self.model.layers = nn.Embedding(32, 32), nn.ModuleList()
        for _ in range(12):
            block = nn.Module()
            block.self_attn, block.mlp = nn.Module(), nn.Module()
            block.self_attn.q_proj, block.self_attn.k_proj = nn.Linear(32, 32), nn.Linear(32, 32)
            block.mlp.gate_proj, block.mlp.up_proj = nn.Linear(32, 32), nn.Linear(32, 32)
            self.model.layers.append(block)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens):
        h = self.model.embed_tokens(tokens)
        for block in self.model.layers:
            h = h + (block.self_attn.q_proj(h) + block.self_attn.k_proj(h)).tanh()
            h = h + block.mlp.gate_proj(h).sigmoid() * block.mlp.up_proj(h)
        return self.lm_head(h)


def _llama(tied):
    torch.manual_seed(0)
    return Llama(tied).eval(), (torch.randint(32, (20,)), torch.randint(32, (20,)))


def test_layers_that_vllm_runs_as_one_have_one_format():
    model, data = _llama(tied=True)
    plan = pf.allocate(model, CE, data, ["int2", "int4", "int8"], bits=4, probes=1, together="vllm", measured=False)
    for layer in range(12):
        one, other = (plan.choice[f"model.layers.{layer}.self_attn.{key}_proj"] for key in "qk")
        assert one == other
        one, other = (plan.choice[f"model.layers.{layer}.mlp.{key}_proj"] for key in ("gate", "up"))
        assert one == other
    assert len({*plan.choice.values()}) > 1
    assert plan.choice["lm_head"] == plan.choice["model.embed_tokens"]


@pytest.mark.parametrize("tied", [False, True])
def test_gguf_has_one_line_for_each_tensor(tied, tmp_path):
    model, data = _llama(tied)
    plan = pf.allocate(model, CE, data, ["q4_0", "q8_0", "keep"], bits=7, tool="gguf", probes=1, measured=False)
    assert sum(row["bytes"] for row in plan._rows()) == pytest.approx(plan.bits * plan.weights / 8)  # a tied one once
    rules = dict(line.rsplit("=", 1) for line in _written(tmp_path, plan, "gguf").splitlines())
    names = {"model.embed_tokens": "token_embd", "lm_head": "token_embd" if tied else "output"}
    own = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
    }
    names |= {f"model.layers.{n}.{key}": f"blk.{n}.{name}" for n in range(12) for key, name in own.items()}
    for layer, chosen in plan.choice.items():
        (kind,) = (kind for pattern, kind in rules.items() if re.search(pattern, f"{names[layer]}.weight"))
        assert kind == ("f16" if chosen == "keep" else chosen)
    kept = [row for row in plan._rows() if row["format"] == "keep"]
    assert kept
    assert all((row["bits"], row["bytes"]) in ((16, 2 * row["weights"]), (16, 0)) for row in kept)  # 0: counted before


@pytest.mark.soak
def test_names_of_gguf_are_llama_cpps():
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    from pyflatness.curvature.exports import gguf_name

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 12)
    own = [f"self_attn.{key}_proj" for key in "qkvo"] + [f"mlp.{key}_proj" for key in ("gate", "up", "down")]
    for name in ("model.embed_tokens", "lm_head", *(f"model.layers.11.{key}" for key in own)):
        assert gguf_name(name) == names.get_name(name)


@pytest.mark.soak
@pytest.mark.parametrize("tied", [None, False, True])
def test_torchao_makes_of_its_file_what_was_planned(tied, tmp_path):
    core = pytest.importorskip("torchao.core.config", reason="torchao is not installed")
    from torchao.quantization import quantize_

    if tied is None:
        model, plan = _numbered(), _plan("torchao", TOOLS["torchao"])
    else:
        model, data = _llama(tied)
        formats = ["int2", "int4-g16", "int8"]
        plan = pf.allocate(model, CE, data, formats, bits=4, tool="torchao", probes=1, measured=False)
        assert len({*plan.choice.values()}) > 1
    made = plan.apply(model)
    quantize_(model, core.config_from_dict(json.loads(_written(tmp_path, plan, "torchao"))), filter_fn=None)
    stored = 0
    for name, chosen in plan.choice.items():
        weight = model.get_submodule(name).weight
        assert hasattr(weight, "dequantize") == (chosen != "keep") or chosen == "keep"
        kept = weight if chosen == "keep" else weight.dequantize()
        assert torch.equal(kept, made.get_submodule(name).weight), name
        parts = [weight] if chosen == "keep" else [weight.qdata, weight.scale, weight.zero_point]
        stored += sum(part.numel() * part.element_size() for part in parts)
    assert f"{stored:,} as torchao stores them" in str(plan)


@pytest.mark.soak
def test_transformers_reads_its_file(tmp_path):
    pytest.importorskip("torchao", reason="torchao is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    plan = _plan("transformers", TOOLS["transformers"])
    read = transformers.TorchAoConfig.from_dict(json.loads(_written(tmp_path, plan, "transformers")))
    assert read.modules_to_not_convert == []
    by_name = read.get_apply_tensor_subclass().fqn_to_config
    assert {name for name, config in by_name.items() if config is None} == {
        name for name, chosen in plan.choice.items() if chosen == "keep"
    }


def test_bitsandbytes_skips_what_is_kept(tmp_path):
    matching = pytest.importorskip("transformers.quantizers.quantizers_utils", reason="transformers is not installed")
    model = _numbered()
    plan = pf.allocate(
        model, CE, DATA, ["nf4", "keep"], bits=64, layers=["0.*"], fixed={"0.2": "nf4", "0.*": "keep", "0.20": "nf4"},
        tool="bitsandbytes", measured=False, probes=1,
    )  # fmt: skip
    skipped = json.loads(_written(tmp_path, plan, "bitsandbytes"))["llm_int8_skip_modules"]
    every = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    assert [name for name in every if matching.should_convert_module(name, skipped)] == ["0.2", "0.20"]


@pytest.mark.soak
def test_model_optimizer_quantises_what_was_planned(tmp_path):
    mtq = pytest.importorskip("modelopt.torch.quantization", reason="nvidia-modelopt is not installed")
    model, plan = _numbered(), _plan("modelopt", TOOLS["modelopt"])
    made = plan.apply(model)
    yaml = pytest.importorskip("yaml", reason="pyyaml is not installed")
    config = yaml.safe_load(_written(tmp_path, plan, "modelopt"))
    mtq.quantize(model, config, lambda network: network(DATA[0]))
    for name in plan.choice:
        layer = model.get_submodule(name)
        assert torch.equal(layer.weight_quantizer(layer.weight), made.get_submodule(name).weight), name
        assert not layer.input_quantizer.is_enabled


@pytest.mark.soak
def test_llm_compressor_means_each_layer_by_its_own_pattern(tmp_path):
    utils = pytest.importorskip("compressed_tensors.utils", reason="compressed-tensors is not installed")
    plan, model = _plan("llm-compressor", TOOLS["llm-compressor"]), _numbered()
    recipe = json.loads(_written(tmp_path, plan, "llm-compressor"))
    groups = recipe["allocation_stage"]["allocation_modifiers"]["QuantizationModifier"]["config_groups"]
    found = {
        name: key for key, group in groups.items() for name, _ in utils.match_named_modules(model, group["targets"])
    }
    assert found == {name: chosen for name, chosen in plan.choice.items() if chosen != "keep"}


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")  # by transformers
@pytest.mark.parametrize("tied", [False, True])
def test_llm_compressor_makes_and_stores_what_was_planned(tied, tmp_path):
    compressor = pytest.importorskip("llmcompressor", reason="llm-compressor is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from compressed_tensors.quantization.lifecycle.forward import forward_quantize
    from safetensors.torch import load_file

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=12, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    names = [name for name, layer in model.named_modules() if isinstance(layer, (nn.Linear, nn.Embedding))]
    formats = ["int2", "int3-g32", "int4-g32", "int5", "int6-g32", "int7", "int8", "fp8", "mxfp4", "nvfp4", "keep"]
    fixed = {name: formats[place % len(formats)] for place, name in enumerate(names) if name != "lm_head"}
    data = [{"input_ids": torch.randint(64, (2, 8))}]
    of_fused = (
        name for name, one in fixed.items() if one == "nvfp4" and re.search(r"[qkv]_proj|gate_proj|up_proj", name)
    )
    fixed |= dict.fromkeys(of_fused, "mxfp4")
    how = {"bits": 64, "fixed": fixed, "tool": "llm-compressor", "measured": False, "probes": 1}
    plan = pf.allocate(model, "auto", data, formats, **how)
    made = plan.apply(model)
    _written(tmp_path, plan, "llm-compressor")
    compressor.oneshot(model=model, recipe=str((tmp_path / "plan").rename(tmp_path / "recipe.yaml")))
    for name in names:
        layer = model.get_submodule(name)
        scheme = getattr(layer, "quantization_scheme", None)
        assert (scheme is None) == (plan.choice[name] == "keep"), name
        kept = layer.weight if scheme is None else forward_quantize(layer, layer.weight, "weight", scheme.weights)
        assert torch.equal(kept, made.get_submodule(name).weight), name
    model.save_pretrained(tmp_path / "saved", save_compressed=True)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    stored = sum(part.numel() * part.element_size() for key, part in saved.items() if key.rpartition(".")[0] in names)
    assert f"{stored:,} as llm-compressor stores them" in str(plan)


@pytest.mark.soak
def test_gptqmodel_means_each_layer_by_its_own_rule(tmp_path):
    config = pytest.importorskip("gptqmodel.quantization.config", reason="gptqmodel is not installed")
    plan = _plan("gptqmodel", TOOLS["gptqmodel"])
    read = config.QuantizeConfig.from_quant_config(json.loads(_written(tmp_path, plan, "gptqmodel")))
    for name, chosen in plan.choice.items():
        bits, _, size = chosen.removeprefix("int").partition("-g")
        got = [read.dynamic_get(name, key, None) for key in ("bits", "group_size")]
        assert got == ([False, False] if chosen == "keep" else [int(bits), int(size or -1)]), name
    assert read.dynamic_get("a layer that is not of the plan") is False


@pytest.mark.soak
def test_auto_round_resolves_each_layer_as_it_is_planned(tmp_path):
    utils = pytest.importorskip("auto_round.compressors.utils", reason="auto-round is not installed")
    model, plan = _numbered(), _plan("auto-round", TOOLS["auto-round"])
    written = json.loads(_written(tmp_path, plan, "auto-round"))
    types = (nn.Linear,)
    resolved, _, _ = utils.set_layer_config(model, written, "W8A16", torch.float16, types, ())
    for name, chosen in plan.choice.items():
        bits, _, size = chosen.removeprefix("int").partition("-g")
        wanted = (16, None) if chosen == "keep" else (int(bits), int(size))
        got = resolved[name]["bits"], None if chosen == "keep" else resolved[name]["group_size"]
        assert got == wanted, name


@pytest.mark.parametrize("tool", ["gptqmodel", "modelopt", "auto-round"])
def test_a_tied_head_is_said_to_be_one_weight_with_what_the_tool_does_not_quantise(tool):
    model, data = _llama(tied=True)
    plan = pf.allocate(model, CE, data, ["int4", "int8"], bits=6, tool=tool, probes=1, measured=False)
    wanted = (
        f"without lm_head.weight: 'lm_head' is one weight with 'model.embed_tokens', which {tool} does not quantise"
    )
    assert wanted in " ".join(str(plan).split())
    untied, _ = _llama(tied=False)
    with pytest.raises(pf.errors.InputError, match="quantises no Embedding layers in this way, but Linear"):
        pf.allocate(untied, CE, data, ["int4"], bits=6, tool=tool, layers=["model.embed_tokens"])
