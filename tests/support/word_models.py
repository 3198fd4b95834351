"""A tiny random language model of transformers with a tokenizer of words, saved as people save theirs."""

from pathlib import Path

import torch

WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "sat",
    "ran",
    "on",
    "under",
    "mat",
    "hill",
    "and",
    "then",
    "it",
    "was",
    "happy",
    "sad",
]


def tokenizer():
    import tokenizers
    import transformers

    model = tokenizers.models.WordLevel({word: place for place, word in enumerate(["<unk>", "</s>", *WORDS])}, "<unk>")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="</s>")


def llama(seed: int = 0, **options):
    import transformers

    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=2 + len(WORDS), tie_word_embeddings=True, **sizes, **options)
    return transformers.LlamaForCausalLM(config).eval()


def saved(folder: Path, seed: int = 0, **options) -> Path:
    """The model and its tokenizer in a folder; ``options`` of saving, such as ``max_shard_size``."""
    llama(seed).save_pretrained(folder, **options)
    tokenizer().save_pretrained(folder)
    return folder
