"""Calls as users make them, on a GPU and with the kernels emulated, have the values of the CPU and change nothing."""

import copy
import inspect

import pytest
import torch
from torch import nn

import pyflatness as pf
from pyflatness.contractions import backends
from pyflatness.contractions.backends import cuda
from pyflatness.measures import MEASURES
from support import hugging_face, public, unchanged
from support.on_cuda import assert_close, in_one_order, moved, on_a_gpu, random_states
from support.public_calls import CALLS, OF_TENSORS, batches, network

LOSS = nn.CrossEntropyLoss()
SAMPLED = {
    *("pac_bayes", "pac_bayes_magnitude", "adaptive_sharpness_mc", "generalization_bound"),
    *("mls_adversarial", "normalized_mls_adversarial"),
}
"""From a generator of the model's device."""
DETERMINISTIC = [measure.name for measure in MEASURES if measure.name not in SAMPLED]
BACKENDS = ["reference", "compiled"]


@pytest.fixture(autouse=True)
def _kernels(cuda_device, monkeypatch):
    """Emulated, the kernels are those of the CPU; on a GPU, products and convolutions are in full precision."""
    if cuda_device.type == "cpu":
        monkeypatch.setattr(backends, "compiled", cuda)
    before = torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    yield
    torch.backends.cudnn.conv.fp32_precision = before


def options(function, backend):
    return {"backend": backend} if "backend" in inspect.signature(function).parameters else {}


@in_one_order
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [name for name in CALLS if name not in SAMPLED | {"verify"}])
def test_public_calls(cuda_device, name, backend):
    function = public.CALLS.get(name.partition(",")[0], pf.measure)
    model, data = network().to(cuda_device), moved(batches(), cuda_device)
    before, states = unchanged.snapshot(model), random_states()
    found = CALLS[name](model, LOSS, data, **options(function, backend))
    unchanged.assert_unchanged(model, before)
    assert all(map(torch.equal, random_states(), states))
    rel = 1e-5 if name == "spectrum" else 1e-8  # its vectors have the tolerance of the search
    expected = CALLS[name](network(), LOSS, batches(), **options(function, "reference"))
    assert_close(found, expected, rel, most=rel / 100)


@in_one_order
@pytest.mark.parametrize("name", sorted(SAMPLED))
def test_sampled_calls(cuda_device, name):
    """A seed gives the same numbers again on one device."""
    model, data = network().to(cuda_device), moved(batches(), cuda_device)
    before, states = unchanged.snapshot(model), random_states()
    found, again = (CALLS[name](model, LOSS, data, seed=3) for _ in range(2))
    unchanged.assert_unchanged(model, before)
    assert all(map(torch.equal, random_states(), states))
    assert_close(again, found, rel=1e-12)


@in_one_order
def test_verify(cuda_device):
    assert pf.verify(network().to(cuda_device), LOSS, moved(batches(), cuda_device))


def convolutional(dtype=torch.float64, activation=nn.ReLU):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 5, 3, padding=1), activation(), nn.MaxPool2d(2), nn.Conv2d(5, 6, 3, stride=2), activation(),
        nn.Flatten(), nn.Linear(6, 7), activation(), nn.Linear(7, 4),
    ).to(dtype).eval()  # fmt: skip


def images(dtype=torch.float64, n=6):
    return torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(dtype), (
        torch.arange(n) % 4
    )


@in_one_order
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dtype", "rel"), [(torch.float64, 1e-8), (torch.float32, 2e-4)])
def test_every_measure(cuda_device, backend, dtype, rel):
    expected = pf.measure(convolutional(), LOSS, images(), measures=DETERMINISTIC, backend="reference")
    model, data = convolutional(dtype).to(cuda_device), moved(images(dtype), cuda_device)
    found = pf.measure(model, LOSS, data, measures=DETERMINISTIC, backend=backend)
    names = {estimate.backend for held in found.by_measure().values() for estimate in held.values()}
    assert backend in names
    for measure, held in expected.by_measure().items():
        for layer, estimate in held.items():
            value = found.by_measure()[measure][layer].value
            assert value == pytest.approx(estimate.value, rel=rel, abs=1e-10), (measure, layer)


@in_one_order
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chosen", [{}, {"probes": 4}, {"probes": "adaptive"}, {"memory": 2**20}, {"curvature": "ggn"}])
def test_options(cuda_device, backend, chosen):
    """Probes' signs are the same on every device."""
    measures = ["relative_flatness", "trace", "fisher_rao"]
    model, data = convolutional(activation=nn.Tanh), images()
    expected = pf.measure(model, LOSS, data, measures=measures, backend="reference", **chosen)
    found = pf.measure(
        convolutional(activation=nn.Tanh).to(cuda_device), LOSS, moved(data, cuda_device),
        measures=measures, backend=backend, **chosen,
    )  # fmt: skip
    for measure, held in expected.by_measure().items():
        for layer, estimate in held.items():
            value = found.by_measure()[measure][layer]
            assert value.value == pytest.approx(estimate.value, rel=1e-8), (measure, layer)
            assert (value.stderr or 0.0) == pytest.approx(estimate.stderr or 0.0, rel=1e-6), (measure, layer)


@in_one_order
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("half", ["model", "autocast"])
def test_bfloat16(cuda_device, backend, half):
    expected = pf.measure(convolutional(), LOSS, images(), measures=["relative_flatness", "trace"])
    dtype = torch.bfloat16 if half == "model" else torch.float32
    model, data = convolutional(dtype).to(cuda_device), moved(images(dtype), cuda_device)
    with torch.autocast(cuda_device.type, torch.bfloat16, enabled=half == "autocast"):
        found = pf.measure(model, LOSS, data, measures=["relative_flatness", "trace"], backend=backend)
    for measure, held in expected.by_measure().items():
        for layer, estimate in held.items():
            assert found.by_measure()[measure][layer].value == pytest.approx(estimate.value, rel=0.1), (measure, layer)


@in_one_order
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_language_model_with_its_own_loss(cuda_device, backend):
    pytest.importorskip("transformers")
    model, batch = hugging_face.FAMILIES["GPT-2"]()
    chosen = {"measures": "relative_flatness", "curvature": "ggn"}
    expected = pf.measure(model.double(), "auto", [batch], backend="reference", **chosen)
    there = copy.deepcopy(model).to(cuda_device)
    found = pf.measure(there, "auto", [moved(batch, cuda_device)], backend=backend, **chosen)
    assert len(expected.layers) > 3
    for layer, estimate in expected.by_measure()["relative_flatness"].items():
        assert found[layer, "relative_flatness"].value == pytest.approx(estimate.value, rel=1e-8), layer


@on_a_gpu
def test_data_go_to_the_models_device(cuda_device):
    """And the user's batches stay where they are."""
    there, data = network().to(cuda_device), batches()
    found = pf.relative_flatness(there, LOSS, data)
    assert all(tensor.device.type == "cpu" for batch in data for tensor in batch)
    assert float(found) == float(pf.relative_flatness(there, LOSS, moved(data, cuda_device)))
    back = pf.relative_flatness(network(), LOSS, moved(data, cuda_device))
    assert float(back) == pytest.approx(float(found), rel=1e-10)


@on_a_gpu
def test_a_class_weight_elsewhere(cuda_device):
    """The loss's tensors belong on the model's device, as in torch: a value, or an error that names the device."""
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64))
    expected = float(pf.relative_flatness(network(), loss, batches()))
    try:
        found = float(pf.relative_flatness(network().to(cuda_device), loss, batches()))
    except (pf.errors.FlatnessError, RuntimeError) as error:
        assert "cuda" in str(error)  # noqa: PT017
    else:
        assert found == pytest.approx(expected, rel=1e-10)


@on_a_gpu
@pytest.mark.parametrize("name", ["relative_flatness", "trace", "fisher_rao"])
def test_noise_of_the_gpus_generator_is_refused(cuda_device, name):
    net = network().to(cuda_device)
    net.act.register_forward_hook(lambda module, args, h: h + 1e-5 * torch.randn_like(h))
    states = random_states()
    with pytest.raises(pf.errors.InputError, match="draws random numbers in its forward pass"):
        pf.measure(net, LOSS, moved(batches(), cuda_device), measures=name)
    assert all(map(torch.equal, random_states(), states))


@on_a_gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_out_of_memory(cuda_device, backend):
    """Micro-batches are halved until they fit; the first one asks for more than there is."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 8192), nn.ReLU(), nn.Linear(8192, 4)).to(cuda_device)
    data = [(torch.randn(4096, 64, device=cuda_device), torch.arange(4096, device=cuda_device) % 4)]
    options = {"layers": "0", "measures": "relative_flatness", "backend": backend}
    expected = pf.measure(model, LOSS, data, memory=64 * 2**20, **options)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(cuda_device).total_memory
    limit = torch.cuda.memory_reserved() + 300 * 2**20  # an activation of all samples takes 128 MiB
    before = torch.cuda.memory_stats()["num_ooms"]
    torch.cuda.set_per_process_memory_fraction(limit / total)
    try:
        found = pf.measure(model, LOSS, data, memory=2**36, **options)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.cuda.memory_stats()["num_ooms"] > before
    assert found["0", "relative_flatness"].value == pytest.approx(expected["0", "relative_flatness"].value, rel=1e-5)


@on_a_gpu
def test_the_time_of_a_pass_is_that_of_the_gpu(cuda_device, monkeypatch):
    """Where an exact value is refused, the message says how long it would take: the host waits for what it times."""
    waited, right = [], torch.cuda.synchronize
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: (waited.append(device), right(device)))
    with pytest.raises(pf.errors.InputError, match="max_passes=1"):
        pf.relative_flatness(network().to(cuda_device), LOSS, batches(), "body", max_passes=1)
    assert [torch.device(device).type for device in waited if device is not None] == ["cuda", "cuda"]


@in_one_order
@pytest.mark.parametrize("name", ["head_flatness", "authors_representativeness"])
def test_calls_of_tensors(cuda_device, name):
    given = torch.randn(12, 6, dtype=torch.float64), torch.randn(3, 6, dtype=torch.float64), torch.arange(12) % 3
    assert_close(OF_TENSORS[name](*moved(given, cuda_device), LOSS), OF_TENSORS[name](*given, LOSS), rel=1e-8)


@on_a_gpu
def test_reparameterize(cuda_device):
    net = network().to(cuda_device)
    other = pf.reparameterize(net, {"body": 2.0}, batches())
    assert {parameter.device for parameter in other.parameters()} == {net.body.weight.device}
    assert_close(other, pf.reparameterize(network(), {"body": 2.0}, batches()), rel=1e-12)


@on_a_gpu
@pytest.mark.parametrize("from_files", [False, True])
def test_scores(cuda_device, tmp_path, from_files):
    from safetensors.torch import save_file

    def scored(device):
        models, given = {"first": network().to(device)}, {}
        if from_files:
            save_file(network().state_dict(), tmp_path / "first.safetensors")
            models, given = [tmp_path / "first.safetensors"], {"model": lambda: network().to(device)}
        return pf.score(models, LOSS, batches(), layers="*", measures=["relative_flatness", "trace"], **given)

    expected, found = scored("cpu"), scored(cuda_device)
    assert [row.error for row in found] == ["" for row in expected]
    assert [row.value for row in found] == pytest.approx([row.value for row in expected], rel=1e-8)
    assert [row.loss for row in found] == pytest.approx([row.loss for row in expected], rel=1e-8)
