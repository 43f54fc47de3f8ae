"""Images stored in bfloat16 between layers: values and derivatives near float64's, and which runs store them so."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from toys import UsersModel, make_episode

import metadropout as md
from metadropout.cli import main
from metadropout.networks.functional import FunctionalNetwork, Normalisation
from metadropout.noise import CounterNoise, SeededNoise
from metadropout.ops import kernels, precision
from metadropout.ops.kernels import build, calls
from metadropout.runs.folder import open_run

needs_units = pytest.mark.skipif(not kernels.has_bf16(), reason="no C++ compiler, or no AVX512-BF16")
HALF_A_STEP = 2**-9
"""A number's rounding to bfloat16 changes it by at most this, relatively."""

CONVOLUTION_ERROR = {"direct": 0.004, "winograd-2": 0.006, "winograd-4": 0.018}
"""Of the result's norm: the transforms of larger tiles give larger numbers, whose differences are the result."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["winograd-2", "winograd-4", "direct"])
def algorithm(request: pytest.FixtureRequest) -> Iterator[str]:
    with kernels.using({"images": "bfloat16", "*": request.param}):
        yield request.param


def images(*shape: int, seed: int = 0) -> Tensor:
    """Values that bfloat16 has, so that only what is computed with them is rounded."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return values.contiguous(memory_format=torch.channels_last)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def derivatives(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """The value, the gradient of a loss that bends, and the gradient of a function of value and gradient."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    out = function(*leaves)
    weights = torch.linspace(-1, 2, out.numel(), dtype=torch.float64).view_as(out)
    first = torch.autograd.grad((weights * out.double() + out.double() ** 2).mean(), leaves, create_graph=True)
    mixed = sum(((g.double() ** 2).sum() for g in first), (out.double() ** 3).mean())
    return [out, *first, *torch.autograd.grad(mixed, leaves)]


def assert_near(actual: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for number, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert (a.double() - e).norm() <= tolerance * e.norm(), number


def to_bf16(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    out = kernels.convolution_to_bf16(x, weight, bias)
    assert out is not None
    assert out.dtype == torch.bfloat16
    return out


@needs_units
@pytest.mark.parametrize(
    "size", [(3, 16, 32, 14, 14), (2, 64, 64, 7, 7), (5, 32, 16, 3, 3), (1, 16, 16, 5, 10), (4, 1, 64, 28, 28)]
)
def test_convolutions_are_near_exact_ones_up_to_second_derivatives(size: tuple[int, ...], algorithm: str) -> None:
    n, in_channels, out_channels, height, width = size
    x, weight, bias = images(n, in_channels, height, width), numbers(out_channels, in_channels, 3, 3), numbers(size[2])
    x = x.float() if in_channels == 1 else x
    weight = weight / (9 * in_channels) ** 0.5
    actual = derivatives(to_bf16, x, weight, bias)
    assert [t.dtype for t in actual[1:]] == [x.dtype, torch.float32, torch.float32] * 2  # as what they belong to
    exact = derivatives(lambda *t: F.conv2d(*t, padding=1), *(t.double() for t in (x, weight, bias)))
    assert_near(actual[:1], exact[:1], CONVOLUTION_ERROR[algorithm])
    assert_near(actual, exact, 4 * CONVOLUTION_ERROR[algorithm])


@needs_units
@pytest.mark.parametrize("size", [(6, 5, 8, 8), (4, 3, 7, 7), (2, 48, 12, 13)])
@pytest.mark.parametrize("noise", ["none", "given", "by channel", "not computed"])
def test_noisy_products_are_near_exact_ones_up_to_second_derivatives(size: tuple[int, ...], noise: str) -> None:
    f, mean = images(*size), images(*size, seed=1)
    draws = kernels.Draws(((7, 1),), size)
    values = images(*size, seed=2) if noise in ("given", "by channel") else kernels.values(draws, f.float())
    e = {"none": None, "given": values, "by channel": values.contiguous(), "not computed": draws}[noise]

    def product(f: Tensor, mean: Tensor) -> Tensor:
        out = kernels.noisy_product(f, mean, e)
        assert out.dtype == torch.bfloat16
        assert "NoisyProduct" in str(out.grad_fn)
        return out

    shift = 0 if noise == "none" else values.double()
    exact = derivatives(lambda f, mean: f * F.softplus(mean + shift), f.double(), mean.double())
    assert_near(derivatives(product, f, mean), exact, 8 * HALF_A_STEP)


@needs_units
@pytest.mark.parametrize("size", [(6, 5, 8, 8), (4, 3, 7, 7), (2, 48, 12, 13)])
@pytest.mark.parametrize("groups", [1, 2])
def test_normalised_images_are_near_exact_ones_up_to_second_derivatives(size: tuple[int, ...], groups: int) -> None:
    x, bias = images(*size) * 2 + 3, torch.linspace(-0.5, 0.7, size[1])

    def block(x: Tensor, bias: Tensor) -> Tensor:
        out = kernels.norm_relu_pool(x, bias, 1e-3, groups)
        assert out.dtype == torch.bfloat16
        assert "NormReluPool" in str(out.grad_fn)
        return out

    def exact(x: Tensor, bias: Tensor) -> Tensor:
        return kernels.norm_relu_pool(x, bias, 1e-3, groups)

    assert_near(derivatives(block, x, bias), derivatives(exact, x.double(), bias.double()), 8 * HALF_A_STEP)


@needs_units
def test_the_number_of_threads_changes_nothing(monkeypatch: pytest.MonkeyPatch, algorithm: str) -> None:
    if algorithm == "direct":
        pytest.skip("this is PyTorch's; trainings give each task one thread")
    monkeypatch.setattr(calls, "LARGE", 0)
    monkeypatch.setattr("metadropout.ops.kernels.convolutions.TILES_PER_PART", 16)
    weight, bias, twin = numbers(16, 16, 3, 3), numbers(16), numbers(16, 16, 3, 3, seed=1)

    def block(x: Tensor, weight: Tensor, twin: Tensor, bias: Tensor) -> Tensor:
        noisy = kernels.noisy_product(
            to_bf16(x, weight, bias), to_bf16(x, twin, bias), kernels.Draws(((1, 2),), (7, 16, 9, 8))
        )
        return kernels.norm_relu_pool(noisy, bias, 1e-3)

    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(derivatives(block, images(7, 16, 9, 8), weight, twin, bias))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@needs_units
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_visible(bad: float, algorithm: str) -> None:
    x = images(2, 16, 6, 6)
    x[1, 0, 2, 3] = bad
    out = to_bf16(x, numbers(16, 16, 3, 3), numbers(16))
    assert not out[1, :, 2, 3].isfinite().any()
    assert out[0].isfinite().all()
    assert kernels.noisy_product(x, images(2, 16, 6, 6))[1, 0, 2, 3].isfinite().logical_not()
    assert kernels.norm_relu_pool(x, None, 1e-3)[:, 0].isnan().any()


@needs_units
def test_images_stay_in_bfloat16_from_the_first_layer_to_the_head() -> None:
    network = md.Conv4(way=3, channels=16)
    names = [f"blocks.{number}.conv" for number in range(4)]
    function = FunctionalNetwork(network, outputs=names, precision="bf16")
    seen: list[tuple[torch.dtype, torch.dtype]] = []

    def hook(name: str, h: Tensor, f: Tensor) -> Tensor:
        seen.append((h.dtype, f.dtype))
        return f

    x = make_episode(way=3, shot=1, query=1, size=28, dtype=torch.float32).query_x
    logits = function(dict(network.named_parameters()), x, hook)
    assert seen == [(torch.float32, torch.bfloat16), *[(torch.bfloat16, torch.bfloat16)] * 3]
    assert logits.dtype == torch.float32
    with kernels.disabled():
        plain = function(dict(network.named_parameters()), x)
    torch.testing.assert_close(logits, plain, rtol=0.05, atol=0.05 * plain.abs().max().item())
    how = Normalisation(collected={})
    function(dict(network.named_parameters()), x, normalisation=how)
    assert how.collected is not None
    assert all(statistics.mean.dtype == torch.float32 for statistics in how.collected.values())


@needs_units
def test_where_something_unknown_comes_next_images_are_float32_again() -> None:
    users = UsersModel()
    function = FunctionalNetwork(
        users, [n for n, m in users.named_modules() if isinstance(m, nn.Conv2d)], precision="bf16"
    )
    seen: list[torch.dtype] = []
    x = make_episode(way=3, shot=1, query=1, dtype=torch.float32).support_x
    function(dict(users.named_parameters()), x, lambda name, h, f: (seen.append(f.dtype), f)[1])
    assert seen
    assert set(seen) == {torch.float32}


@needs_units
@pytest.mark.parametrize(
    "perturbation", [md.NoPerturbation, md.MetaDropout, md.Additive, md.FixedGaussian, md.InformationDropout]
)
def test_every_kind_of_perturbation_trains_with_images_in_bfloat16(perturbation: type[md.Perturbation]) -> None:
    torch.manual_seed(0)
    network = md.Conv4(way=3, channels=16)
    learner = md.MAML(network, perturbation(network), steps=2, precision="bf16")
    episode = make_episode(way=3, shot=2, query=2, size=28, dtype=torch.float32)
    for source in (CounterNoise(0), SeededNoise(0)):
        gradients = learner.task_gradient(episode, generator=source).gradients
        assert all(g.dtype == torch.float32 and g.isfinite().all() for g in gradients.values())
    assert (
        learner.adapt(episode.support_x, episode.support_y, mc_samples=2, generator=SeededNoise(1))(episode.query_x)
        .isfinite()
        .all()
    )


@needs_units
def test_a_run_notes_that_it_stores_images_so_and_older_runs_go_on_as_they_were(tmp_path: Path) -> None:
    command = ["train", "glyphs-5way-1shot-maml", "--out", str(tmp_path / "run"), "--learner.precision", "bf16"]
    sizes = ["--network.channels", "16", "--episode.query", "2", "--training.meta_batch", "1"]
    assert main([*command, *sizes, "--training.iterations", "1"]) == 0
    assert (open_run(tmp_path / "run").config.training.convolutions or {})["images"] == "bfloat16"
    layer, x = nn.Conv2d(16, 16, 3, padding=1), images(2, 16, 6, 6).float()
    with kernels.using({}):  # as runs that began before have it
        assert kernels.convolution_to_bf16(x, layer.weight, layer.bias) is None
    with kernels.choosing() as noted:
        assert kernels.convolution_to_bf16(x, layer.weight, layer.bias) is not None
    assert noted.keys() == {"images", "16x16x6x6"}


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("METADROPOUT_FUSED", "the compiled kernels are off"),
        ("units", "has no AVX512-BF16"),
        ("older run", "began in a version that stored images in float32"),
    ],
)
def test_it_is_said_once_where_bfloat16_does_not_pay(
    name: str, told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if build.library() is None:
        pytest.skip("no C++ compiler")
    precision._warn_once.cache_clear()
    layer, x = nn.Conv2d(16, 16, 3, padding=1), images(2, 16, 6, 6).float()
    if name == "METADROPOUT_FUSED":
        monkeypatch.setenv(name, "0")
    else:
        monkeypatch.setattr(kernels, "has_bf16", lambda: name == "older run")
    with caplog.at_level(logging.WARNING), kernels.using({}):
        for _ in range(2):
            precision.in_bf16(lambda x, weight: F.conv2d(x, weight, padding=1), x, layer.weight, layer.bias)
    (record,) = caplog.records
    assert told in record.getMessage()
    assert "slower here than full" in record.getMessage()
    precision._warn_once.cache_clear()
