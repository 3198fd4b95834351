"""The architectures at the sizes that people have, from their configurations: on the meta device, without memory."""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from pyflatness.model import calling, selectors, uses
from pyflatness.passes import linearity
from pyflatness.passes.accounting import Accounting
from pyflatness.passes.recorder import Recorder
from support import architectures as small
from support.weight_truth import parameter_of, rows_of, weights

BY_NAME = {architecture.name: architecture for architecture in small.ARCHITECTURES}


@dataclass(frozen=True)
class Full:
    """An architecture as people have it.

    Attributes:
        says: which.
        build: makes the network.
        batch: makes a batch of it.
    """

    says: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Any]


@dataclass(frozen=True)
class Layer:
    """A layer that would be measured.

    Attributes:
        entries: of its weight.
        products: Hessian products that its exact value takes: rows of the weight (of its row space, if that has fewer
            dimensions) times directions of a sample's inputs.
    """

    entries: int
    products: int


@dataclass(frozen=True)
class Coverage:
    """What of a network's weights would be measured.

    Attributes:
        entries: of all weights.
        layers: by name.
        uncovered: weight -> share, see :attr:`pyflatness.results.Report.uncovered`.
        passes: backward passes that an exact GGN takes: columns of a term's factor times terms of a sample.
    """

    entries: int
    layers: dict[str, Layer]
    uncovered: dict[str, float]
    passes: int


def coverage(model: nn.Module, batch: Any, forward: small.Forward) -> Coverage:
    """Return what of a network's weights would be measured, by a run of it, which may be on the meta device."""
    with uses.held(model):
        modules = selectors.select(model, None).modules
        with torch.enable_grad(), uses.attached(modules), calling.Calls(modules) as calls:
            outputs, _ = calling.run(model, batch, forward)
            others = uses.otherwise(modules, calls.count.keys(), linearity.users_of(outputs).keys())
            outputs_of = {
                name: calls.count[name] * call.output.numel()
                for name, call in calls.last.items()
                if not _of_all_samples(modules[name], call.output, len(outputs))
            }
            accounting = Accounting(model, {}, Recorder({}), batch, forward)
            with contextlib.suppress(NotImplementedError):  # weights that are computed are compared between calls
                outputs = accounting.run(len(outputs))
                uses.note_flat(model, accounting.account(outputs).flat)
        ran = {name: module for name, module in modules.items() if name in outputs_of and name not in others}
        left_out = uses.left_out(model, [*ran.values()])
    return Coverage(
        entries=sum(weight.numel() for weight in weights(model).values()),
        layers={name: _layer(model, name, outputs_of[name] // len(outputs)) for name in ran},
        uncovered=left_out,
        passes=(outputs.shape[1] - 1) * outputs[0, 0].numel(),
    )


def _of_all_samples(module: nn.Module, output: Tensor, samples: int) -> bool:
    """Return whether a table is looked up for pairs of positions of all samples together, as T5 does."""
    return isinstance(module, nn.Embedding) and output.ndim > 2 and output.shape[0] not in (1, samples)


def _layer(model: nn.Module, name: str, outputs: int) -> Layer:
    """Return a layer that has so many outputs for a sample."""
    parameter, part = parameter_of(model, name)
    holder = model.get_submodule(parameter.rpartition(".")[0])
    groups, d, m = rows_of(holder, getattr(holder, parameter.rpartition(".")[2])[part]).shape
    return Layer(groups * d * m, groups * min(d, m) * min(outputs // (groups * d), m))


_LENGTH = 64  # of sequences


def _sentences() -> dict[str, Tensor]:
    return {"input_ids": small.tokens(2, _LENGTH), "labels": torch.arange(2)}


def _text() -> dict[str, Tensor]:
    return {"input_ids": small.tokens(2, _LENGTH), "labels": small.tokens(2, _LENGTH)}


def _pairs() -> dict[str, Tensor]:
    return {**_text(), "decoder_input_ids": small.tokens(2, _LENGTH)}


def _words() -> tuple[Tensor, Tensor]:
    return small.tokens(2, _LENGTH), torch.arange(2)


def _images() -> tuple[Tensor, Tensor]:
    return small.images(224, 1)


def _masks() -> tuple[Tensor, Tensor]:
    return torch.zeros(1, 3, 256, 256, dtype=torch.float64), torch.zeros(1, 256, 256, dtype=torch.long)


def _speech() -> dict[str, Tensor]:
    texts = {key: ids for key, ids in _pairs().items() if key != "input_ids"}
    return {**texts, "input_features": torch.zeros(2, 80, 3000, dtype=torch.float64)}


def _qwen3() -> nn.Module:
    config = hf.Qwen3Config(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, tie_word_embeddings=True)  # fmt: skip
    return hf.Qwen3ForCausalLM(config)


def _mixtral() -> nn.Module:
    return hf.MixtralForCausalLM(hf.MixtralConfig(experts_implementation="batched_mm"))


FULL = {
    "BERT": Full("base", lambda: hf.BertForSequenceClassification(hf.BertConfig()), _sentences),
    "GPT-2": Full("small", lambda: hf.GPT2LMHeadModel(hf.GPT2Config()), _text),
    "Llama": Full("2, 7 B", lambda: hf.LlamaForCausalLM(hf.LlamaConfig()), _text),
    "Mistral": Full("7 B", lambda: hf.MistralForCausalLM(hf.MistralConfig()), _text),
    "Qwen3": Full("0.6 B", _qwen3, _text),
    "Mixtral": Full("8 x 7 B", _mixtral, _text),
    "T5": Full("small", lambda: hf.T5ForConditionalGeneration(hf.T5Config()), _pairs),
    "ViT": Full("B/16", lambda: hf.ViTForImageClassification(hf.ViTConfig(num_labels=1000)), _images),
    "DeiT": Full("B/16", lambda: hf.DeiTForImageClassificationWithTeacher(hf.DeiTConfig(num_labels=1000)), _images),
    "Swin": Full("T", lambda: hf.SwinForImageClassification(hf.SwinConfig(num_labels=1000)), _images),
    "ConvNeXt": Full("T", lambda: hf.ConvNextForImageClassification(hf.ConvNextConfig(num_labels=1000)), _images),
    "ResNet": Full("50", lambda: hf.ResNetForImageClassification(hf.ResNetConfig(num_labels=1000)), _images),
    "ResNet (BiT)": Full("50", lambda: hf.BitForImageClassification(hf.BitConfig(num_labels=1000)), _images),
    "EfficientNet": Full(
        "B7", lambda: hf.EfficientNetForImageClassification(hf.EfficientNetConfig(num_labels=1000)), _images
    ),
    "MobileNet": Full(
        "V2", lambda: hf.MobileNetV2ForImageClassification(hf.MobileNetV2Config(num_labels=1000)), _images
    ),
    "UNet": Full("64 channels", lambda: small.unet(64, 128), _masks),
    "LSTM": Full("512 units, 30,000 words", lambda: small.lstm(30_000, 256, 512), _words),
    "nn.Transformer": Full("512 wide, 6 + 6 layers", lambda: small.transformer(30_000, 512, 8, 6, 2048), _pairs),
    "Llama with LoRA": Full("7 B, rank 8", lambda: small.lora(hf.LlamaConfig(), r=8), _text),
    "CLIP, images": Full("ViT-B/32", lambda: hf.CLIPVisionModelWithProjection(hf.CLIPVisionConfig()), _images),
    "CLIP, text": Full("ViT-B/32", lambda: hf.CLIPTextModelWithProjection(hf.CLIPTextConfig()), _words),
    "Whisper": Full("tiny", lambda: hf.WhisperForConditionalGeneration(hf.WhisperConfig()), _speech),
}


@functools.cache
def of_full(name: str) -> Coverage:
    """Return what of a full architecture's weights would be measured; nothing is computed for it."""
    with torch.device("meta"):
        model = FULL[name].build().double().eval()
        return coverage(model, _on_meta(FULL[name].batch()), BY_NAME[name].forward)


def _on_meta(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {key: tensor.to("meta") for key, tensor in batch.items()}
    return tuple(tensor.to("meta") for tensor in batch)
