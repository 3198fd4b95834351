"""Make networks, and read tokenizers, that libraries know by name: ``hf:…``, ``timm:…`` and ``torchvision:…``.

Nothing is downloaded unless that is asked for, pickled weights are not read, and code that comes with a model is never
run: what transformers would fetch and run by itself is switched off, and releases that can be made to are refused.
"""

import contextlib
import copy
import functools
import importlib.metadata
import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from .. import interrupts
from ..errors import InputError, MissingExtraError
from ..messages import reason, shown
from ..model import hugging_face as models
from ..options import check_dtype

KINDS = ("hf", "timm", "torchvision")
_OLDEST = (5, 5)  # CVE-2026-4372 is mended in transformers 5.3.0, CVE-2026-5241 in 5.5.0
_INSTALL = {"transformers": "'pyflatness[hf]'", "timm": "timm", "torchvision": "torchvision"}
AN_ADAPTER = (
    "an adapter of PEFT, the change of a network and not one; "
    "PeftModel.from_pretrained(network, folder).merge_and_unload().save_pretrained(another) makes one of it"
)
_REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?")


def is_named(spec: Any) -> bool:
    """Return whether a SPEC names a network of one of these libraries."""
    return isinstance(spec, str) and spec.partition(":")[0] in KINDS


def is_trained(spec: str, arguments: Mapping[str, Any]) -> bool:
    """Return whether a SPEC of these, with its arguments, gives a network with weights and not with random numbers."""
    option, default = {"hf": ("weights", True), "timm": ("pretrained", False), "torchvision": ("weights", None)}[
        spec.partition(":")[0]
    ]
    return bool(arguments.get(option, default))


def resolve(spec: str) -> Callable[..., nn.Module]:
    """Return what makes the network that a SPEC names; its keyword arguments are those of ``--model-args``."""
    kind, _, name = spec.partition(":")
    if kind == "hf":
        where, revision = _located(name)
        _check_transformers()
        return functools.partial(hugging_face, where, revision=revision)
    if not re.fullmatch(r"[\w.-]+", name):  # timm fetches by names such as hf-hub:…
        raise InputError(f"{spec!r}: the name of an architecture is wanted, as in {kind}:resnet18")
    _check_installed(kind)
    return functools.partial(of_library, kind, name)


def hugging_face(
    where: str,
    *,
    revision: str | None = None,
    architecture: str | None = None,
    weights: bool = True,
    dtype: str | None = None,
    device: str = "cpu",
    download: bool = False,
    trust_remote_code: bool = False,
) -> nn.Module:
    """Return a model of transformers from a folder, or from the local cache of Hugging Face's hub.

    ``architecture`` is by default the class that the model was saved from. Without ``weights`` these are random, for
    checkpoints to be put in, and only ``config.json`` has to be there. What is not in the cache may be fetched with
    ``download``.
    """
    if trust_remote_code:
        raise InputError("trust_remote_code: code that comes with a model is never run; write the model as a callable")
    if Path(where).is_dir() and not Path(where, "config.json").is_file():
        if Path(where, "adapter_config.json").is_file():
            raise InputError(f"hf:{where}: it is {AN_ADAPTER}")
        raise InputError(f"hf:{where}: the folder has no config.json; one that save_pretrained has written is wanted")
    import transformers

    places = {"revision": revision or "main", "local_files_only": not download, "trust_remote_code": False}
    precision = {} if dtype is None else {"dtype": check_dtype("dtype", dtype)}
    with _explained(where, download=download), _quiet():
        config: Any = transformers.AutoConfig.from_pretrained(where, **places)
        config._attn_implementation = config._experts_implementation = None  # others may be fetched, and are code
        kind = _architecture(architecture or next(iter(config.architectures or ()), None))
        if weights:
            model, found = kind.from_pretrained(
                where, config=config, use_safetensors=True, output_loading_info=True, **precision, **places
            )
            _check_whole(found, kind.__name__)
        else:
            model = kind(config).to(**precision)
    for part in model.modules():
        if isinstance(part, transformers.PreTrainedModel):  # a value is known by content, wherever the files are
            part.name_or_path = part.config._name_or_path = ""
    moved: nn.Module = model.to(device).eval()
    return moved


def converted(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Return the weights of a file with the names and shapes that a model of transformers has for them in memory.

    None is of another model, and of weights that transformers does not make exactly those of the model.
    """
    if models.inner(model) is not model:
        return None
    with _quiet(), interrupts.suppressed():
        made, found = type(model).from_pretrained(  # type: ignore[attr-defined]
            None, config=copy.deepcopy(model.config), state_dict={**state}, output_loading_info=True
        )
        if not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")):
            return {**made.state_dict()}
    return None


def of_library(kind: str, name: str, *, dtype: str | None = None, device: str = "cpu", **options: Any) -> nn.Module:
    """Return a network of timm or torchvision; weights are random unless the options name some."""
    if kind == "timm":
        import timm

        model: nn.Module = timm.create_model(name, **options)
    else:
        from torchvision import models

        model = models.get_model(name, **options)
    return model.to(device=device, dtype=None if dtype is None else check_dtype("dtype", dtype)).eval()


def tokenizer(name: str) -> Any:
    """Return the tokenizer of ``hf:folder`` or ``hf:org/name@revision``, also without ``hf:``, or of a JSON file."""
    _check_transformers()
    import transformers

    path = Path(name.removeprefix("hf:"))
    if path.suffix == ".json":
        with _explained(str(path), download=False):
            return transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
    where, revision = _located(str(path))
    places = {"revision": revision or "main", "local_files_only": True, "trust_remote_code": False}
    advice = "; if it has no tokenizer, pass tokenizer=: another folder or name, or a file tokenizer.json"
    with _explained(where, download=False, advice=advice):
        return transformers.AutoTokenizer.from_pretrained(where, **places)


def _located(name: str) -> tuple[str, str | None]:
    """Return the folder or repository that is meant, and its revision."""
    if Path(name).is_dir():
        return name, None
    if not _REPOSITORY.fullmatch(name):
        raise InputError(f"hf:{name}: there is no such folder, and it is no name of a repository, org/name@revision")
    where, _, revision = name.partition("@")
    return where, revision or None


def _check_transformers() -> None:
    _check_installed("transformers")
    version = importlib.metadata.version("transformers")
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < _OLDEST:
        raise InputError(
            f"transformers {version}: a model's files can make releases before 5.5 run code of theirs (CVE-2026-4372, "
            "CVE-2026-5241); pip install --upgrade transformers"
        )


def _check_installed(library: str) -> None:
    if importlib.util.find_spec(library) is None:
        raise MissingExtraError(f"models of {library} need it: pip install {_INSTALL[library]}")


def _architecture(name: str | None) -> Any:
    import transformers

    kind = getattr(transformers, name or "", None)
    if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
        return kind
    given = "config.json names no architecture" if name is None else f"{shown(name)} is no model of transformers"
    raise InputError(
        f"{given}; pass one, as architecture='BertForMaskedLM' (if it is code that comes with the model: such code is "
        "never run)"
    )


def _check_whole(found: Mapping[str, Any], name: str) -> None:
    """Raise if weights were made up by random numbers."""
    lost = sorted([*found["missing_keys"], *(str(entry[0]) for entry in found["mismatched_keys"])])
    if lost:
        raise InputError(
            f"the files lack {len(lost)} weights of {name}, which would be random: {', '.join(lost[:4])}"
            f"{', …' if lost[4:] else ''}; pass architecture=, the class that was saved"
        )


@contextlib.contextmanager
def _explained(where: str, *, download: bool, advice: str = "") -> Iterator[None]:
    """Turn what transformers raises inside into an error that says what was looked for, and what to do."""
    try:
        yield
    except (OSError, ValueError, ImportError, RuntimeError, KeyError) as error:
        if isinstance(error, InputError):
            raise
        if "trust_remote_code" in str(error):
            raise InputError(f"hf:{where}: it is code that comes with it, and such code is never run") from None
        if not Path(where).exists() and not download:
            raise InputError(
                f"hf:{where}: there is no such folder, and Hugging Face's local cache has no such repository with "
                f"all files that are needed ({reason(error)}); nothing is downloaded unless download is true"
            ) from error
        raise InputError(f"hf:{where}: {reason(error)}{advice}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from drawing bars and printing tables inside."""
    from transformers.utils import logging

    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
