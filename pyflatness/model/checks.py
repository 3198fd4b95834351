"""Refuse models that cannot be measured as they are, such as models compiled by torch.jit, or in training mode."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .. import private
from ..errors import InputError
from ..messages import IN_TRAINING, without_values
from .spread import WHOLE, is_spread

Named = Sequence[tuple[str, nn.Module]]
DROPOUTS = nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout


def check_modules(named: Named, *, spread: bool = False) -> None:
    """Raise an InputError that names the first module of a model that cannot be measured as it is."""
    check_kinds(named, spread=spread)
    for name, module in named:
        if isinstance(module, (private.BatchNorm, *DROPOUTS)):
            _check_mode(name, module)
    _check_values(named)


def check_classes(named: Named) -> None:
    """Raise for the first module of a model that runs no hooks, or does not compute with its parameters."""
    for name, module in named:
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(
                f"model: {_is(name)} compiled by torch.jit ({type(module).__name__}), which calls its layers past all "
                "hooks; pass the nn.Module that it was made from, with the same weights (load_state_dict)"
            )
        if "_torch_params" in module._modules and any(
            kind.__module__.startswith("keras.") for kind in type(module).__mro__
        ):
            raise InputError(
                f"model: {_is(name)} a Keras model ({type(module).__name__}), whose layers read variables of Keras's "
                "own and not the parameters of modules, so that what functional_call puts in for these has no effect; "
                "write it with torch's layers, whose weights are Keras's kernels transposed"
            )


def check_kinds(named: Named, *, spread: bool = False) -> None:
    """Raise as :func:`check_classes` does, and for the first module with parameters that are not all here."""
    check_classes(named)
    for name, module in named:
        if type(module).__name__ == "FullyShardedDataParallel":
            raise InputError(
                f"model: {_is(name)} a FullyShardedDataParallel (FSDP1), which gathers its parameters only while all "
                "ranks make the same passes; models under FSDP2 (torch.distributed.fsdp.fully_shard) can be "
                f"measured, or {WHOLE}"
            )
        for own, parameter in module._parameters.items():
            if parameter is not None and is_spread(parameter) and not spread:
                raise InputError(
                    f"model: its parameter {_joined(name, own)!r} is a DTensor, spread over processes (FSDP2 or tensor "
                    f"parallelism); {WHOLE}"
                )
            if hasattr(parameter, "ds_id"):
                raise InputError(
                    f"model: its parameter {_joined(name, own)!r} is spread over processes by DeepSpeed ZeRO-3; load "
                    "the full weights (zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint) into a model that is not "
                    "and measure that"
                )
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                raise InputError("model: it has lazy layers whose weights are not initialised; run it once on a batch")


def _is(name: str) -> str:
    return f"{name!r} is" if name else "it is"


def _check_mode(name: str, module: Any) -> None:
    """Raise for a module in a mode in which samples are not independent, or units are dropped at random."""
    is_norm = isinstance(module, private.BatchNorm)
    if module.training and (is_norm or module.p > 0):
        raise InputError(f"{name!r} ({type(module).__name__}) {IN_TRAINING}")
    if is_norm and module.running_mean is None:
        raise InputError(
            f"{name!r} ({type(module).__name__}) has no running statistics, so its output for a sample depends on the "
            "batch; a value over the data set does not exist"
        )


def _check_values(named: Named) -> None:
    """Raise for a module whose parameters or buffers have no values."""
    for name, module in named:
        if "_hf_hook" in vars(module):  # accelerate keeps its weights elsewhere until it is called
            continue
        for own, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and without_values(tensor):
                raise InputError(
                    f"model: {_joined(name, own)!r}, {tuple(tensor.shape)}, has no values (it is on the meta device, "
                    "or a FakeTensor); load the model first"
                )


def _joined(*names: str) -> str:
    return ".".join(filter(None, names))
