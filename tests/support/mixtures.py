"""Small mixtures of experts in float64, with modules of transformers' for the experts and a router of their own."""

from types import SimpleNamespace

import torch
from torch import nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from support.grid import normal

EXPERTS, WIDTH, INNER, CLASSES = 3, 4, 3, 3
KINDS = {  # by what is special about them
    "gated": MixtralExperts,
    "transposed, with biases, interleaved": GptOssExperts,
    "without a gate": NemotronHExperts,
    "a norm behind": MuseSparkExperts,
}
FIRST = {"without a gate": "up_proj"}  # elsewhere gate_up_proj
IMPLEMENTATIONS = ("eager", "batched_mm")  # the grouped product has no float64


def config(implementation):
    sizes = {"hidden_size": WIDTH, "moe_hidden_size": WIDTH, "moe_latent_size": None, "post_norm_eps": 1e-6}
    inner = {"intermediate_size": INNER, "moe_intermediate_size": INNER, "swiglu_alpha": 1.7, "swiglu_limit": 0.9}
    count = {"num_local_experts": EXPERTS, "n_routed_experts": EXPERTS, "hidden_act": "silu", "mlp_hidden_act": "relu2"}
    return SimpleNamespace(**sizes, **inner, **count, _experts_implementation=implementation)


class Mixture(nn.Module):
    """Tokens (n, T, 4), each to two of three experts; the mean over tokens; a head."""

    def __init__(self, kind="gated", implementation="eager", chosen=2):
        super().__init__()
        self.chosen = chosen
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = KINDS[kind](config(implementation))
        if kind == "a norm behind":  # its own computes in float32
            self.experts.post_expert_norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.double()
        for number, parameter in enumerate(self.parameters()):
            parameter.data.copy_(normal(40 + number, *parameter.shape))

    def routed(self, x):
        """Return tokens (n T, 4), their experts and the shares of these."""
        tokens = x.reshape(-1, WIDTH)
        found = self.router(tokens).topk(self.chosen)
        return tokens, found.indices, found.values.softmax(1)

    def forward(self, x):
        return self.head(torch.tanh(x + self.experts(*self.routed(x)).view(x.shape)).mean(1))
