"""Steps with a penalty under FSDP2 have the gradients of one process with the whole batch, as DDP's have."""

import functools
import itertools
import types

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import pyflatness as pf
from pyflatness.model import fsdp as of_package
from support.ranks import outcomes

fsdp = pytest.importorskip("torch.distributed.fsdp", reason="this torch comes without torch.distributed")

# --- what each of the ranks does --------------------------------------------------------------------------------------

LOSS, SQUARED = nn.CrossEntropyLoss(), nn.MSELoss()
FIRST, MIDDLE, LINEAR, HEAD = "0.inside", "1.inside", "2.inside.1", "3"


class Block(nn.Module):
    """A layer and what follows it; ``again`` runs the layer once more in the backward pass."""

    def __init__(self, inside, again):
        super().__init__()
        self.inside, self.act, self.again = inside, nn.Tanh(), again

    def forward(self, x):
        return self.act(checkpoint(self.inside, x, use_reentrant=False) if self.again else self.inside(x))


class RunAgain(nn.Module):
    """Blocks that run as a whole, with what FSDP does before and after each, once more in the backward pass."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = blocks

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Twice(torch.autograd.Function):
    """Multiply by two; the backward pass fails while ``fails`` is set."""

    fails = False

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        if Twice.fails:
            raise RuntimeError("no more")
        return 2 * gradient


class Doubled(nn.Linear):
    def forward(self, x):
        return Twice.apply(super().forward(x))


def network(*, again=False, head=nn.Linear):
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 3, 3), nn.Conv2d(3, 5, 2), nn.Sequential(nn.Flatten(), nn.Linear(20, 7))
    return nn.Sequential(*(Block(layer, again) for layer in layers), head(7, 3)).double()


def data(rank, size):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, 2, 5, 5, generator=generator).double()
    return [
        part[rank::size] for part in (x, torch.arange(6) % 3, torch.randn(6, 3, generator=generator).sign().double())
    ]


def sharded(model, size, *, apart=True, blocks=None, **options):
    """Return a model of which each block is gathered by itself, or all is together; as it is for one rank."""
    if size > 1:
        for block in (blocks or model) if apart else ():
            fsdp.fully_shard(block, **options)
        fsdp.fully_shard(model, **options)
    return model


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gradients(model):
    return [full(parameter.grad) for parameter in model.parameters() if parameter.requires_grad]


def with_penalty(act, model, layers, held, loss=LOSS, **options):
    """Return the gradients after ``act(penalty, x, y)``, of the data that a rank has."""
    x, y, signs = held
    y = nn.functional.one_hot(y, 3).double() if loss is SQUARED else y
    with pf.FlatnessPenalty(model, layers, loss, **options) as penalty:
        penalty._signs = lambda like: signs
        act(penalty, x, y)
    return gradients(model)


def steps(rank, size, model, layers, loss=LOSS, **options):
    """Return the gradients of the second step of an optimiser, and the weights that it leads to."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def act(penalty, x, y):
        for _ in range(2):
            optimizer.zero_grad()
            outputs = model(x)
            (loss(outputs, y) + 0.3 * penalty(outputs, y)).backward()
            optimizer.step()

    found = with_penalty(act, model, layers, data(rank, size), loss, **options)
    return found, [full(parameter.detach()) for parameter in model.parameters()]


def ddp(rank, size):
    model = network()
    return steps(rank, size, DistributedDataParallel(model) if size > 1 else model, [FIRST, LINEAR, HEAD])


LAYERS = {"head": HEAD, "linear": LINEAR, "convolution": MIDDLE, "several": [FIRST, LINEAR, HEAD]}
HOW = {
    "together": {"apart": False},
    "together_and_resharded": {"apart": False, "reshard_after_forward": True},
    "blocks": {},
    "blocks_and_root_resharded": {"reshard_after_forward": True},
    "blocks_not_resharded": {"reshard_after_forward": False},
}


def step(rank, size, layers, how):
    return steps(rank, size, sharded(network(), size, **HOW[how]), LAYERS[layers])


OF_LAYERS = {f"{layers}_of_{how}": functools.partial(step, layers=layers, how=how) for layers in LAYERS for how in HOW}
globals().update(OF_LAYERS)


def layers_by_themselves(rank, size):
    model = network()
    layers = [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    return steps(rank, size, sharded(model, size, blocks=layers), [FIRST, MIDDLE, LINEAR, HEAD])


def blocks_in_one_group(rank, size):
    model = network()
    return steps(rank, size, sharded(model, size, blocks=[[model[1], model[2]], [model[3]]]), [MIDDLE, HEAD])


def no_root(rank, size):
    model = network()
    for block in model if size > 1 else ():
        fsdp.fully_shard(block)
    return steps(rank, size, model, [MIDDLE, HEAD])


def prefetched(rank, size):
    model = sharded(network(), size)
    if size > 1:
        model[3].set_modules_to_backward_prefetch([model[2], model[1]])
        model[2].set_modules_to_backward_prefetch([model[1], model[0]])
    return steps(rank, size, model, [MIDDLE, LINEAR])


def weight_norm(rank, size):
    model = network()
    nn.utils.parametrizations.weight_norm(model[1].inside)
    return steps(rank, size, sharded(model, size), [MIDDLE, LINEAR])


def squared_error(rank, size):
    return steps(rank, size, sharded(network(), size), [MIDDLE, HEAD], SQUARED)


def probes(rank, size):
    return steps(rank, size, sharded(network(), size), [MIDDLE, HEAD], probes=3)


def run_again(rank, size):
    return steps(rank, size, sharded(network(again=True), size), [FIRST, LINEAR])


def blocks_run_again(rank, size):
    model = network()
    return steps(rank, size, sharded(RunAgain(model), size, blocks=model), ["blocks.1.inside", "blocks.2.inside.1"])


def lora(rank, size):
    """Adapters of a language model, whose other weights are frozen, with the loss that the model computes."""
    import peft

    from training.test_penalty_of_transformers import WORDS, llama, tokens

    options = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(llama(), options).double()
    sharded(model, size, blocks=model.get_base_model().model.layers)
    words = tokens(4)["input_ids"]
    signs = torch.randn(*words[:, 1:].shape, WORDS, generator=torch.Generator().manual_seed(1)).sign().double()
    with pf.FlatnessPenalty(model, "re:.*lora_[AB].default", "auto") as penalty:
        penalty._signs = lambda like: signs[rank::size].reshape(like.shape)
        outputs = model(input_ids=words[rank::size], labels=words[rank::size])
        (outputs.loss + 0.3 * penalty(outputs, words[rank::size])).backward()
    return gradients(model)


def alone(rank, size):
    """The penalty without a loss; no gradient arrives at the model's outputs, of which FSDP would know of the pass."""
    model = sharded(network(), size, apart=False)
    act = lambda penalty, x, y: penalty(model(x), y).backward()  # noqa: E731
    return with_penalty(act, model, HEAD, data(rank, size), SQUARED)


def after_the_loss(rank, size):
    model = sharded(network(), size)

    def act(penalty, x, y):
        outputs = model(x)
        value = penalty(outputs, y)
        LOSS(outputs, y).backward(retain_graph=True)
        value.backward()

    return with_penalty(act, model, [MIDDLE, HEAD], data(rank, size))


def with_other_forward_passes(rank, size):
    model = sharded(network(), size)

    def act(penalty, x, y):
        outputs = model(x)
        value = LOSS(outputs, y) + penalty(outputs, y)
        with torch.no_grad():
            model(x[:1])
        outputs = model(x + 1)
        (value + LOSS(outputs, y) + penalty(outputs, y)).backward()

    return with_penalty(act, model, [MIDDLE, HEAD], data(rank, size))


def accumulated(rank, size):
    model = sharded(network(), size)

    def act(penalty, x, y):
        for number in range(3):
            if size > 1:
                model.set_requires_gradient_sync(number == 2)
                model.set_is_last_backward(number == 2)
                model.set_reshard_after_backward(number == 2)
            outputs = model(x + number)
            (LOSS(outputs, y) + penalty(outputs, y)).backward()

    return with_penalty(act, model, [MIDDLE, HEAD], data(rank, size))


def sharded_after_the_penalty_is_made(rank, size):
    model = network()

    def act(penalty, x, y):
        sharded(model, size)
        outputs = model(x)
        (LOSS(outputs, y) + penalty(outputs, y)).backward()

    return with_penalty(act, model, [MIDDLE, HEAD], data(rank, size))


def after_an_error(rank, size):
    model = sharded(network(head=Doubled), size)

    def act(penalty, x, y):
        outputs, Twice.fails = model(x), True
        try:
            with pytest.raises(RuntimeError, match="no more"):
                penalty(outputs, y)
        finally:
            Twice.fails = False
        LOSS(outputs, y).backward()
        outputs = model(x)
        (LOSS(outputs, y) + penalty(outputs, y)).backward()

    return with_penalty(act, model, MIDDLE, data(rank, size))


def head_by_itself(rank, size):
    """``pf.flatness_penalty`` of a head that FSDP has not resharded after the forward pass."""
    model, features = sharded(network(), size, reshard_after_forward=False), []
    model[3].register_forward_pre_hook(lambda _, args: features.append(*args))
    x, y, _ = data(rank, size)
    (LOSS(model(x), y) + 0.3 * pf.flatness_penalty(*features, model[3].weight, model[3].bias)).backward()
    return gradients(model)


def lower_precision(rank, size):
    options = {"mp_policy": fsdp.MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.float64)}
    return steps(rank, size, sharded(network(), size, **(options if size > 1 else {})), [MIDDLE, HEAD])[0]


def one_sample(rank, size):
    """The first rank has one sample, and does not look for where layers keep samples as the other does."""
    model = sharded(network(), size)
    cuts = [slice(0, 1), slice(1, 4)]

    def act(penalty, x, y):
        outputs = model(x)
        ((LOSS(outputs, y) + penalty(outputs, y)) / (1 if size > 1 else 2)).backward()

    for cut in cuts[rank : rank + 1] if size > 1 else cuts:
        found = with_penalty(act, model, [MIDDLE, HEAD], [part[cut] for part in data(0, 1)])
    return found


def kept(rank, size):
    """Return which parameters are gathered after the forward pass, the penalty and the backward pass."""
    model, seen = sharded(network(), size, reshard_after_forward=True), []

    def look():
        seen.append([not hasattr(parameter, "full_tensor") for parameter in model.parameters()])

    def act(penalty, x, y):
        outputs = model(x)
        look()
        value = penalty(outputs, y)
        look()
        value.backward()
        look()

    with_penalty(act, model, MIDDLE, data(rank, size))
    return seen


def modified(rank, size):
    """Steps between the forward pass and the penalty, and between that and its backward pass."""
    for how, resharded in itertools.product(({}, {"foreach": True}, {"fused": True}), (True, False)):
        model = sharded(network(), size, reshard_after_forward=resharded)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **how)

        def act(penalty, x, y, model=model, optimizer=optimizer):
            outputs = model(x)
            LOSS(outputs, y).backward(retain_graph=True)
            optimizer.step()
            with pytest.raises(pf.errors.InputError, match="modified in place after the forward pass"):
                penalty(outputs, y)

        with_penalty(act, model, HEAD, data(rank, size))

        def late(penalty, x, y, model=model, optimizer=optimizer):
            outputs = model(x)
            value = penalty(outputs, y)
            LOSS(outputs, y).backward(retain_graph=True)
            optimizer.step()
            with pytest.raises((pf.errors.InputError, RuntimeError), match="modified"):
                value.backward()

        with_penalty(late, model, MIDDLE, data(rank, size))


def part_of_the_root(rank, size):
    model = network()
    with pf.FlatnessPenalty(model, MIDDLE) as penalty:
        whole = sharded(nn.Sequential(model), size, apart=False, reshard_after_forward=True)
        x, y, _ = data(rank, size)
        outputs = whole(x)
        with pytest.raises(pf.errors.InputError, match="a part of a module under FSDP2, which runs forward as a whole"):
            penalty(outputs, y)


def spread_otherwise(rank, size):
    """Return the errors of models that are spread in other ways."""
    found = []
    for options in (
        {"mesh": init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "parts"))},
        {"offload_policy": fsdp.CPUOffloadPolicy(pin_memory=False)},
    ):
        model = sharded(network(), size, **options)
        with pytest.raises(pf.errors.NotYetError) as error:
            pf.FlatnessPenalty(model, HEAD)
        found.append(str(error.value))
    return found


# --- what that comes to -----------------------------------------------------------------------------------------------

CASES = [
    *OF_LAYERS,
    *("ddp", "layers_by_themselves", "blocks_in_one_group", "no_root", "prefetched", "weight_norm", "squared_error"),
    *("probes", "run_again", "blocks_run_again", "alone", "after_the_loss", "with_other_forward_passes", "accumulated"),
    *("sharded_after_the_penalty_is_made", "after_an_error", "head_by_itself", "one_sample", "lower_precision"),
]
TOLERANCES = {"lower_precision": 1e-4}


@pytest.fixture(scope="module")
def found():
    return outcomes(
        "training.test_penalty_under_fsdp", [*CASES, "kept", "modified", "part_of_the_root", "spread_otherwise"], 2
    )


def of(found, name):
    for result in found[name]:
        if isinstance(result, Exception):
            raise result
    return found[name]


@pytest.mark.parametrize("name", CASES)
def test_gradients_and_weights_are_those_of_one_process(found, name):
    expected, tolerance = globals()[name](0, 1), TOLERANCES.get(name, 1e-10)
    for result in of(found, name):
        torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance / 100)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of names that peft uses
def test_adapters_of_lora_have_the_gradients_of_one_process():
    pytest.importorskip("peft")
    pytest.importorskip("transformers")
    expected = lora(0, 1)
    assert expected
    for result in of(outcomes("training.test_penalty_under_fsdp", ["lora"], 2), "lora"):
        torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-12)


def test_parameters_are_gathered_for_the_passes_alone(found):
    for seen in of(found, "kept"):
        assert not any(map(any, seen))


def test_a_penalty_after_the_step_of_the_optimiser_is_refused(found):
    of(found, "modified")


def test_a_part_of_what_is_sharded_is_refused(found):
    of(found, "part_of_the_root")


def test_parameters_that_are_spread_otherwise_are_refused(found):
    for errors in of(found, "spread_otherwise"):
        assert all("'0.inside.weight' is spread over DeviceMesh" in error for error in errors)
        assert all("or train with DistributedDataParallel" in error for error in errors)


def test_fsdp_of_another_torch_is_refused():
    with pytest.raises(pf.errors.NotYetError, match=r"FSDP2 of torch .*; install torch 2.13 or later"):
        of_package._groups([types.SimpleNamespace()])
