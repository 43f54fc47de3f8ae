"""Compiles the kernels on first use and loads them; without a compiler there is no library, and that is no error.

Compiled kernels are kept in a folder of the user's own, because what is loaded from it runs. A folder that others own
or can write to is not used, and each file carries the checksum of its contents in its name, so that a damaged one is
noticed before it is loaded: a library cut short would kill the process.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SOURCES = tuple(Path(__file__).with_name(name) for name in ("elementwise.cpp", "normal.cpp", "convolutions.cpp"))
HEADERS = (Path(__file__).with_name("bfloat16.h"),)
COMPILERS = ("c++", "g++", "clang++")
# No -ffast-math: NaN has to come through. No OpenMP runtime either, only its `simd` pragmas: PyTorch brings its own.
FLAGS = ("-std=c++14", "-O3", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd")
FOR_THIS_CPU = "-march=native"
SECONDS_TO_COMPILE = 300
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH

_log = logging.getLogger(__name__)
_one_at_a_time = threading.Lock()


def library() -> ctypes.CDLL | None:
    """Return the compiled kernels, or None where they cannot be had; asks the compiler once per process at most."""
    with _one_at_a_time:
        return _library()


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        return _load_or_build()
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("the fast kernels are off, plain PyTorch is used and takes longer: %s", error)
        if output := getattr(error, "stderr", None):
            _log.info("the compiler says:\n%s", output)
        return None


def cache_folder() -> Path:
    """Return the user's own folder of compiled kernels; it need not exist."""
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # A relative path would name another folder in each working directory; the XDG specification has it ignored.
    return (chosen if chosen.is_absolute() else Path(os.path.expanduser("~/.cache"))) / "metadropout" / "kernels"


def _load_or_build() -> ctypes.CDLL:
    _compiler()  # without one, nothing is to be done
    with tempfile.TemporaryDirectory() as place:
        built = Path(place) / "kernels.so"
        try:
            with private_folder() as folder:
                if kept := _kept(folder):
                    return kept
                _compile(built)
                path = folder / _name(built.read_bytes())
                write_new(path, built.read_bytes())
                return _load(path)
        except OSError as error:  # a folder that is not to be used, no space in it, or not to be executed from
            if not built.exists():
                _compile(built)
            _log.warning("compiled kernels are not kept, each process compiles them again: %s", error)
            return ctypes.CDLL(str(built))  # stays loaded when the file is gone


@contextmanager
def private_folder() -> Iterator[Path]:
    """Open the folder of kernels; it is made where it is missing.

    Raises:
        OSError: if there is none that only this user can change.
    """
    path = cache_folder()
    if not path.is_absolute():
        raise FileNotFoundError(f"{path} is not an absolute path; set HOME or XDG_CACHE_HOME to one")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _check_private(path, os.fstat(handle))
        # By its handle it stays the folder that was checked, whoever may rename the folders above it.
        by_handle = Path(f"/proc/self/fd/{handle}")
        yield by_handle if by_handle.is_dir() else path
    finally:
        os.close(handle)


def write_new(path: Path, content: bytes) -> None:
    """Write a file that nobody else can write to, whole or not at all; does nothing where there is one already."""
    handle, name = tempfile.mkstemp(prefix=f"{path.stem}-", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # a name that survives a power cut must not outlive the contents
        with suppress(FileExistsError):
            os.link(name, path)
    finally:
        Path(name).unlink()


def _check_private(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to another user, who could have put any code there; remove it")
    if status.st_mode & WRITABLE_BY_OTHERS:
        raise PermissionError(f"others can write to {path} and could have put any code there; remove it")


def _kept(folder: Path) -> ctypes.CDLL | None:
    """Return a library that was built before; what is damaged is removed."""
    for path in sorted(folder.glob(f"kernels-{key()}-*.so")):
        with suppress(OSError):
            status = path.lstat()
            _check_private(path, status)
            if stat.S_ISREG(status.st_mode) and path.name == _name(path.read_bytes()):
                return _load(path)
        _log.warning("%s in %s is damaged and is built again", path.name, cache_folder())
        path.unlink(missing_ok=True)
    return None


def _load(path: Path) -> ctypes.CDLL:
    """Load a library; what cannot be loaded is not kept."""
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        path.unlink()
        raise


def _name(content: bytes) -> str:
    return f"kernels-{key()}-{hashlib.sha256(content).hexdigest()[:32]}.so"


def _compile(path: Path) -> None:
    _log.info("compiling the kernels with %s", _compiler())
    command = [_compiler(), *FLAGS, *map(str, SOURCES), "-o", str(path)]
    try:
        _run([*command, FOR_THIS_CPU])
    except subprocess.CalledProcessError:  # not every compiler knows the flag on every machine
        _run(command)
    if not path.exists():
        raise subprocess.SubprocessError(f"{_compiler()} has written nothing")


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS_TO_COMPILE)


def key() -> str:
    """Name a build by all that it depends on: another source, compiler, flag or CPU gives another name."""
    compiler = _compiler()
    program = os.stat(compiler)
    parts = [os.path.realpath(compiler), program.st_size, program.st_mtime_ns, FLAGS, FOR_THIS_CPU, _cpu()]
    contents = [path.read_bytes() for path in (*SOURCES, *HEADERS)]
    return hashlib.sha256(repr([*parts, *contents]).encode()).hexdigest()[:20]


def _compiler() -> str:
    found = next(filter(None, map(shutil.which, COMPILERS)), None)
    if os.name != "posix" or found is None:
        raise FileNotFoundError(f"none of the compilers {', '.join(COMPILERS)} was found")
    return found


def _cpu() -> str:
    """Describe the instructions that this machine knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()} {platform.platform()}"
    kept = ("model name", "flags", "Features", "CPU part")
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(kept)}))
