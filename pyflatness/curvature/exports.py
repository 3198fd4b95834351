"""Write a choice of formats as a file that another tool reads, and list what that tool can be told of.

Each tool matches names in its own way: by regular expressions, globs, parts of names or quantisers. The files name each
layer so that the tool takes this layer and no other.
"""

import glob
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InputError
from .formats import Copy, Format
from .whole_weights import Weight

Choice = Mapping[str, Format]  # by the name of a module
Rest = Sequence[str]  # modules that the plan has no format for, and that stay as they are
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"), ("w1", "w3"))
"""Modules that vLLM runs as one."""


@dataclass(frozen=True)
class Tool:
    """Describe what a tool can be told of, and how."""

    written: Callable[[Choice, Rest], Any]  # a text, or what is written as JSON
    formats: str  # the tool whose formats it has
    kinds: tuple[str, ...]  # of the modules that it quantises
    unties: bool = False  # whether it quantises every module of a weight that several have
    once: bool = False  # whether it stores such a weight once
    # Returns why the tool does not keep a weight in a format; empty where it does.
    demand: Callable[[Weight, Format], str] = lambda weight, held: ""
    stored: Callable[[Format, int, int, int], int] | None = None  # (format, rows, columns, itemsize) -> bytes


def check_tool(tool: str) -> None:
    """Raise unless a plan can be written for a tool."""
    if tool not in TOOLS:
        raise InputError(f"tool={tool!r}: choose one of {', '.join(map(repr, TOOLS))}")


def why_not(tool: str, weight: Weight, held: Format | Copy) -> str:
    """Return the reason why a tool does not keep a weight in a format; empty if it does."""
    made, (_, columns) = TOOLS[tool], weight.matrix.shape
    if not held.changes:
        return ""
    if isinstance(held, Copy) or held.scheme is None:
        return f"{tool} cannot be told of its format {held.name!r}"
    if held.tool not in ("", made.formats):
        return (
            f"its format {held.name!r} is rounded as {held.tool} rounds, and {tool} rounds otherwise; plan with "
            f"tool={tool!r}"
        )
    if not all(weight.kinds):
        return f"it is a part of a parameter and no module, which {tool} cannot be told of"
    other = [name for name, kind in zip(weight.modules, weight.kinds, strict=True) if kind not in made.kinds]
    able = [name for name in weight.modules if name not in other]
    if other and able:
        return f"{able[0]!r} is one weight with {other[0]!r}, which {tool} does not quantise"
    if other:
        kinds = ", ".join("Conv1D" if kind == "TransposedLinear" else kind for kind in made.kinds)
        return f"{tool} quantises no {weight.kinds[0]} layers in this way, but {kinds}"
    if len(weight.kinds) > 1 and not made.unties:
        return f"{' and '.join(map(repr, weight.modules))} are one weight, of which {tool} would quantise a part alone"
    size = held.scheme.get("group_size")
    if size and columns % size:
        return f"{tool} takes no groups of {size} in rows of {columns} entries"
    return made.demand(weight, held)


def _for_llm_compressor(choice: Choice, rest: Rest) -> Any:
    groups: dict[str, Any] = {}
    for name, held in choice.items():
        if not held.scheme:
            continue
        kind, bits, size = (held.scheme[key] for key in ("type", "bits", "group_size"))
        weights = {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": False}
        weights["strategy"] = "channel" if size is None else "group"
        weights |= {} if size is None else {"group_size": size}
        scale = held.scheme.get("scale")
        if scale is not None:
            weights |= {"scale_dtype": f"torch.{scale}", "zp_dtype": f"torch.{scale}"}
            weights["strategy"] = "tensor_group" if scale == "float8_e4m3fn" else "group"
        groups.setdefault(held.name, {"targets": [], "weights": weights})["targets"].append(f"re:^{re.escape(name)}$")
    modifier = {"QuantizationModifier": {"config_groups": groups, "ignore": []}} if groups else {}
    return {"allocation_stage": {"allocation_modifiers": modifier}}


def _demand_of_llm_compressor(weight: Weight, held: Format) -> str:
    fused = next((names for names in FUSED if weight.modules[0].rpartition(".")[2] in names), None)
    if fused is None or not held.scheme or held.scheme.get("scale") != "float8_e4m3fn":
        return ""
    return f"llm-compressor has one scale of nvfp4 for {', '.join(fused)} together, where a plan has one for each"


def _for_gptqmodel(choice: Choice, rest: Rest) -> Any:
    """Return a ``quantize_config.json``; GPTQModel reads rules that leave modules alone before all others."""
    rules = {
        re.escape(name): {"bits": held.scheme["bits"], "group_size": held.scheme["group_size"] or -1}
        for name, held in choice.items()
        if held.scheme
    }
    dynamic: dict[str, Any] = {f"-:^(?!(?:{'|'.join(rules)})$)" if rules else "-:.*": {}}
    dynamic |= {f"+:^{name}$": rule for name, rule in rules.items()}
    default = next(iter(rules.values()), {"bits": 4, "group_size": -1})
    whole = {"quant_method": "gptq", "checkpoint_format": "gptq", "sym": True, "desc_act": False}
    return {**default, **whole, "dynamic": dynamic}


def _for_torchao(choice: Choice, rest: Rest) -> Any:
    by_name = {name: _of_torchao(held) for name, held in choice.items()}
    return {"_type": "FqnToConfig", "_version": 1, "_data": {"fqn_to_config": by_name, "module_fqn_to_config": by_name}}


def _of_torchao(held: Format) -> Any:
    if not held.scheme:
        return None
    bits, size = held.scheme["bits"], held.scheme["group_size"]
    if held.scheme["type"] == "float":
        rows = {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}
        return _torchao("Float8WeightOnlyConfig", weight_dtype=_torch_dtype("float8_e4m3fn"), granularity=rows)
    kind, data = ("PerAxis", {"axis": 0}) if size is None else ("PerGroup", {"group_size": size})
    granularity = {"_type": kind, "_version": 1, "_data": data}
    return _torchao("IntxWeightOnlyConfig", weight_dtype=_torch_dtype(f"int{bits}"), granularity=granularity)


def _torchao(kind: str, **data: Any) -> dict[str, Any]:
    return {"_type": kind, "_version": 2, "_data": data}


def _torch_dtype(name: str) -> dict[str, str]:
    return {"_type": "torch.dtype", "_data": name}


def _for_transformers(choice: Choice, rest: Rest) -> Any:
    """Return a ``quantization_config``; without its empty list transformers leaves a head that is named as it is."""
    return {
        "quant_method": "torchao",
        "quant_type": {"default": _for_torchao(choice, rest)},
        "modules_to_not_convert": [],
    }


def _for_bitsandbytes(choice: Choice, rest: Rest) -> Any:
    """Return a ``quantization_config`` whose list of skipped modules is all that the plan does not quantise.

    Names without ``^`` would mean all modules whose names end so.
    """
    kept = [name for name, held in choice.items() if not held.scheme]
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": False,
        "llm_int8_skip_modules": [f"^{re.escape(name)}$" for name in (*kept, *rest)],
    }


def _for_auto_round(choice: Choice, rest: Rest) -> Any:
    """Return a ``layer_config`` of full names of layers, which count more than parts of names."""
    return {name: {"bits": 16} for name in (*choice, *rest)} | {
        name: {"bits": held.scheme["bits"], "group_size": held.scheme["group_size"] or -1, "sym": True}
        for name, held in choice.items()
        if held.scheme
    }


def _for_modelopt(choice: Choice, rest: Rest) -> str:
    """Return a configuration for ``mtq.quantize`` as YAML, whose keys may be numbers; later entries override."""
    entries: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    for name, held in choice.items():
        if not held.scheme:
            continue
        size, bits = held.scheme["group_size"], held.scheme["bits"]
        cfg = {"num_bits": bits, **({"axis": 0} if size is None else {"block_sizes": {_LAST: size}})}
        entries.append({"quantizer_name": f"{glob.escape(name)}.weight_quantizer", "cfg": cfg, "enable": True})
    text = json.dumps({"quant_cfg": entries, "algorithm": "max"}, indent=2)
    return text.replace(f'"{_LAST}":', "-1:") + "\n"


_LAST = "the last axis"
_OF_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str | None:
    """Return the name that llama.cpp has for a weight of a model like Llama; None where none is known."""
    if name in ("model.embed_tokens", "lm_head"):
        return "token_embd" if name.startswith("model") else "output"
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    own = _OF_LAYER.get(found[2]) if found else None
    return f"blk.{found[1]}.{own}" if found and own else None


def _gguf_demand(weight: Weight, held: Format) -> str:
    if weight.matrix.shape[1] % 32:
        return f"blocks of 32 do not divide its rows of {weight.matrix.shape[1]} entries"
    return "" if gguf_name(weight.modules[0]) else "the name of its tensor in a GGUF file is not known"


def _for_gguf(choice: Choice, rest: Rest) -> str:
    """Return the lines of a ``--tensor-type-file``: patterns of which llama-quantize takes the first that matches."""
    names = {name: gguf_name(name) for name in choice}
    types = {
        own: held.scheme["type"] if held.scheme else "f16" for name, held in choice.items() if (own := names[name])
    }
    return "".join(f"^{re.escape(name)}\\.weight$={kind}\n" for name, kind in types.items())


def _demand_of_auto_round(weight: Weight, held: Format) -> str:
    rows, columns = weight.matrix.shape
    told = f"auto-round leaves a layer of {rows} × {columns} at 16 bits: not multiples of 32"
    return told if rows % 32 or columns % 32 else ""


def _bytes_of_torchao(held: Format, rows: int, columns: int, own: int) -> int:
    """Return a byte for each weight, and a scale and a zero point of a byte for each row or group."""
    if not held.scheme:
        return rows * columns * own
    if held.scheme["type"] == "float":
        return rows * (columns + 4)
    size = held.scheme["group_size"] or columns
    return rows * columns + rows * -(-columns // size) * (own + 1)


def _bytes_of_llm_compressor(held: Format, rows: int, columns: int, own: int) -> int:
    """Return 32-bit words of a row's integers and 16 bytes for their shape, or the bytes of floats; and scales."""
    if not held.scheme:
        return rows * columns * own
    bits: int = held.scheme["bits"]
    groups: int = rows * (columns // (held.scheme["group_size"] or columns))
    if held.scheme["type"] == "int":
        return 4 * rows * -(-columns * bits // 32) + 16 + groups * own
    scale = held.scheme.get("scale")
    whole = 4 if scale == "float8_e4m3fn" else 0
    return rows * columns * bits // 8 + groups * (1 if scale else own) + whole


def _bytes_as_planned(held: Format, rows: int, columns: int, own: int) -> int:
    bits = held.bits(rows, columns, 8 * own) if callable(held.bits) else held.bits
    return -(-int(bits * rows * columns) // 8)


def stored(tool: str | None, weight: Weight, held: Format) -> list[int]:
    """Return the bytes that a tool stores of a weight in each module that has it; empty where they are unknown.

    A weight that the tool leaves as it is stays one tensor for all of its modules.
    """
    made = None if tool is None else TOOLS[tool]
    if made is None or made.stored is None:
        return []
    rows, columns = weight.matrix.shape
    whole = made.stored(held, rows, columns, weight.matrix.itemsize)
    once = made.once or not held.scheme
    return [0 if place and once else whole for place in range(len(weight.modules))]


LINEAR = ("Linear", "TransposedLinear")
_LINEAR = ("Linear",)
_TABLES = ("Linear", "Embedding")
TOOLS = {
    "llm-compressor": Tool(
        _for_llm_compressor,
        "llm-compressor",
        _TABLES,
        unties=True,
        once=True,
        demand=_demand_of_llm_compressor,
        stored=_bytes_of_llm_compressor,
    ),
    "gptqmodel": Tool(_for_gptqmodel, "gptqmodel", LINEAR),
    "torchao": Tool(_for_torchao, "torchao", _TABLES, unties=True, stored=_bytes_of_torchao),
    "transformers": Tool(_for_transformers, "torchao", _TABLES, unties=True, stored=_bytes_of_torchao),
    "bitsandbytes": Tool(_for_bitsandbytes, "bitsandbytes", _LINEAR, stored=_bytes_as_planned),
    "auto-round": Tool(_for_auto_round, "auto-round", _LINEAR, demand=_demand_of_auto_round),
    "modelopt": Tool(_for_modelopt, "modelopt", _LINEAR),
    "gguf": Tool(_for_gguf, "gguf", _TABLES, unties=True, once=True, demand=_gguf_demand, stored=_bytes_as_planned),
}
