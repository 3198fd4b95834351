"""The CUDA kernels compiled for the CPU, where ``cuda_emulation/emulation.h`` stands in for CUDA."""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig

from support import ROOT

NAME = "_cuda_emulated"
EMULATION = ROOT / "tests" / "cuda_emulation"
CHECKS = {
    "plain": [],
    "races": ["-fsanitize=thread", "-g1"],  # with races.cpp in the place of the sanitizer's own library
    "bounds": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-sanitize=vptr", "-g1"],
}
"""What ``PYFLATNESS_EMULATED`` may be, with the compiler's options; ``bounds`` wants the libraries preloaded."""


def chosen():
    """Which of the checks the module is compiled for."""
    return os.environ.get("PYFLATNESS_EMULATED", "races" if sys.platform == "linux" else "plain")


def build():
    """The module; a string that says why not, if it cannot be compiled."""
    target = compiled()
    if isinstance(target, str):
        return target
    spec = importlib.util.spec_from_file_location(NAME, target)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compiled():
    """Its path, compiled once per state of the sources into ``build/``; a string that says why not, if it cannot."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        return "there is no C++ compiler"
    try:
        import pybind11
    except ImportError:
        return "pybind11 is not installed"

    check = chosen()
    kernels = sorted((ROOT / "csrc/cuda").glob("*.cu"))
    plain = [*sorted((ROOT / "csrc/bindings").glob("cuda*.cpp")), *sorted(EMULATION.glob("*.cpp"))]
    headers = [*(ROOT / "csrc").glob("*/*.*h"), *EMULATION.glob("*.h")]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in [*kernels, *plain, *sorted(headers)])).hexdigest()
    target = ROOT / "build" / "emulated" / (digest[:16] + check) / (NAME + sysconfig.get_config_var("EXT_SUFFIX"))
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        options = ["-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-w", "-DPYFLATNESS_EMULATED"]
        includes = [EMULATION, pybind11.get_include(), sysconfig.get_path("include")]
        options += [f"-DPYFLATNESS_CUDA_MODULE={NAME}", *(f"-I{path}" for path in includes)]
        partial = target.with_suffix(f".{os.getpid()}")
        objects = []
        # The kernels are one translation unit, CUDA's built-in variables being one set; sanitizers are for them alone.
        for sources, extra in ((kernels, CHECKS[check]), (plain, [])):
            objects.append(partial.with_suffix(f".{os.getpid()}.{len(objects)}.o"))
            text = "".join(f'#include "{path}"\n' for path in sources)
            command = [compiler, *options, *extra, "-x", "c++", "-c", "-", "-o", str(objects[-1])]
            subprocess.run(command, input=text, text=True, check=True)
        linked = CHECKS[check] if check == "bounds" else []
        subprocess.run([compiler, "-shared", *linked, *map(str, objects), "-o", str(partial)], check=True)
        partial.replace(target)
        for path in objects:
            path.unlink()
    return target
