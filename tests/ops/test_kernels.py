"""Compiled kernels against plain PyTorch: values, first and second derivatives, and when which is used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F

import metadropout as md
from metadropout.networks.functional import FunctionalNetwork, Normalisation
from metadropout.ops import kernels
from metadropout.ops.kernels import build, calls

needs_kernels = pytest.mark.skipif(not kernels.available(), reason="no C++ compiler, or METADROPOUT_FUSED is 0")
SIZES = [(6, 5, 8, 8), (4, 3, 7, 7), (2, 17, 3, 3), (1, 2, 2, 2), (2, 1, 5, 4), (6, 16, 2, 9)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def images(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64, requires_grad: bool = True) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    return values.to(memory_format=torch.channels_last).requires_grad_(requires_grad)


def is_fused(output: Tensor) -> bool:
    assert output.grad_fn is not None
    return output.grad_fn.name() in ("NoisyProductBackward", "NormReluPoolBackward")


def derivatives(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """The value, the gradient of a loss that bends, and the gradient of a function of value and gradient."""
    out = function(*inputs)
    weights = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)
    first = torch.autograd.grad((weights * out + out**2).sum(), inputs, create_graph=True)
    mixed = sum(((torch.sin(3 * g) * g).sum() for g in first), (out**3).sum())
    return [out, *first, *torch.autograd.grad(mixed, inputs)]


def assert_same(actual: list[Tensor], expected: list[Tensor], rtol: float = 1e-10, atol: float = 1e-11) -> None:
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=rtol, atol=atol * max(1.0, e.abs().max().item()))


@needs_kernels
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("noise", ["none", "as drawn", "channels last"])
def test_noisy_product_agrees_with_the_plain_path_up_to_second_derivatives(size: tuple[int, ...], noise: str) -> None:
    f, mean = images(*size), images(*size, seed=1)
    e = None if noise == "none" else images(*size, seed=2, requires_grad=False)
    e = e.contiguous() if e is not None and noise == "as drawn" else e

    def product(f: Tensor, mean: Tensor) -> Tensor:
        return kernels.noisy_product(f, mean, e)

    assert is_fused(product(f, mean))
    actual = derivatives(product, f, mean)
    with kernels.disabled():
        assert not is_fused(product(f, mean))
        assert_same(actual, derivatives(product, f, mean))


@needs_kernels
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("noise", ["not computed", "as drawn", "channels last"])
def test_images_can_be_used_for_several_noise_samples(size: tuple[int, ...], samples: int, noise: str) -> None:
    f, mean = images(*size), images(*size, seed=1)
    draws = kernels.Draws(tuple((7, sample) for sample in range(samples)), (samples * size[0], *size[1:]))
    values = kernels.values(draws, f)
    e = {"not computed": draws, "as drawn": values.contiguous(), "channels last": values}[noise]

    def product(f: Tensor, mean: Tensor) -> Tensor:
        return kernels.noisy_product(f, mean, e)

    def elementary(f: Tensor, mean: Tensor) -> Tensor:
        f, mean = f.repeat(samples, 1, 1, 1), mean.repeat(samples, 1, 1, 1)
        return f * F.softplus(mean + values)

    assert is_fused(product(f, mean))
    expected = derivatives(elementary, f, mean)
    assert_same(derivatives(product, f, mean), expected)
    (g_f,) = torch.autograd.grad((product(f, mean) ** 2).sum(), f)  # without a graph of its own
    torch.testing.assert_close(g_f, torch.autograd.grad((elementary(f, mean) ** 2).sum(), f)[0])
    with kernels.disabled():
        assert not is_fused(product(f, mean))
        assert_same(derivatives(product, f, mean), expected)


@needs_kernels
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("with_bias", [True, False])
def test_norm_relu_pool_agrees_with_the_plain_path_up_to_second_derivatives(
    size: tuple[int, ...], groups: int, with_bias: bool
) -> None:
    if size[0] % groups:
        pytest.skip("one image cannot be two groups")
    x = images(*size)
    bias = [torch.linspace(-0.5, 0.7, size[1], dtype=torch.float64).requires_grad_()] if with_bias else []

    def block(x: Tensor, bias: Tensor | None = None) -> Tensor:
        return kernels.norm_relu_pool(x * 2 + 3, bias, 1e-3, groups)  # a mean that is not zero

    def elementary(x: Tensor, bias: Tensor | None = None) -> Tensor:
        # PyTorch's own batch_norm has no second derivative by way of the offset's gradient.
        grouped = (x * 2 + 3).unflatten(0, (groups, -1))
        variance, mean = torch.var_mean(grouped, dim=(1, 3, 4), correction=0, keepdim=True)
        y = ((grouped - mean) / (variance + 1e-3).sqrt()).flatten(0, 1)
        return F.max_pool2d(F.relu(y if bias is None else y + bias.view(1, -1, 1, 1)), 2)

    assert is_fused(block(x, *bias))
    assert_same(derivatives(block, x, *bias), derivatives(elementary, x, *bias))
    with kernels.disabled():
        torch.testing.assert_close(block(x, *bias), elementary(x, *bias))


@needs_kernels
def test_noisy_product_passes_the_numerical_check_of_both_derivatives() -> None:
    inputs = (images(2, 3, 2, 2), images(2, 3, 2, 2, seed=1))
    noise = images(2, 3, 2, 2, seed=2, requires_grad=False)
    for function in (kernels.noisy_product, lambda f, mean: kernels.noisy_product(f, mean, noise)):
        assert gradcheck(function, inputs)
        assert gradgradcheck(function, inputs)


@needs_kernels
@pytest.mark.parametrize("groups", [1, 2])
def test_norm_relu_pool_passes_the_numerical_check_of_both_derivatives(groups: int) -> None:
    inputs = (images(2, 2, 4, 5), torch.tensor([0.4, -0.3], dtype=torch.float64, requires_grad=True))
    assert gradcheck(lambda x, b: kernels.norm_relu_pool(x, b, 1e-2, groups), inputs)
    assert gradgradcheck(lambda x, b: kernels.norm_relu_pool(x, b, 1e-2, groups), inputs)
    assert gradgradcheck(lambda x: kernels.norm_relu_pool(x, None, 1e-2, groups), inputs[:1])


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noisy_product_is_right_for_large_and_small_arguments(dtype: torch.dtype) -> None:
    values = torch.tensor([-700, -100, -80, -30, -12, -1e-3, 0, 1e-3, 1, 12, 19, 21, 30, 88, 300, 1e5], dtype=dtype)
    mean = values.view(1, -1, 1, 1).requires_grad_()
    f = torch.full_like(mean, 1.5).requires_grad_()
    actual = derivatives(kernels.noisy_product, f, mean)
    with kernels.disabled():
        expected = derivatives(kernels.noisy_product, f, mean)
    eps = torch.finfo(dtype).eps
    for a, e in zip(actual, expected, strict=True):  # relative to each value, not to the largest
        torch.testing.assert_close(a, e, rtol=200 * eps, atol=1e-37 if dtype == torch.float32 else 1e-300)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_visible(dtype: torch.dtype, bad: float) -> None:
    size = (2, 9, 4, 4)

    def spoilt(seed: int) -> Tensor:
        x = images(*size, seed=seed, dtype=dtype, requires_grad=False)
        x[1, 4, 2, 3] = bad
        return x.requires_grad_()

    def block(x: Tensor) -> Tensor:
        return kernels.norm_relu_pool(x, None, 1e-3)

    good = images(*size, seed=5, dtype=dtype)
    cases: list[tuple[Callable[..., Tensor], list[Tensor]]] = [
        (kernels.noisy_product, [good, spoilt(1)]),
        (kernels.noisy_product, [spoilt(1), good]),
        (block, [spoilt(1)]),
    ]
    for function, inputs in cases:
        assert is_fused(function(*inputs))
        out = function(*inputs)
        actual = [out, *torch.autograd.grad(out.sum(), inputs)]
        with kernels.disabled():
            out = function(*inputs)
            expected = [out, *torch.autograd.grad(out.sum(), inputs)]
        for a, e in zip(actual, expected, strict=True):
            assert torch.equal(a.isnan(), e.isnan())
            torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5, equal_nan=True)


@needs_kernels
def test_float32_is_as_exact_as_the_plain_path_in_float32() -> None:
    size = (10, 33, 14, 14)
    single = [images(*size, seed=k, dtype=torch.float32) for k in range(2)]
    double = [t.detach().double().requires_grad_() for t in single]
    for function, count in ((kernels.noisy_product, 2), (lambda x: kernels.norm_relu_pool(x, None, 1e-3, 2), 1)):
        exact = derivatives(function, *double[:count])
        compiled = derivatives(function, *single[:count])
        with kernels.disabled():
            plain = derivatives(function, *single[:count])
        for a, b, e in zip(compiled, plain, exact, strict=True):
            assert (a - e).norm() <= 2 * (b - e).norm() + 1e-7 * e.norm()


@needs_kernels
def test_statistics_do_not_lose_digits_to_a_large_mean() -> None:
    x = images(4, 3, 6, 6, requires_grad=False)
    large = (x + 1e4).float()
    torch.testing.assert_close(
        kernels.norm_relu_pool(large, None, 1e-3).double(),
        kernels.norm_relu_pool(large.double(), None, 1e-3),
        rtol=0,
        atol=2e-3,  # 1e4 has a spacing of 1e-3 in float32
    )


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_number_of_threads_changes_nothing(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "LARGE", 0)
    x, mean = images(7, 5, 9, 8, dtype=dtype), images(7, 5, 9, 8, seed=1, dtype=dtype)
    noise = images(7, 5, 9, 8, seed=2, dtype=dtype, requires_grad=False).contiguous()

    def block(x: Tensor, mean: Tensor) -> Tensor:
        return kernels.norm_relu_pool(kernels.noisy_product(x, mean, noise), None, 1e-3)

    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(derivatives(block, x, mean))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@needs_kernels
def test_gradients_may_come_in_any_layout() -> None:
    x = images(2, 3, 5, 4)
    back = torch.randn(2, 3, 2, 2, dtype=torch.float64)  # not channels last
    actual = torch.autograd.grad(kernels.norm_relu_pool(x, None, 1e-3), x, back)
    with kernels.disabled():
        assert_same(list(actual), list(torch.autograd.grad(kernels.norm_relu_pool(x, None, 1e-3), x, back)))


@needs_kernels
def test_third_derivatives_are_refused() -> None:
    f, mean = images(1, 2, 2, 2), images(1, 2, 2, 2, seed=1)
    for function, inputs in (
        (kernels.noisy_product, [f, mean]),
        (lambda x: kernels.norm_relu_pool(x, None, 1e-3), [f]),
    ):
        first = torch.autograd.grad((function(*inputs) ** 2).sum(), inputs, create_graph=True)[-1]
        with pytest.raises(RuntimeError, match="not three times"):
            torch.autograd.grad((first**2).sum(), inputs, create_graph=True)


@needs_kernels
def test_other_layouts_types_and_transforms_use_the_plain_path() -> None:
    x = images(2, 3, 4, 4)
    assert not is_fused(kernels.noisy_product(x, images(1, 3, 4, 4).expand(2, -1, -1, -1)))
    assert not is_fused(kernels.norm_relu_pool(x.detach().contiguous().requires_grad_(), None, 1e-3))
    assert not is_fused(kernels.norm_relu_pool(x.detach().half().requires_grad_(), None, 1e-3))
    assert not is_fused(kernels.noisy_product(x, x, torch.zeros_like(x).requires_grad_()))
    assert not is_fused(kernels.noisy_product(x.flatten(1), x.flatten(1)))

    def total(x: Tensor) -> Tensor:
        return kernels.norm_relu_pool(x, None, 1e-3).sum()

    torch.testing.assert_close(torch.func.grad(total)(x.detach()), torch.autograd.grad(total(x), x)[0])


@needs_kernels
def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    x = images(2, 3, 4, 4)
    with kernels.disabled():
        assert not is_fused(kernels.noisy_product(x, x))
    assert is_fused(kernels.noisy_product(x, x))
    monkeypatch.setenv("METADROPOUT_FUSED", "0")
    assert not kernels.available()
    assert not is_fused(kernels.noisy_product(x, x))


@pytest.fixture
def fresh_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache of compiled kernels, nothing loaded, and a source that compiles in no time."""
    source = tmp_path / "small.cpp"
    source.write_text("int values[20000] = {1};")
    monkeypatch.setattr(build, "SOURCES", (source,))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("METADROPOUT_FUSED", raising=False)
    build._library.cache_clear()
    yield tmp_path
    build._library.cache_clear()


def fake_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    path = folder / "c++"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_without_a_compiler_the_plain_path_is_used(fresh_build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(fresh_build))
    x = images(2, 3, 4, 4)
    assert not kernels.available()
    assert not is_fused(kernels.norm_relu_pool(x, None, 1e-3))


@pytest.mark.parametrize("script", ["echo no such flag >&2; exit 1", "exit 0"])
def test_with_a_broken_compiler_the_plain_path_is_used(
    fresh_build: Path, monkeypatch: pytest.MonkeyPatch, script: str, caplog: pytest.LogCaptureFixture
) -> None:
    fake_compiler(fresh_build, monkeypatch, script)
    with caplog.at_level("INFO"):
        assert not kernels.available()
    assert "plain PyTorch is used" in caplog.text
    assert not list(fresh_build.rglob("kernels-*"))


@needs_kernels
def test_where_nothing_can_be_kept_the_kernels_are_built_for_the_process(
    fresh_build: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fresh_build / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(fresh_build / "file"))  # not a folder
    assert kernels.available()


@needs_kernels
def test_a_build_is_kept_and_a_broken_one_replaced(fresh_build: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert kernels.available()
        build._library.cache_clear()
        assert kernels.available()
    assert caplog.text.count("compiling") == 1
    (kept,) = fresh_build.rglob("*.so")
    content = kept.read_bytes()
    for damaged in (b"no library", content[: len(content) // 2], content[:-1] + b"?", b""):
        kept.unlink(missing_ok=True)  # not written over: it is loaded
        kept.write_bytes(damaged)
        kept.chmod(0o600)
        caplog.clear()
        build._library.cache_clear()
        assert kernels.available()
        assert "is damaged and is built again" in caplog.text
        (kept,) = fresh_build.rglob("*.so")
        assert kept.read_bytes() != damaged


@needs_kernels
def test_a_library_cut_short_does_not_kill_the_process(fresh_build: Path) -> None:
    assert kernels.available()
    (kept,) = fresh_build.rglob("*.so")
    content = kept.read_bytes()
    kept.unlink()
    kept.write_bytes(content[: len(content) // 2])  # its header is whole, the pages behind it are missing
    kept.chmod(0o600)
    program = f"""
from pathlib import Path
from metadropout.ops import kernels
from metadropout.ops.kernels import build
build.SOURCES = (Path({str(build.SOURCES[0])!r}),)
assert kernels.available()
"""
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ)
    assert kept.read_bytes() == content


def plant(folder: Path, marker: Path) -> None:
    """Put a library that writes a file when it is loaded where compiled kernels would be looked for."""
    source, planted = marker.with_suffix(".cpp"), marker.with_suffix(".so")
    source.write_text(
        f'#include <cstdio>\n__attribute__((constructor)) void run() {{ fclose(fopen("{marker}", "w")); }}'
    )
    compiler = next(filter(None, map(shutil.which, build.COMPILERS)))
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(planted)], check=True)
    content = planted.read_bytes()
    for name in (f"kernels-{build.key()}.so", build._name(content)):
        (folder / name).write_bytes(content)
        (folder / name).chmod(0o600)


@needs_kernels
@pytest.mark.parametrize("whose", ["others can write", "another user's", "a link to another user's", "relative"])
def test_code_that_others_may_have_put_into_the_cache_is_not_run(
    fresh_build: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, whose: str
) -> None:
    folder = build.cache_folder()
    if whose == "a link to another user's":
        folder.parent.mkdir(parents=True)
        (fresh_build / "theirs").mkdir()
        folder.symlink_to(fresh_build / "theirs")
    elif whose == "relative":
        monkeypatch.chdir(fresh_build)
        monkeypatch.setenv("XDG_CACHE_HOME", "here")
        monkeypatch.setenv("HOME", str(fresh_build / "home"))
        folder = fresh_build / "here" / "metadropout" / "kernels"
        folder.mkdir(mode=0o700, parents=True)
    else:
        folder.mkdir(mode=0o700, parents=True)
    plant(folder, fresh_build / "marker")
    if whose == "others can write":
        folder.chmod(0o777)
    elif whose != "relative":
        me = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    before = sorted(folder.iterdir())
    assert kernels.available()  # built for this process alone
    assert not (fresh_build / "marker").exists()
    assert sorted(folder.iterdir()) == before
    if whose != "relative":
        (said,) = (record for record in caplog.records if record.levelname == "WARNING")
        assert "each process compiles them again" in said.message
        assert str(folder) in said.message


@needs_kernels
def test_a_kept_file_that_others_can_write_to_is_built_again(fresh_build: Path) -> None:
    folder = build.cache_folder()
    folder.mkdir(mode=0o700, parents=True)
    plant(folder, fresh_build / "marker")
    for path in folder.iterdir():
        path.chmod(0o622)
    assert kernels.available()
    assert not (fresh_build / "marker").exists()


@needs_kernels
def test_kernels_are_on_the_disk_before_they_get_their_name(fresh_build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    for name in ("fsync", "link"):
        original = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, name=name, do=original: (done.append(name), do(*a))[1])
    assert kernels.available()
    assert done == ["fsync", "link"]


def test_that_the_kernels_are_off_is_said_once_and_why(
    fresh_build: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(fresh_build))
    for _ in range(3):
        assert not kernels.available()
    (said,) = caplog.records
    assert said.levelname == "WARNING"
    assert "the fast kernels are off" in said.message
    assert "none of the compilers c++, g++, clang++ was found" in said.message


# The network and the learner ------------------------------------------------------------------------------------------


def conv_block(**layers: nn.Module) -> nn.Sequential:
    sequential = nn.Sequential()
    for name, layer in layers.items():
        sequential.add_module(name, layer)
    return sequential


def runs_fused(network: nn.Module, hooked: tuple[str, ...] = ()) -> bool:
    return any(type(m).__name__ == "_NormReluPool" for m in FunctionalNetwork(network, hooked)._structure.modules())


def test_only_a_normalisation_without_scale_before_relu_and_plain_pooling_is_fused() -> None:
    norm, relu, pool = md.Conv4(way=2).blocks[0][1:]  # type: ignore[index]
    assert runs_fused(conv_block(norm=norm, relu=relu, pool=pool))
    assert not runs_fused(conv_block(norm=norm, relu=relu, pool=pool), hooked=("relu",))
    assert not runs_fused(conv_block(norm=norm, relu=relu, pool=pool), hooked=("norm",))
    assert not runs_fused(conv_block(norm=nn.BatchNorm2d(64), relu=relu, pool=pool))
    assert runs_fused(conv_block(norm=nn.BatchNorm2d(64, affine=False), relu=relu, pool=pool))
    assert not runs_fused(conv_block(norm=norm, relu=nn.ELU(), pool=pool))
    for other in (
        nn.MaxPool2d(3),
        nn.MaxPool2d(2, stride=1),
        nn.MaxPool2d(2, padding=1),
        nn.MaxPool2d(2, dilation=2),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.AvgPool2d(2),
    ):
        assert not runs_fused(conv_block(norm=norm, relu=relu, pool=other))


def test_a_sequence_that_is_used_twice_is_fused_once() -> None:
    norm, relu, pool = md.Conv4(way=2, channels=3).blocks[0][1:]  # type: ignore[index]
    inner = conv_block(norm=norm, relu=relu, pool=pool)
    network = nn.Sequential(inner, inner, nn.Flatten()).double()
    x = images(2, 3, 8, 8)
    function = FunctionalNetwork(network, ())
    torch.testing.assert_close(function(dict(network.named_parameters()), x), network(x))


@pytest.mark.parametrize("how", ["batch", "groups", "collected", "given"])
def test_a_fused_network_computes_what_its_layers_do(how: str) -> None:
    network = md.Conv4(way=3, channels=4, in_channels=2, image_size=16).double()
    x = images(4, 2, 16, 16)
    weights = dict(network.named_parameters())
    function = FunctionalNetwork(network, ())
    with torch.no_grad():
        if how == "batch":
            torch.testing.assert_close(function(weights, x), network(x))
        elif how == "groups":
            expected = torch.cat([network(x[:2]), network(x[2:])])
            torch.testing.assert_close(function(weights, x, normalisation=Normalisation(groups=2)), expected)
        else:
            statistics: dict[str, tuple[Tensor, Tensor]] = {}
            logits = function(weights, x, normalisation=Normalisation(collected=statistics))
            torch.testing.assert_close(logits, network(x))
            assert set(statistics) == {f"blocks.{k}.norm" for k in range(4)}
            if how == "given":
                one_by_one = [function(weights, x[k : k + 1], None, Normalisation(given=statistics)) for k in range(4)]
                torch.testing.assert_close(torch.cat(one_by_one), logits)


@needs_kernels
@pytest.mark.parametrize("perturbation", [md.NoPerturbation, md.MetaDropout])
@pytest.mark.parametrize("image_size", [28, 33])
def test_a_tasks_gradient_is_the_same_fused_and_plain(perturbation: type[md.Perturbation], image_size: int) -> None:
    torch.manual_seed(0)
    network = md.Conv4(way=3, channels=8, image_size=image_size)
    learner = md.MAML(network, perturbation(network), inner_lr=0.1, steps=2).double()
    y = torch.arange(3)
    x = torch.rand(9, 1, image_size, image_size, dtype=torch.float64)
    episode = md.Episode(x[:3], y, x[3:], y.repeat_interleave(2))
    actual = learner.task_gradient(episode, generator=md.SeededNoise(3))
    with kernels.disabled():
        expected = learner.task_gradient(episode, generator=md.SeededNoise(3))
    torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-10, atol=0)
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(actual.gradients[name], gradient, rtol=1e-8, atol=1e-10, msg=name)


@needs_kernels
def test_adapting_with_several_samples_is_the_same_fused_and_plain() -> None:
    torch.manual_seed(0)
    network = md.Conv4(way=3, channels=8, image_size=20)
    learner = md.MAML(network, md.MetaDropout(network), inner_lr=0.1, steps=2, images_per_pass=6).double()
    x, y = torch.rand(3, 1, 20, 20, dtype=torch.float64), torch.arange(3)
    actual = learner.adapt(x, y, mc_samples=5, generator=md.SeededNoise(1))(x)
    with kernels.disabled():
        expected = learner.adapt(x, y, mc_samples=5, generator=md.SeededNoise(1))(x)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
