"""Plans of measurements, held against what measurements really take."""

import json
from unittest import mock

import pytest
import torch
from torch import nn

import pyflatness as pf
from pyflatness.errors import PassesError
from pyflatness.model import calling, selectors
from pyflatness.passes.dry_run import saved_storages
from pyflatness.passes.memory import MicroBatches
from pyflatness.passes.recorder import Recorder, frozen
from pyflatness.scoring import planned
from pyflatness.sweep.contracted import Contracted
from support import hugging_face, rank_plan, ranks, scale_page
from support.score_runs import status

BATCH, LENGTH = 3, 6


def llama():
    return hugging_face._of("LlamaForCausalLM", **hugging_face._SMALL_LLAMA)


def plan(work, **options):
    settings = {"samples": 6, "batch": BATCH, "probes": 4, "sharded": False, **options}
    return planned.planned(work, options.pop("ranks", 1), **{k: v for k, v in settings.items() if k != "ranks"})


@pytest.fixture(scope="module")
def tokens():
    tokens = torch.arange(2 * BATCH * LENGTH).view(2, BATCH, LENGTH) % hugging_face.VOCABULARY
    return [{"input_ids": each, "labels": each} for each in tokens]


@pytest.fixture(scope="module")
def work():
    return planned.work(llama, planned.Batch(BATCH, LENGTH))


def test_weights_and_bytes_are_those_of_a_model_that_is_there(work, tokens):
    model = llama()
    assert work.parameters == sum(each.numel() for each in model.parameters())
    modules = selectors.select(model, None).modules
    recorder = Recorder(modules)
    with recorder.attached(), frozen(model), recorder.recording(BATCH), saved_storages() as storages:
        outputs, _ = calling.run(model, tokens[0], None)
        calls = [call for made in recorder.calls.values() for call in made]
        inputs = {call.inputs.untyped_storage().data_ptr(): call.inputs.nbytes for call in calls}
        assert work.layers == (*recorder.calls,)
    assert work.inputs == sum(inputs.values())
    assert work.gradients == sum(call.output.numel() * 4 for call in calls)
    assert work.outputs == outputs.nbytes
    held = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    saved = sum(size for key, size in storages.items() if key not in held)
    assert saved <= work.graph <= saved + work.inputs  # of the embedding and others inputs come on top
    assert work.layer_weights == sum(modules[name].weight.numel() for name in work.layers)


def test_bytes_are_those_by_which_batches_are_cut(tokens):
    """Of convolutions, some with Gram matrices, and of a language model: backward passes hold gradients twice."""
    torch.manual_seed(0)

    def convolutions():
        layers = nn.Conv2d(3, 40, 3, padding=1), nn.ReLU(), nn.Conv2d(40, 40, 3, padding=1), nn.ReLU()
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(40, 4))

    images = planned.work(convolutions, planned.Batch(2, None, (3, 8, 8)))
    assert images.grams == 2 * 4 * 64**2  # of the second layer: the first has fewer columns than positions
    data = torch.randn(2, 3, 8, 8), torch.tensor([0, 1])
    two = {name: values[:2] for name, values in tokens[0].items()}
    of_two = planned.work(llama, planned.Batch(2, LENGTH))
    for model, batches, expected in ((convolutions(), data, images), (llama(), [two], of_two)):
        with mock.patch.object(MicroBatches, "plan", autospec=True, side_effect=MicroBatches.plan) as cut:
            pf.measure(model.eval(), "cross_entropy", batches, measures="relative_flatness", curvature="ggn", probes=1)
        ((_, needed), _), *_ = cut.call_args_list
        assert needed == (expected.graph + 2 * expected.gradients + expected.grams) // 2


def test_passes_are_those_that_are_made(work, tokens):
    with mock.patch.object(Contracted, "of", autospec=True, side_effect=Contracted.of) as sent:
        pf.measure(llama(), "cross_entropy", tokens, measures="trace", curvature="ggn", probes=4, memory=2**30)
    found = plan(work)
    assert sent.call_count == found.micro_batches * found.passes == 2 * 4
    assert work.passes == (LENGTH - 1) * (hugging_face.VOCABULARY - 1)
    with pytest.raises(PassesError, match=f"takes {work.passes} backward passes a batch"):
        pf.measure(llama(), "cross_entropy", tokens, measures="trace", curvature="ggn", max_passes=work.passes - 1)


def test_operations_are_those_of_the_products():
    sizes = (5, 7), (7, 4), (4, 3)

    def model():
        return nn.Sequential(*(part for m, d in sizes for part in (nn.Linear(m, d), nn.ReLU())))

    work = planned.work(model, planned.Batch(6, None, (5,)))
    products = [2 * 6 * m * d for m, d in sizes]
    assert work.forward == sum(products)
    assert work.backward == sum(products[1:])  # nothing goes to what is in front of the first layer
    assert work.passes == 2


def test_layers_are_chosen_and_types_given():
    work = planned.work(llama, planned.Batch(1, LENGTH), ["lm_head"], torch.bfloat16)
    assert work.layers == ("lm_head",)
    assert work.layer_weights == hugging_face.VOCABULARY * hugging_face.WIDTH
    assert work.layer_bytes == (2 * work.layer_weights,)


def test_messages_are_those_that_ranks_send():
    shape = planned.Batch(rank_plan.SAMPLES, rank_plan.LENGTH)
    work = planned.work(rank_plan.model, shape)
    found = ranks.outcomes("support.rank_plan", ["whole_weights", "sharded"], 2)
    for name, several in found.items():
        expected = planned.planned(
            work,
            2,
            samples=2 * rank_plan.SAMPLES,
            batch=rank_plan.SAMPLES,
            probes=rank_plan.PROBES,
            sharded=name == "sharded",
        )
        for messages, received in several:
            assert messages == expected.messages
            assert received == pytest.approx(expected.received, rel=0.02)  # parts of few rows are filled up


def of_llama_3(layers=32, width=4096, inner=14336, words=128256):
    """The parameters of a Llama 3 with eight heads of 128 for keys and values."""
    block = 2 * width * width + 2 * width * 1024 + 3 * width * inner + 2 * width
    return layers * block + 2 * words * width + width


def folder(path, **sizes):
    settings = {"vocab_size": 128256, "num_key_value_heads": 8, "tie_word_embeddings": False, **sizes}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **settings}
    (path / "config.json").write_text(json.dumps(config))
    return f"hf:{path}"


def test_a_llama_of_8_billion_weights_is_planned_without_them(tmp_path, capsys):
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    spec = folder(tmp_path, **sizes)
    assert status("plan", "--model", spec, "--dtype", "bfloat16", "--length", "64", "--ranks", "64", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["work"]["parameters"] == of_llama_3() == 8_030_261_248
    whole, sharded = found["plans"]
    assert 0 <= whole["weights"] - 2 * of_llama_3() < 2**20  # and a few buffers
    assert sharded["weights"] == -(-whole["weights"] // 64)


def test_what_cannot_be_planned_is_said(capsys):
    assert status("plan", "--model", "support.hugging_face:_of") == 2
    assert "--length" in capsys.readouterr().err

    class Asking(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            return self.layer(x) if x.sum() > 0 else x

    with pytest.raises(pf.errors.InputError, match="asks for values"):
        planned.work(Asking, planned.Batch(2, None, (3,)))


@pytest.mark.parametrize("name", ["llama-8b", pytest.param("llama-70b", marks=pytest.mark.soak)])
def test_the_page_has_what_the_command_prints(name):
    assert scale_page.on_page(name) == scale_page.made(name)
