"""Twenty architectures on small configurations, float64, in eval mode: what docs/models.md has a row of each.

Those of transformers have its own modules, with random weights; the others are written out here. Images are 8 or 16
pixels wide, sequences a few tokens long, so that the Hessian of every weight can be had by nested autograd.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F

import pyflatness as pf
from support.grid import Net

CLASSES, VOCABULARY = 3, 9
MEASURES = ("relative_flatness", "trace")
Forward = Callable[[nn.Module, Any], tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class Architecture:
    """A network on a small configuration, and its data.

    Attributes:
        name: as the table has it.
        build: makes the network; call :meth:`model` for one that is ready to be measured.
        batch: makes a batch.
        forward: (model, batch) -> (outputs, targets) of a cross-entropy.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Any]
    forward: Forward

    def model(self) -> nn.Module:
        """Return the network in float64, with weights under which the loss is curved in all of them."""
        with torch.random.fork_rng(devices=[]), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of batch norms in training on small images
            torch.manual_seed(1)
            model = _in_float64(_scattered(self.build()))
            self.forward(_keeping_statistics(model), self.batch())
        return model.eval()

    def risk(self, model: nn.Module) -> Tensor:
        """Return the loss that is measured."""
        return F.cross_entropy(*self.forward(model, self.batch()))

    def measured(self, model: nn.Module, measures: Sequence[str] = MEASURES, **options: Any) -> pf.results.Report:
        """Measure such a network on its batch."""
        return pf.measure(
            model, nn.CrossEntropyLoss(), [self.batch()], measures=measures, forward=self.forward, **options
        )


@functools.cache
def exact(architecture: Architecture) -> tuple[nn.Module, pf.results.Report]:
    """Return the network, and the exact values of all its layers."""
    model = architecture.model()
    return model, architecture.measured(model)


def _scattered(model: nn.Module) -> nn.Module:
    """Draw weights larger than transformers' initial ones, and scales of normalisation that are not all one."""
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            parameter.add_(0.2 * torch.randn_like(parameter))
        else:
            parameter.normal_(0, 0.7 if "embed" in name else 0.8 / parameter[0].numel() ** 0.5)
    return model


def _in_float64(model: nn.Module) -> nn.Module:
    """Let everything be in float64, also norms that compute in float32 whatever their dtype."""
    for module in model.double().modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = functools.partial(_rms_norm, module)
    return model


def _rms_norm(module: nn.Module, x: Tensor) -> Tensor:
    return module.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon))


def _keeping_statistics(model: nn.Module) -> nn.Module:
    """Let batch norms, and nothing else, be in training mode, and keep the statistics of the next batch alone."""
    model.eval()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.momentum = 1.0
            module.train()
    return model


# --- data -------------------------------------------------------------------------------------------------------------


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(size: int = 8, samples: int = 3) -> tuple[Tensor, Tensor]:
    """Return normal images (samples, 3, size, size) and their classes."""
    pixels = torch.randn(samples, 3, size, size, generator=_generator(0), dtype=torch.float64)
    return pixels, torch.arange(samples) % CLASSES


def tokens(samples: int = 2, length: int = 4) -> Tensor:
    """Return token numbers (samples, length)."""
    return torch.randint(1, VOCABULARY, (samples, length), generator=_generator(1))


def sentences() -> dict[str, Tensor]:
    """Return a batch to classify; the second sentence is one token shorter."""
    ids = tokens()
    return {"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]), "labels": torch.arange(2)}


def text() -> dict[str, Tensor]:
    """Return a batch of a language model's."""
    ids = tokens()
    return {"input_ids": ids, "labels": ids}


def pairs() -> dict[str, Tensor]:
    """Return source sentences, and what a decoder is to say."""
    return {"input_ids": tokens(), "decoder_input_ids": tokens(2, 3).flip(1), "labels": tokens(2, 3)}


def speech() -> dict[str, Tensor]:
    """Return spectrograms of 4 frequencies and 8 frames, and the words in them."""
    frames = torch.randn(2, 4, 8, generator=_generator(2), dtype=torch.float64)
    return {"input_features": frames, "decoder_input_ids": tokens(2, 3).flip(1), "labels": tokens(2, 3)}


# --- forward ----------------------------------------------------------------------------------------------------------


def of_images(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Serve as ``forward`` for pairs of inputs and targets."""
    outputs = model(batch[0])
    return getattr(outputs, "logits", outputs), batch[1]


def of_text(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Serve as ``forward`` for mappings whose labels are of the positions of the outputs, or of whole sequences."""
    logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits
    return logits.movedim(-1, 1), batch["labels"]


def of_tower(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Serve as ``forward`` for a tower of CLIP: cosines between its embeddings and one of each class."""
    outputs = model(batch[0])
    embedded = outputs.image_embeds if hasattr(outputs, "image_embeds") else outputs.text_embeds
    classes = torch.arange(CLASSES * embedded.shape[1]).to(embedded).view(-1, CLASSES).sin()
    return 5 * F.normalize(embedded, dim=-1) @ F.normalize(classes, dim=0), batch[1]


# --- transformers' ----------------------------------------------------------------------------------------------------

_TEXT = {"vocab_size": VOCABULARY, "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2}
_IMAGE = {"image_size": 8, "patch_size": 4, "num_labels": CLASSES}
_VIT = {**_IMAGE, "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 6}
_LLAMA = {**_TEXT, "num_key_value_heads": 1, "intermediate_size": 6, "max_position_embeddings": 8, "pad_token_id": 0}


def bert() -> nn.Module:
    config = hf.BertConfig(**_TEXT, intermediate_size=6, max_position_embeddings=8, num_labels=CLASSES)
    return hf.BertForSequenceClassification(config)


def gpt2() -> nn.Module:
    config = hf.GPT2Config(vocab_size=VOCABULARY, n_embd=4, n_layer=1, n_head=2, n_inner=6, n_positions=8,
        bos_token_id=0, eos_token_id=0)  # fmt: skip
    return hf.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**_LLAMA))


def mistral() -> nn.Module:
    return hf.MistralForCausalLM(hf.MistralConfig(**_LLAMA, sliding_window=2))


def qwen3() -> nn.Module:
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**_LLAMA, head_dim=2, tie_word_embeddings=True))


def mixtral() -> nn.Module:
    """Return the network with its experts computed apart: the grouped product has no float64."""
    return hf.MixtralForCausalLM(hf.MixtralConfig(**_LLAMA, num_local_experts=3, num_experts_per_tok=2,
        experts_implementation="eager"))  # fmt: skip


def t5() -> nn.Module:
    config = hf.T5Config(vocab_size=VOCABULARY, d_model=4, d_kv=2, d_ff=6, num_layers=1, num_decoder_layers=1,
        num_heads=2, relative_attention_num_buckets=4, pad_token_id=0, decoder_start_token_id=0)  # fmt: skip
    return hf.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    return hf.ViTForImageClassification(hf.ViTConfig(**_VIT))


def deit() -> nn.Module:
    return hf.DeiTForImageClassificationWithTeacher(hf.DeiTConfig(**_VIT))


def swin() -> nn.Module:
    config = hf.SwinConfig(**_IMAGE | {"image_size": 8, "patch_size": 2}, embed_dim=4, depths=[2, 1], num_heads=[2, 2],
        window_size=2, mlp_ratio=1.5)  # fmt: skip
    return hf.SwinForImageClassification(config)


def convnext() -> nn.Module:
    config = hf.ConvNextConfig(patch_size=2, num_stages=2, hidden_sizes=[3, 4], depths=[1, 1], num_labels=CLASSES,
        layer_scale_init_value=0.5)  # fmt: skip
    return hf.ConvNextForImageClassification(config)


def resnet() -> nn.Module:
    config = hf.ResNetConfig(embedding_size=2, hidden_sizes=[4, 8], depths=[1, 1], num_labels=CLASSES)
    return hf.ResNetForImageClassification(config)


def bit() -> nn.Module:
    config = hf.BitConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], num_groups=2, num_labels=CLASSES)
    return hf.BitForImageClassification(config)


def efficientnet() -> nn.Module:
    config = hf.EfficientNetConfig(width_coefficient=0.1, depth_coefficient=0.1, depth_divisor=2, hidden_dim=128,
        kernel_sizes=[3, 3], in_channels=[32, 16], out_channels=[16, 24], depthwise_padding=[], strides=[1, 2],
        num_block_repeats=[1, 1], expand_ratios=[1, 2], num_labels=CLASSES)  # fmt: skip
    return hf.EfficientNetForImageClassification(config)


def mobilenet() -> nn.Module:
    """Return the network with three of its 16 blocks."""
    config = hf.MobileNetV2Config(depth_multiplier=0.025, depth_divisible_by=2, min_depth=2, expand_ratio=2,
        finegrained_output=False, num_labels=CLASSES)  # fmt: skip
    model = hf.MobileNetV2ForImageClassification(config)
    body = model.mobilenet_v2
    body.layer = body.layer[-3:]
    first = body.layer[0].expand_1x1.convolution.in_channels
    last = body.conv_stem.reduce_1x1
    last.convolution = nn.Conv2d(last.convolution.in_channels, first, 1, bias=False)
    last.normalization = nn.BatchNorm2d(first)
    return model


def lora(config: hf.LlamaConfig | None = None, **options: Any) -> nn.Module:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    adapters = peft.LoraConfig(**{"r": 2, "target_modules": ["q_proj", "v_proj", "down_proj"], **options})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of names that peft uses
        return peft.get_peft_model(llama() if config is None else hf.LlamaForCausalLM(config), adapters)


def clip_image() -> nn.Module:
    config = hf.CLIPVisionConfig(**{k: v for k, v in _VIT.items() if k != "num_labels"}, projection_dim=4)
    return hf.CLIPVisionModelWithProjection(config)


def clip_text() -> nn.Module:
    config = hf.CLIPTextConfig(**_TEXT, intermediate_size=6, projection_dim=4, max_position_embeddings=8,
        bos_token_id=0,
        eos_token_id=VOCABULARY - 1)  # fmt: skip
    return hf.CLIPTextModelWithProjection(config)


def whisper() -> nn.Module:
    config = hf.WhisperConfig(vocab_size=VOCABULARY, num_mel_bins=4, d_model=4, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=6, decoder_ffn_dim=6,
        max_source_positions=4, max_target_positions=6, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1)  # fmt: skip
    return hf.WhisperForConditionalGeneration(config)


# --- written out ------------------------------------------------------------------------------------------------------


def _on_unet(net: Net, x: Tensor) -> Tensor:
    fine = torch.relu(net.down(x))
    coarse = torch.relu(net.bottom(F.max_pool2d(fine, 2)))
    return net.head(torch.relu(net.join(torch.cat([fine, net.up(coarse)], dim=1))))


def unet(fine: int = 3, coarse: int = 4) -> nn.Module:
    return Net(_on_unet, down=nn.Conv2d(3, fine, 3, padding=1), bottom=nn.Conv2d(fine, coarse, 3, padding=1),
        up=nn.ConvTranspose2d(coarse, fine, 2, stride=2), join=nn.Conv2d(2 * fine, fine, 3, padding=1),
        head=nn.Conv2d(fine, CLASSES, 1))  # fmt: skip


def masks() -> tuple[Tensor, Tensor]:
    """Return images and the class of each of their pixels."""
    pixels, _ = images(4, 2)
    return pixels, torch.randint(CLASSES, (2, 4, 4), generator=_generator(3))


def lstm(words: int = VOCABULARY, embedded: int = 3, units: int = 4) -> nn.Module:
    return Net(lambda net, x: net.head(net.cell(net.embed(x))[0][:, -1]), embed=nn.Embedding(words, embedded),
        cell=nn.LSTM(embedded, units, batch_first=True), head=nn.Linear(units, CLASSES))  # fmt: skip


def _on_transformer(net: Net, batch: dict[str, Tensor]) -> Tensor:
    source, target = net.source(batch["input_ids"]), net.target(batch["decoder_input_ids"])
    mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=torch.float64)
    return net.head(net.body(source, target, tgt_mask=mask, tgt_is_causal=True))


def of_transformer(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Serve as ``forward`` for the network below, which takes a batch as it is."""
    return model(batch).movedim(-1, 1), batch["labels"]


def transformer(words: int = VOCABULARY, width: int = 4, heads: int = 2, depth: int = 1, inner: int = 6) -> nn.Module:
    return Net(_on_transformer, source=nn.Embedding(words, width), target=nn.Embedding(words, width),
        body=nn.Transformer(width, heads, depth, depth, inner, batch_first=True),
        head=nn.Linear(width, words))  # fmt: skip


def words() -> tuple[Tensor, Tensor]:
    """Return sentences and their classes."""
    ids = tokens(3)
    ids[:, -1] = VOCABULARY - 1  # the end of a sentence, where CLIP looks
    return ids, torch.arange(3) % CLASSES


ARCHITECTURES = (
    Architecture("BERT", bert, sentences, of_text),
    Architecture("GPT-2", gpt2, text, pf.causal_lm),
    Architecture("Llama", llama, text, pf.causal_lm),
    Architecture("Mistral", mistral, text, pf.causal_lm),
    Architecture("Qwen3", qwen3, text, pf.causal_lm),
    Architecture("Mixtral", mixtral, text, pf.causal_lm),
    Architecture("T5", t5, pairs, of_text),
    Architecture("ViT", vit, images, of_images),
    Architecture("DeiT", deit, images, of_images),
    Architecture("Swin", swin, images, of_images),
    Architecture("ConvNeXt", convnext, images, of_images),
    Architecture("ResNet", resnet, images, of_images),
    Architecture("ResNet (BiT)", bit, images, of_images),
    Architecture("EfficientNet", efficientnet, images, of_images),
    Architecture("MobileNet", mobilenet, images, of_images),
    Architecture("UNet", unet, masks, of_images),
    Architecture("LSTM", lstm, words, of_images),
    Architecture("nn.Transformer", transformer, pairs, of_transformer),
    Architecture("Llama with LoRA", lora, text, pf.causal_lm),
    Architecture("CLIP, images", clip_image, images, of_tower),
    Architecture("CLIP, text", clip_text, words, of_tower),
    Architecture("Whisper", whisper, speech, of_text),
)
