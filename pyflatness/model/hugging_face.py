"""Call models of Hugging Face's transformers on batches from their processors.

A batch is a mapping of the model's keyword arguments, and ``labels``. The model is called without the labels. Outputs
and labels are matched as in the model's own loss: a causal language model's output at a position predicts the next
position's label, and a decoder gets the labels one position later.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError

IGNORED = -100  # the label that a loss ignores

_CAUSAL = (
    *("ForCausalLM", "LMHeadModel", "ModelWithLMHead", "DoubleHeadsModel"),
    *("ForConditionalGeneration", "ForImageTextToText"),
)
# Decoders of translation models and a few others take labels that the user has shifted.
_NOT_SHIFTED = (
    *("Bart", "BigBirdPegasus", "Blenderbot", "CpmAnt", "FlaubertWith", "MBart", "Marian", "Musicgen", "Mvp"),
    *("PLBart", "Pegasus", "ProphetNet", "TrOCR", "Whisper", "XLMWith", "XLNet"),
)


@dataclass(frozen=True)
class Prepared:
    """Hold a batch as a model's keyword arguments and its targets."""

    inputs: dict[str, Any]
    targets: Any
    shifted: bool = False  # whether the output at a position predicts the label of the next one
    spans: bool = False  # whether targets are the first and last token of an answer, (n, 2)


def inner(model: nn.Module) -> nn.Module | None:
    """Return the model of transformers that a module is, or that PEFT wraps; None for another module."""
    if _is_of(model, "peft"):
        model = getattr(model, "get_base_model", lambda: model)()
    return model if _is_of(model, "transformers", "PreTrainedModel") else None


def prepared(model: nn.Module, batch: Mapping[str, Any]) -> Prepared:
    """Return the keyword arguments for a model, of transformers or another, and the targets of its outputs."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    own, targets = inner(model), batch.get("labels")
    if own is None:
        return Prepared(inputs, batch["labels"])
    if any(kind.__name__.endswith("ForQuestionAnswering") for kind in _kinds(own)):
        return _of_spans(own, batch)
    causal = is_causal(own)
    if targets is None:
        if not causal:
            raise InputError(
                f"data: batches have no `labels`, which {type(own).__name__} needs; there are {', '.join(inputs)}"
                f"{_MASK if any(kind.__name__.endswith('ForMaskedLM') for kind in _kinds(own)) else ''}"
            )
        targets = causal_labels(batch)
    tokens = isinstance(targets, Tensor) and targets.ndim == 2 and not targets.is_floating_point()
    if tokens and _generates(own) and not {"decoder_input_ids", "decoder_inputs_embeds"} & {*inputs}:
        inputs["decoder_input_ids"] = _decoder_inputs(own, targets)
    return Prepared(inputs, targets, causal and tokens)


def _of_spans(model: nn.Module, batch: Mapping[str, Any]) -> Prepared:
    """Return a batch of questions with the first and last token of each answer as targets, (n, 2)."""
    positions = [one for name in _POSITIONS if isinstance(one := batch.get(name), Tensor) and one.numel() == len(one)]
    if len(positions) < len(_POSITIONS):
        raise InputError(
            f"data: batches have no {' and '.join(map(repr, _POSITIONS))}, one number for each sample, which "
            f"{type(model).__name__} needs; there are {', '.join(batch)}"
        )
    inputs = {key: value for key, value in batch.items() if key not in (*_POSITIONS, "labels")}
    targets = torch.stack([one.reshape(-1).clamp(min=0) for one in positions], dim=1)
    return Prepared(inputs, targets, spans=True)


def span_logits(outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits (n, T, 2) of an answer's first and last token, and targets; those behind the text are ignored."""
    logits = [one for name in _SPAN_LOGITS if isinstance(one := getattr(outputs, name, None), Tensor)]
    if len(logits) < len(_SPAN_LOGITS):
        raise InputError(
            f"model: it gives {type(outputs).__name__} without `start_logits` and `end_logits`; pass forward=, a "
            "function (model, batch) -> (outputs, targets)"
        )
    both = torch.stack(logits, dim=-1)
    return both, targets.masked_fill(targets >= both.shape[1], IGNORED)


def is_causal(model: nn.Module) -> bool:
    """Return whether each output of a model of transformers predicts the next position's label in its loss."""
    encodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return not encodes and any(
        kind.__name__.endswith(_CAUSAL) and not kind.__name__.startswith(_NOT_SHIFTED) for kind in _kinds(model)
    )


def causal_labels(batch: Mapping[str, Any]) -> Tensor:
    """Return a causal language model's labels, or without them its tokens, with masked ones and the next ones ignored.

    A token after a masked one would have to be predicted from it. So the side of the padding makes no difference.
    """
    labels, tokens, mask = (batch.get(name) for name in ("labels", "input_ids", "attention_mask"))
    if isinstance(labels, Tensor):
        return labels
    if not isinstance(tokens, Tensor):
        raise InputError(f"data: batches have neither `labels` nor `input_ids`; there are {', '.join(map(str, batch))}")
    if not isinstance(mask, Tensor) or mask.shape != tokens.shape:
        return tokens
    there = mask != 0
    there[:, 1:] = there[:, 1:] & (mask[:, :-1] != 0)
    return tokens.masked_fill(~there, IGNORED)


def problem(model: nn.Module, labels: Tensor) -> str:
    """Return which loss a model of transformers computes: ``classes``, ``values`` or ``binary``.

    For a model that classifies whole samples, ``config.problem_type`` or the number and dtype of labels decide.
    """
    config = getattr(model, "config", None)
    if not any(name in kind.__name__ for kind in _kinds(model) for name in _CLASSIFIES):
        return "classes"
    given = getattr(config, "problem_type", None)
    if given is None:
        several = "binary" if labels.is_floating_point() else "classes"
        return "values" if getattr(config, "num_labels", 2) == 1 else several
    return {"regression": "values", "multi_label_classification": "binary"}.get(given, "classes")


def _generates(model: nn.Module) -> bool:
    """Return whether a model has a decoder that generates a text."""
    names = [kind.__name__ for kind in _kinds(model)]
    encodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return bool(encodes) and not any("Classification" in name or "QuestionAnswering" in name for name in names)


def _decoder_inputs(model: nn.Module, labels: Tensor) -> Tensor:
    """Return the labels one position later, as the model itself computes its decoder's inputs from them."""
    for name in ("prepare_decoder_input_ids_from_labels", "_shift_right"):
        method = getattr(model, name, None)
        if callable(method):
            made: Tensor = method(labels)
            return made
    config: Any = model.config
    later = labels.new_full(labels.shape, config.decoder_start_token_id)
    later[:, 1:] = labels[:, :-1]
    return later.masked_fill_(later == IGNORED, config.pad_token_id)


def _kinds(model: nn.Module) -> list[type]:
    return [kind for kind in type(model).__mro__ if kind.__module__.partition(".")[0] in _PACKAGES]


def _is_of(model: nn.Module, package: str, name: str = "") -> bool:
    return any(
        kind.__module__.partition(".")[0] == package and name in ("", kind.__name__) for kind in type(model).__mro__
    )


_PACKAGES = ("transformers", "transformers_modules")
_POSITIONS = ("start_positions", "end_positions")
_SPAN_LOGITS = ("start_logits", "end_logits")
_CLASSIFIES = [f"For{what}Classification" for what in ("Sequence", "Image", "Video", "Audio")]
_MASK = " (of files of texts, mask=0.15 makes them, with random tokens masked)"
