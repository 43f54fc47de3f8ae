import io
import os
import pickle
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from metadropout.data.safe_pickle import load_pickle, read_pickle
from metadropout.errors import DataError


def read(content: bytes) -> Any:
    return read_pickle(io.BytesIO(content), len(content), "test.pkl")


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return bool(isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


arrays = hnp.arrays(
    dtype=st.sampled_from(["u1", "<i4", ">i2", "<f4", "<f8", "?"]),
    shape=hnp.array_shapes(min_dims=1, max_dims=4, max_side=4),
    elements={"allow_nan": False},
)
plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | arrays
nested = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4) | st.tuples(inner, inner)
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(value=nested, protocol=st.integers(0, 5), fortran=st.booleans())
def test_plain_data_comes_back_from_every_protocol(value: Any, protocol: int, fortran: bool) -> None:
    value = np.asfortranarray(value) if fortran and isinstance(value, np.ndarray) else value
    assert same(value, read(pickle.dumps(value, protocol)))


def test_numpy_scalars_become_numbers() -> None:
    assert read(pickle.dumps([np.int64(3), np.float32(0.5)])) == [3, 0.5]


def test_python_2_text_becomes_strings() -> None:
    python_2 = b"(dp0\nS'labels'\np1\n(lp2\nI3\naI4\nas."
    assert read(python_2) == {"labels": [3, 4]}


def test_a_python_2_array_is_read() -> None:
    # As Python 2 with protocol 2 wrote it: the bytes of the array are a Python 2 string.
    content = (
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\nq\x01cnumpy\nndarray\nq\x02K\x00\x85U\x01b\x87R"
        b"(K\x01K\x02K\x03\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89U\x06\x00\x01\x02\x03\x04\xfftb."
    )
    assert read(content).tolist() == [[0, 1, 2], [3, 4, 255]]


class Runs:
    """Runs a command when read by the standard reader."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call

    def __repr__(self) -> str:  # names the test, the same in every process
        return f"{self.call[0].__name__}{self.call[1]}"


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"image_data": x}, lambda x: [np.zeros(2), (x,)]])
def test_a_command_in_a_pickle_is_refused_and_not_run(protocol: int, wrap: Any, tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    path = tmp_path / "evil.pkl"
    path.write_bytes(pickle.dumps(wrap(Runs(os.system, f"touch {witness}")), protocol))
    with pytest.raises(DataError, match=r"evil\.pkl: refused, .*asks for \w+\.system; nothing in it was executed"):
        load_pickle(path)
    assert not witness.exists()
    pickle.loads(path.read_bytes())  # the same file does run with the standard reader, so the test can fail
    assert witness.exists()


@pytest.mark.parametrize(
    "value",
    [
        Runs(eval, "1"),
        Runs(getattr, "x", "upper"),
        Runs(__import__, "os"),
        Runs(print, "x"),
        OrderedDict(a=1),
        {1, 2},
        frozenset({1}),
        complex(1, 2),
        range(3),
        Path("x"),
        np.array([{"a": 1}], dtype=object),
        np.zeros(2, dtype=[("a", "i4")]),
        np.float64,
    ],
    ids=repr,
)
def test_everything_but_plain_data_is_refused(value: Any) -> None:
    with pytest.raises(DataError, match="refused"):
        read(pickle.dumps(value))


@pytest.mark.parametrize(
    "content",
    [
        b"(S'touch x'\nios\nsystem\n.",  # INST
        b"(cos\nsystem\nS'touch x'\no.",  # OBJ
        b"\x80\x02cnumpy\ndtype\n)\x81.",  # NEWOBJ
        b"\x80\x02\x82\x01.",  # EXT1
        b"Px\n.",  # PERSID
        b"\x80\x02cnumpy\ndtype\n}b.",  # BUILD on one of the reader's own functions
        b"\x80\x02cnumpy\nndarray\n)R.",  # calling what is not a function
        b"\x80\x02]}b.",  # BUILD on a list
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\ndtype\nK\x00\x85U\x01b\x87R.",  # another kind of array
        b"\x80\x02cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R.",  # a type without an array
        b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00xX\x03\x00\x00\x00rot\x86R.",
    ],
    ids=["inst", "obj", "newobj", "ext", "persid", "build", "call", "build-list", "reconstruct", "dtype", "codec"],
)
def test_instructions_that_data_does_not_need_are_refused(content: bytes) -> None:
    with pytest.raises(DataError, match="refused"):
        read(content)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no pickle at all",
        pickle.dumps(np.zeros(1000))[:-20],
        b"\x80\x04\x8e" + struct.pack("<Q", 2**60) + b"x.",  # BINBYTES8 that promises an exabyte
        b"\x80\x05\x96" + struct.pack("<Q", 2**60) + b"x.",  # BYTEARRAY8
        pickle.dumps(np.zeros(4, "u1"), 2).replace(b"K\x04\x85", b"K\x05\x85"),  # more elements than bytes
        b"]" * 100_000 + b"a" * 99_999 + b".",  # lists nested too deep to walk
    ],
    ids=["empty", "text", "cut", "huge-bytes", "huge-bytearray", "shape", "deep"],
)
def test_damage_gives_one_clear_message(content: bytes) -> None:
    with pytest.raises(DataError, match=r"test\.pkl: not a readable pickle .* fetch it again"):
        read(content)


def test_a_giant_memo_number_takes_no_memory() -> None:
    # The standard reader would set tens of gigabytes aside for this.
    assert read(b"\x80\x02K\x07r" + struct.pack("<I", 2**32 - 1) + b".") == 7


def test_shared_parts_are_not_walked_again_and_again() -> None:
    value: list[Any] = ["x"]
    for _ in range(200):
        value = [value, value]
    assert len(read(pickle.dumps(value))) == 2


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.pkl: cannot be read \(No such file"):
        load_pickle(tmp_path / "none.pkl")
