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

SOURCES = tuple(Path(__file__).with_name(name) for name in ("elementwise.cpp", "convolutions.cpp"))
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
    return (chosen if chosen.is_absolute() else Path("~/.cache").expanduser()) / "metadropout" / "kernels"


def _load_or_build() -> ctypes.CDLL:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if os.name != "posix" or compiler is None:
        raise FileNotFoundError(f"none of the compilers {', '.join(COMPILERS)} was found")
    key = _key(compiler)
    with _private_folder() as folder:
        if folder is not None and (kept := _kept(folder, key)):
            return kept
        with tempfile.TemporaryDirectory() as place:
            built = _compiled(compiler, Path(place))
            content = built.read_bytes()
            if folder is not None:
                try:
                    return _keep(content, folder, key)
                except OSError as error:  # no space, say, or not to be executed from
                    _not_kept(error)
            return ctypes.CDLL(str(built))  # stays loaded when the file is gone


@contextmanager
def _private_folder() -> Iterator[Path | None]:
    """Open the folder of kernels, made if need be; None where there is none that only this user can change."""
    handle = None
    try:
        try:
            path = cache_folder()
            if not path.is_absolute():
                raise FileNotFoundError(f"{path} is not an absolute path; set HOME or XDG_CACHE_HOME to one")
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            _check_private(path, os.fstat(handle))
        except (OSError, RuntimeError) as error:  # the latter where there is no home
            _not_kept(error)
            yield None
            return
        # By its handle it stays the folder that was checked, whoever may rename the folders above it.
        by_handle = Path(f"/proc/self/fd/{handle}")
        yield by_handle if by_handle.is_dir() else path
    finally:
        if handle is not None:
            os.close(handle)


def _check_private(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to another user, who could have put any code there; remove it")
    if status.st_mode & WRITABLE_BY_OTHERS:
        raise PermissionError(f"others can write to {path} and could have put any code there; remove it")


def _not_kept(error: Exception) -> None:
    _log.warning("compiled kernels are not kept, each process compiles them anew: %s", error)


def _kept(folder: Path, key: str) -> ctypes.CDLL | None:
    """Return a library that was built before; what is damaged is removed."""
    for path in sorted(folder.glob(f"kernels-{key}-*.so")):
        try:
            status = path.lstat()
            _check_private(path, status)
            if stat.S_ISREG(status.st_mode) and path.name == _name(key, path.read_bytes()):
                return ctypes.CDLL(str(path))
        except OSError as error:
            _log.info("%s: %s", path.name, error)
        _log.warning("%s in %s is damaged and is built again", path.name, cache_folder())
        with suppress(OSError):
            path.unlink()
    return None


def _keep(content: bytes, folder: Path, key: str) -> ctypes.CDLL:
    """Write a library into the folder under a temporary name and rename it, so that it is there whole or not at all."""
    handle, name = tempfile.mkstemp(prefix="kernels-", suffix=".tmp", dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # a rename that survives a power cut must not outlive the contents
        loaded = ctypes.CDLL(name)  # before it gets its name: what cannot be loaded is not kept
        os.replace(name, folder / _name(key, content))
        return loaded
    finally:
        Path(name).unlink(missing_ok=True)


def _name(key: str, content: bytes) -> str:
    return f"kernels-{key}-{hashlib.sha256(content).hexdigest()[:32]}.so"


def _compiled(compiler: str, folder: Path) -> Path:
    _log.info("compiling the kernels with %s", compiler)
    path = folder / "kernels.so"
    command = [compiler, *FLAGS, *map(str, SOURCES), "-o", str(path)]
    try:
        _run([*command, FOR_THIS_CPU])
    except subprocess.CalledProcessError:  # not every compiler knows the flag on every machine
        _run(command)
    return path


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
