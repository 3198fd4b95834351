"""
Measure a language model
========================

The models of Hugging Face's transformers are measured as they are: they bring their own
loss, and the batches are what the tokenizer or data collator makes. This example trains a
tiny GPT-2 for a few seconds and measures all of its layers. Nothing is downloaded. For a
model of yours, load it by ``AutoModelForCausalLM.from_pretrained``, and begin at `Measure
all layers`_. It needs the extras ``hf`` and ``plot`` (``pip install
'pyflatness[hf,plot]'``).
"""

# %%
# Make a model and a language
# ---------------------------
#
# The language has 50 words. Each word can be followed by three others, which are drawn at
# random once, and the model has to learn which.

import torch
from matplotlib import pyplot as plt
from transformers import GPT2Config, GPT2LMHeadModel

import pyflatness as pf

torch.manual_seed(0)
words, length = 50, 32
successors = torch.randint(words, (words, 3))


def sentences(count: int) -> torch.Tensor:
    """Return token numbers (count, length) of random sentences."""
    tokens = [torch.randint(words, (count,))]
    for choice in torch.randint(3, (length - 1, count)):
        tokens.append(successors[tokens[-1], choice])
    return torch.stack(tokens, dim=1)


sizes = {
    "vocab_size": words,
    "n_positions": length,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 2,
}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
model.loss_type = "ForCausalLM"  # as transformers takes it anyway, with a warning
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for _ in range(60):
    batch = sentences(32)
    risk = model(input_ids=batch, labels=batch).loss
    optimizer.zero_grad()
    risk.backward()
    optimizer.step()
model = model.eval()
print(f"loss of the last batch: {risk.item():.3f}, at best {torch.tensor(3.0).log():.3f}")

# %%
# Measure all layers
# ------------------
#
# The data are a list of batches, each a mapping of the model's keyword arguments. A
# ``DataLoader`` of such mappings serves as well. Exact values of the hidden layers would
# take a backward pass for each token and word, about 1,500 for a sentence. ``probes=8``
# takes eight backward passes instead, each with a random combination of all of these, and
# gives every value a standard error. ``curvature="ggn"`` asks for the generalised
# Gauss-Newton matrix, which is the usual choice for language models (:doc:`/models`).

batches = [{"input_ids": sentences(16)} for _ in range(4)]
report = pf.measure(
    model, data=batches, measures="relative_flatness", probes=8, curvature="ggn"
)
print(report)

# %%
# The brackets are 95 % intervals. The head, ``lm_head``, is exact even here, since it has
# a formula. Its weight is also the table of words (``transformer.wte``): the two are tied
# in GPT-2, and each row of the report has the curvature through one of the two uses.
#
# Draw the profile
# ----------------
#
# The figure shows the layers from the first to the last on a logarithmic axis. The bars
# are the intervals of the table. A higher point is a sharper layer: there, changes in
# proportion to the weights raise the loss by more.

figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
report.plot(axes=axes)

# %%
# The head alone
# --------------
#
# The value of the head needs neither probes nor a backward pass. It is exact, and takes
# one forward pass over the data whatever the size of the vocabulary.

print(pf.relative_flatness(model, data=batches))
plt.show()

# %%
# :doc:`/models` lists the architectures that are measured, and says what is taken as a
# layer in each. For a model that ``save_pretrained`` has written, ``pyflatness score
# --model hf:folder --data texts.txt`` does the same from the command line.
