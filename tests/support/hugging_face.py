"""Small random models of transformers, from configurations, with batches as their processors make them."""

import torch

VOCABULARY, WIDTH, SAMPLES, LENGTH = 23, 16, 3, 6


def _of(name, **options):
    import transformers

    torch.manual_seed(0)
    kind = getattr(transformers, name)
    config = kind.config_class(**options)
    return kind(config).eval()


_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
_SMALL_LLAMA = {**_DECODER, "num_key_value_heads": 1, "pad_token_id": 0}
_GPT2 = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": WIDTH, "n_layer": 1, "n_head": 2, "pad_token_id": 0}
_BERT = {**_DECODER, "max_position_embeddings": 32}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "d_kv": 8,
    "d_ff": 16,
    "num_layers": 1,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
_BART = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "max_position_embeddings": 32,
}
_VIT = {
    "image_size": 8,
    "patch_size": 4,
    "hidden_size": WIDTH,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
_WHISPER = {
    **_BART,
    "num_mel_bins": 4,
    "max_source_positions": 4,
    "max_target_positions": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
_MIXTRAL = {**_SMALL_LLAMA, "num_local_experts": 2, "num_experts_per_tok": 1}


def _tokens():
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, VOCABULARY, (SAMPLES, LENGTH), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, 4:] = 0
    return {"input_ids": tokens.masked_fill(mask == 0, 0), "attention_mask": mask}


def _next():
    """Labels of a causal model: the tokens, with padding ignored."""
    batch = _tokens()
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def _each(classes=VOCABULARY):
    """A label for some of the tokens."""
    batch = _tokens()
    labels = (batch["input_ids"] * 5 + 1) % classes
    labels[:, ::2] = -100
    return {**batch, "labels": labels}


def _translation():
    labels = torch.tensor([[4, 7, 2], [5, 2, -100], [9, 8, 2]])
    return {**_tokens(), "labels": labels}


def _of_samples(labels):
    return {**_tokens(), "labels": labels}


def _answers():
    return {**_tokens(), "start_positions": torch.tensor([1, 0, 3]), "end_positions": torch.tensor([4, 2, 3])}


def _choices():
    """Two texts for each sample, of which one is right."""
    return {
        "input_ids": torch.stack([_tokens()["input_ids"], _tokens()["input_ids"].flip(0)], dim=1),
        "labels": torch.tensor([0, 1, 1]),
    }


def _images(labels):
    return {"pixel_values": torch.randn(SAMPLES, 3, 8, 8, generator=torch.Generator().manual_seed(2)), "labels": labels}


def _sound():
    return {
        "input_features": torch.randn(SAMPLES, 4, 8, generator=torch.Generator().manual_seed(3)),
        "labels": _translation()["labels"],
    }


_CLASSES = torch.tensor([2, 0, 1])
_NUMBERS = torch.tensor([0.5, -1.0, 2.0])
_SEVERAL = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0], [1.0, 1.0, 0.0]])

# name -> (model, a batch)
FAMILIES = {
    "GPT-2": lambda: (_of("GPT2LMHeadModel", **_GPT2), _next()),
    "BERT, answers": lambda: (_of("BertForQuestionAnswering", **_BERT), _answers()),
    "Llama": lambda: (_of("LlamaForCausalLM", **_SMALL_LLAMA), _next()),
    "Mistral": lambda: (_of("MistralForCausalLM", **_SMALL_LLAMA), _next()),
    "Qwen3": lambda: (_of("Qwen3ForCausalLM", **_SMALL_LLAMA, head_dim=8), _next()),
    "Mixtral": lambda: (_of("MixtralForCausalLM", **_MIXTRAL), _next()),
    "BERT as a decoder": lambda: (_of("BertLMHeadModel", **_BERT, is_decoder=True), _next()),
    "BART's decoder, which shifts nothing": lambda: (_of("BartForCausalLM", **_BART), _next()),
    "BERT, masked": lambda: (_of("BertForMaskedLM", **_BERT), _each()),
    "RoBERTa, masked": lambda: (_of("RobertaForMaskedLM", **_BERT, pad_token_id=0), _each()),
    "T5": lambda: (_of("T5ForConditionalGeneration", **_T5), _translation()),
    "BART": lambda: (_of("BartForConditionalGeneration", **_BART), _translation()),
    "mBART, which moves the last token to the front": lambda: (
        _of("MBartForConditionalGeneration", **_BART), _translation(),
    ),
    "Whisper": lambda: (_of("WhisperForConditionalGeneration", **_WHISPER), _sound()),
    "BERT, a choice": lambda: (_of("BertForMultipleChoice", **_BERT), _choices()),
    "BERT, classes": lambda: (_of("BertForSequenceClassification", **_BERT, num_labels=3), _of_samples(_CLASSES)),
    "BERT, a number": lambda: (_of("BertForSequenceClassification", **_BERT, num_labels=1), _of_samples(_NUMBERS)),
    "BERT, a whole number": lambda: (
        _of("BertForSequenceClassification", **_BERT, num_labels=1), _of_samples(_CLASSES),
    ),
    "BERT, numbers": lambda: (
        _of("BertForSequenceClassification", **_BERT, num_labels=3, problem_type="regression"), _of_samples(_SEVERAL),
    ),
    "BERT, several labels": lambda: (
        _of("BertForSequenceClassification", **_BERT, num_labels=3), _of_samples(_SEVERAL),
    ),
    "GPT-2, classes": lambda: (_of("GPT2ForSequenceClassification", **_GPT2, num_labels=3), _of_samples(_CLASSES)),
    "BERT, tokens": lambda: (_of("BertForTokenClassification", **_BERT, num_labels=3), _each(3)),
    "ViT": lambda: (_of("ViTForImageClassification", **_VIT, num_labels=3), _images(_CLASSES)),
    "ViT, several labels": lambda: (_of("ViTForImageClassification", **_VIT, num_labels=3), _images(_SEVERAL)),
}  # fmt: skip

_PLAIN = {**_BERT, "pad_token_id": 0}
_DECODER_OF_TWO = {"vocab_size": VOCABULARY, "d_model": WIDTH, "decoder_layers": 1, "decoder_attention_heads": 2,
                   "decoder_ffn_dim": 16}  # fmt: skip
_SMALL_GPT = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 1, "n_head": 2}
_SWITCH = {**_T5, "num_experts": 2}
_LED = {**_BART, "max_encoder_position_embeddings": 32, "max_decoder_position_embeddings": 32, "attention_window": 4}

# model -> its configuration; all take labels of the tokens
MORE = {
    "OPTForCausalLM": {**_DECODER, "ffn_dim": 16, "word_embed_proj_dim": WIDTH},
    "BloomForCausalLM": {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "n_layer": 1, "n_head": 2},
    "FalconForCausalLM": _DECODER,
    "GemmaForCausalLM": {**_SMALL_LLAMA, "head_dim": 8},
    "Gemma3ForCausalLM": {**_SMALL_LLAMA, "head_dim": 8},
    "PhiForCausalLM": _PLAIN,
    "GPTNeoXForCausalLM": _PLAIN,
    "GPTJForCausalLM": {**_SMALL_GPT, "rotary_dim": 4},
    "MambaForCausalLM": {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "state_size": 4, "num_hidden_layers": 1},
    "OpenAIGPTLMHeadModel": _SMALL_GPT,
    "CTRLLMHeadModel": {**_SMALL_GPT, "dff": 16},
    "GPT2DoubleHeadsModel": _GPT2,
    "XLNetLMHeadModel": {"vocab_size": VOCABULARY, "d_model": WIDTH, "n_layer": 1, "n_head": 2, "d_inner": 16},
    "XLMWithLMHeadModel": {"vocab_size": VOCABULARY, "emb_dim": WIDTH, "n_layers": 1, "n_heads": 2},
    "RobertaForCausalLM": {**_PLAIN, "is_decoder": True},
    "XLMRobertaForCausalLM": {**_PLAIN, "is_decoder": True},
    "MBartForCausalLM": _DECODER_OF_TWO,
    "MarianForCausalLM": {**_DECODER_OF_TWO, "pad_token_id": 0},
    "PegasusForCausalLM": _DECODER_OF_TWO,
    "BlenderbotForCausalLM": _DECODER_OF_TWO,
    "TrOCRForCausalLM": _DECODER_OF_TWO,
    "DistilBertForMaskedLM": {"vocab_size": VOCABULARY, "dim": WIDTH, "n_layers": 1, "n_heads": 2, "hidden_dim": 16},
    "AlbertForMaskedLM": {**_PLAIN, "embedding_size": WIDTH},
    "DebertaV2ForMaskedLM": _PLAIN,
    "M2M100ForConditionalGeneration": _BART,
    "LEDForConditionalGeneration": _LED,
    "PegasusForConditionalGeneration": _BART,
    "MT5ForConditionalGeneration": _T5,
    "SwitchTransformersForConditionalGeneration": _SWITCH,
}


def more(name):
    """A model of :data:`MORE` with a batch."""
    return _of(name, **MORE[name]), {"input_ids": _tokens()["input_ids"], "labels": _tokens()["input_ids"]}
