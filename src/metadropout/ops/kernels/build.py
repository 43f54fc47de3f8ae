"""Compiles the kernels on first use and loads it; without a compiler there is no library, and that is no error."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = tuple(Path(__file__).with_name(name) for name in ("elementwise.cpp", "convolutions.cpp"))
COMPILERS = ("c++", "g++", "clang++")
# No -ffast-math: NaN has to come through. No OpenMP runtime either, only its `simd` pragmas: PyTorch brings its own.
FLAGS = ("-std=c++14", "-O3", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd")
FOR_THIS_CPU = "-march=native"
SECONDS_TO_COMPILE = 300

_log = logging.getLogger(__name__)


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled kernels, or None where they cannot be had; asks the compiler once per process at most."""
    try:
        return _load_or_build()
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None)
        _log.info("no fused kernels, plain PyTorch is used: %s%s", error, f"\n{output}" if output else "")
        return None


def cache_folder() -> Path:
    """Return the user's own folder of compiled kernels; it need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "metadropout" / "kernels"


def _load_or_build() -> ctypes.CDLL:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if os.name != "posix" or compiler is None:
        raise FileNotFoundError(f"none of the compilers {', '.join(COMPILERS)} was found")
    path = cache_folder() / f"kernels-{_key(compiler)}.so"
    if path.exists():
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            _log.info("%s is broken and is built again", path)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return _build(compiler, path)
    except OSError as error:  # a home that is read-only, say, or not to be executed from: build for this process alone
        _log.info("compiled kernels cannot be kept in %s: %s", path.parent, error)
        with tempfile.TemporaryDirectory() as folder:
            return _build(compiler, Path(folder) / path.name)  # stays loaded when the file is gone


def _build(compiler: str, path: Path) -> ctypes.CDLL:
    """Compile under a temporary name and rename, so that processes that build at once do not meet."""
    _log.info("compiling the kernels with %s", compiler)
    handle, name = tempfile.mkstemp(prefix=f"{path.stem}-", suffix=".tmp", dir=path.parent)
    os.close(handle)
    command = [compiler, *FLAGS, *map(str, SOURCES), "-o", name]
    try:
        try:
            _run([*command, FOR_THIS_CPU])
        except subprocess.CalledProcessError:  # not every compiler knows the flag on every machine
            _run(command)
        loaded = ctypes.CDLL(name)  # before it gets its name: what cannot be loaded is not kept
        os.replace(name, path)
        return loaded
    finally:
        Path(name).unlink(missing_ok=True)


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS_TO_COMPILE)


def _key(compiler: str) -> str:
    """Name a build by all that it depends on: another source, compiler, flag or CPU gives another file."""
    program = os.stat(compiler)
    parts = [os.path.realpath(compiler), program.st_size, program.st_mtime_ns, FLAGS, FOR_THIS_CPU, _cpu()]
    return hashlib.sha256(repr([*parts, *(source.read_bytes() for source in SOURCES)]).encode()).hexdigest()[:20]


def _cpu() -> str:
    """Describe the instructions that this machine knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()} {platform.platform()}"
    kept = ("model name", "flags", "Features", "CPU part")
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(kept)}))
