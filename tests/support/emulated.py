"""The CUDA kernels compiled for the CPU, where ``cuda_emulation/emulation.h`` stands in for CUDA."""

import hashlib
import importlib.util
import os
import shutil
import subprocess

from support import ROOT

NAME = "_cuda_emulated"


def build():
    """The module, compiled once per state of the sources into ``build/``; a string that says why not, if it cannot."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        return "there is no C++ compiler"
    try:
        import pybind11
    except ImportError:
        return "pybind11 is not installed"
    import sysconfig

    sources = [*sorted((ROOT / "csrc/cuda").glob("*.cu")), *sorted((ROOT / "csrc/bindings").glob("cuda*.cpp"))]
    headers = [*(ROOT / "csrc").glob("*/*.*h"), *(ROOT / "tests/cuda_emulation").iterdir()]
    everything = [*sources, *sorted(headers)]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in everything)).hexdigest()[:16]
    target = ROOT / "build" / "emulated" / digest / (NAME + sysconfig.get_config_var("EXT_SUFFIX"))
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        whole = target.parent / "whole.cpp"  # one translation unit: CUDA's built-in variables are one set
        whole.write_text("".join(f'#include "{path}"\n' for path in sources))
        partial = target.with_suffix(f".{os.getpid()}")
        options = ["-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-w", "-DPYFLATNESS_EMULATED"]
        includes = [ROOT / "tests/cuda_emulation", pybind11.get_include()]
        includes.append(sysconfig.get_path("include"))
        flags = [f"-I{path}" for path in includes]
        command = [compiler, *options, f"-DPYFLATNESS_CUDA_MODULE={NAME}", *flags, str(whole), "-o", str(partial)]
        subprocess.run(command, check=True)
        partial.replace(target)
    spec = importlib.util.spec_from_file_location(NAME, target)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
