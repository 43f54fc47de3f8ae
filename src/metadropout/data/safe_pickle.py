"""Reads pickles that came from the internet, without executing anything in them.

A pickle is a program for a small stack machine, and the standard reader runs it with all of Python at its disposal.
This one knows only the instructions that build numbers, strings, lists, tuples and dicts, and the few names by which
NumPy arrays are described. Even these names do not call NumPy: they fill plain descriptions, from which the arrays
are made after they have been checked.
"""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from metadropout.errors import DataError
from metadropout.files import open_regular

MAX_BYTES = 4 * 2**30  # five times the largest file of miniImageNet; all of it is read into memory
_PLAIN_KINDS = "biuf"  # bool, int, unsigned, float; no objects, no structures
_ALLOWED = (  # noqa: SIM905 - sixty names read better in rows than one to a line
    "PROTO FRAME STOP MARK POP POP_MARK DUP GLOBAL STACK_GLOBAL REDUCE BUILD MEMOIZE PUT BINPUT LONG_BINPUT GET BINGET "
    "LONG_BINGET NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING "
    "SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8 UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 "
    "EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST LIST APPEND APPENDS EMPTY_DICT DICT SETITEM SETITEMS"
).split()


class _RefusedError(Exception):
    """The pickle asks for something that data does not need."""


def load_pickle(path: Path) -> Any:
    """Return the content of a pickle file: dicts, lists, tuples, strings, numbers and NumPy arrays.

    Byte strings, which is what Python 2 wrote for text, become strings.

    Raises:
        DataError: if it is damaged, or asks for anything else; nothing has been executed then.
    """
    try:
        with open_regular(path, MAX_BYTES) as file:
            return read_pickle(file, os.fstat(file.fileno()).st_size, str(path))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}); get the file again") from error


def read_pickle(file: IO[bytes], size: int, where: str) -> Any:
    """Return the content of an open pickle; see `load_pickle`.

    Args:
        file: where to read from.
        size: how many bytes there are.
        where: its name for messages.
    """
    try:
        return _plain(_Reader(_Bounded(file, size), encoding="bytes").load(), {})
    except _RefusedError as error:
        raise DataError(
            f"{where}: refused, because this pickle {error}; nothing in it was executed, get it from its publisher"
        ) from error
    except Exception as error:  # damage shows itself as nearly any error in a stack machine
        raise DataError(
            f"{where}: not a readable pickle ({type(error).__name__}: {error}); it may be cut short, fetch it again"
        ) from error


class _Bounded:
    """A file that does not try to set memory aside for more than it holds."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file, self._left = file, size

    def read(self, count: int) -> bytes:
        if count > self._left:
            raise EOFError("it ends too early")
        self._left -= count
        return self._file.read(count)

    def readline(self) -> bytes:
        line = self._file.readline(self._left)
        self._left -= len(line)
        return line


class _Dtype:
    """What a pickle says about an array's type."""

    def __init__(self, code: Any, align: Any = False, copy: Any = False) -> None:
        code = code.decode("latin-1") if isinstance(code, bytes) else code
        dtype = np.dtype(code) if isinstance(code, str) and len(code) < 8 else None
        if dtype is None or dtype.kind not in _PLAIN_KINDS:
            raise _RefusedError(f"holds an array of {code!r}")
        self.dtype = dtype

    def build(self, state: Any) -> None:
        order = state[1].decode("latin-1") if isinstance(state[1], bytes) else state[1]
        self.dtype = self.dtype.newbyteorder(">" if order == ">" else "<")


class _Array:
    """What a pickle says about an array."""

    def __init__(self, kind: Any, shape: Any, code: Any) -> None:
        if kind is not _NDARRAY:
            raise _RefusedError("describes an array in a way that NumPy does not")
        self.array: NDArray[Any] | None = None

    def build(self, state: Any) -> None:
        _, shape, dtype, fortran, raw = state
        self.array = _make_array(raw, dtype, shape, "F" if fortran else "C")


_NDARRAY = object()


def _make_array(raw: Any, dtype: Any, shape: Any, order: Any) -> NDArray[Any]:
    if not isinstance(dtype, _Dtype) or not isinstance(raw, bytes | bytearray) or not isinstance(shape, tuple):
        raise _RefusedError("describes an array in a way that NumPy does not")
    if math.prod(shape) * dtype.dtype.itemsize != len(raw):
        raise ValueError(f"an array of shape {shape} has {len(raw)} bytes")
    return np.frombuffer(raw, dtype.dtype).reshape(shape, order="F" if order == "F" else "C")


def _from_buffer(raw: Any, dtype: Any, shape: Any, order: Any) -> _Array:
    array = _Array(_NDARRAY, None, None)
    array.array = _make_array(raw, dtype, shape, order)
    return array


def _scalar(dtype: Any, raw: Any) -> Any:
    return _make_array(raw, dtype, (1,), "C")[0].item()


def _encode(text: Any, encoding: Any) -> bytes:
    if not isinstance(text, str) or encoding != "latin1":
        raise _RefusedError("encodes text in a way that NumPy does not")
    return text.encode("latin-1")


_NAMES: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encode,  # how Python 3 writes bytes where Python 2 is to read them
    **{
        (f"numpy.{core}.{module}", name): function
        for core in ("core", "_core")
        for module, name, function in (
            ("multiarray", "_reconstruct", _Array),
            ("multiarray", "scalar", _scalar),
            ("numeric", "_frombuffer", _from_buffer),
        )
    },
}


# The reader written in Python: its memo is a dict, where the one in C sets memory aside for any number it is told, and
# its instructions can be taken away one by one.
class _Reader(pickle._Unpickler):
    stack: list[Any]
    append: Callable[[Any], None]
    read: Callable[[int], bytes]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {}

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _NAMES[module, name]
        except KeyError:
            raise _RefusedError(f"asks for {module}.{name}") from None

    def _build(self) -> None:
        state = self.stack.pop()
        if not isinstance(self.stack[-1], _Array | _Dtype):
            raise _RefusedError("sets the state of something that is not an array")
        self.stack[-1].build(state)

    def _reduce(self) -> None:
        arguments = self.stack.pop()
        function = self.stack[-1]
        if not any(function is known for known in _NAMES.values()) or function is _NDARRAY:
            raise _RefusedError("calls something that does not make an array")
        self.stack[-1] = function(*arguments)

    def _bytearray(self) -> None:
        self.append(self.read(int.from_bytes(self.read(8), "little")))

    def _refuse(self) -> None:
        raise _RefusedError("holds more than arrays, lists, dicts and strings")


_Reader.dispatch = {
    **dict.fromkeys(pickle._Unpickler.dispatch, _Reader._refuse),
    **{getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]] for name in _ALLOWED},
    pickle.BUILD[0]: _Reader._build,
    pickle.REDUCE[0]: _Reader._reduce,
    pickle.BYTEARRAY8[0]: _Reader._bytearray,
}


def _plain(value: Any, done: dict[int, Any]) -> Any:
    """Put arrays in the place of their descriptions; `done` keeps shared parts from being walked again and again."""
    if id(value) in done:
        return done[id(value)]
    result = value
    if isinstance(value, _Array):
        if value.array is None:
            raise _RefusedError("names an array without describing it")
        result = value.array
    elif isinstance(value, bytes | bytearray):
        result = value.decode("latin-1")
    elif isinstance(value, list):
        result = [_plain(item, done) for item in value]
    elif isinstance(value, tuple):
        result = tuple(_plain(item, done) for item in value)
    elif isinstance(value, dict):
        result = {_plain(key, done): _plain(item, done) for key, item in value.items()}
    elif not isinstance(value, str | int | float | None):
        raise _RefusedError("holds more than arrays, lists, dicts and strings")
    done[id(value)] = result
    return result
