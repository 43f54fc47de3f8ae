"""Convolutions by Winograd's algorithm against PyTorch's: values, first and second derivatives, and when it is used."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from metadropout.networks.layers import apply_layer, is_plain_3x3
from metadropout.ops import kernels
from metadropout.ops.kernels import calls

pytestmark = pytest.mark.skipif(not kernels.available(), reason="no C++ compiler, or METADROPOUT_FUSED is 0")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, params=["winograd-2", "winograd-4"])
def algorithm(request: pytest.FixtureRequest) -> Iterator[str]:
    with kernels.using({"*": request.param}):
        yield request.param


def parts(
    n: int, in_channels: int, out_channels: int, height: int, width: int, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Images, weights and bias."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, in_channels, height, width, generator=generator).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(out_channels, in_channels, 3, 3, generator=generator)
    return x.requires_grad_(), weight.requires_grad_(), torch.randn(out_channels).requires_grad_()


def is_fused(output: Tensor) -> bool:
    assert output.grad_fn is not None
    return output.grad_fn.name() == "ConvolutionBackward"


def derivatives(x: Tensor, weight: Tensor, bias: Tensor | None, plain: bool = False) -> list[Tensor]:
    """The value, all gradients of a loss that bends, and the gradients of a function of value and gradients."""
    out = F.conv2d(x, weight, bias, padding=1) if plain else kernels.convolution(x, weight, bias)
    inputs = [t for t in (x, weight, bias) if t is not None and t.requires_grad]
    first = torch.autograd.grad((out**2 + out).mean(), inputs, create_graph=True)
    mixed = sum(((g**2).sum() for g in first), (out**3).mean())
    return [out, *first, *torch.autograd.grad(mixed, inputs)]


def exact(*tensors: Tensor | None) -> list[Tensor]:
    """The same in float64 by PyTorch."""
    return derivatives(
        *(None if t is None else t.detach().double().requires_grad_(t.requires_grad) for t in tensors), plain=True
    )  # type: ignore[arg-type]


def assert_close(actual: list[Tensor], expected: list[Tensor]) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert (a - e).norm() <= 3e-6 * e.norm()


@pytest.mark.parametrize(
    "size",
    [
        (3, 16, 32, 14, 14),
        (2, 64, 64, 7, 7),
        (5, 32, 16, 3, 3),
        (1, 16, 16, 5, 10),
        (4, 1, 64, 28, 28),
        (2, 3, 32, 9, 6),
    ],
)
@pytest.mark.parametrize("with_bias", [True, False])
def test_it_agrees_with_pytorch_up_to_second_derivatives(size: tuple[int, ...], with_bias: bool) -> None:
    x, weight, bias = parts(*size)
    given_bias = bias if with_bias else None
    assert is_fused(kernels.convolution(x, weight, given_bias))
    assert_close(derivatives(x, weight, given_bias), exact(x, weight, given_bias))


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 9),
    in_channels=st.sampled_from([1, 2, 3, 4, 16, 48]),
    out_channels=st.sampled_from([16, 32, 80]),
    height=st.integers(3, 13),
    width=st.integers(3, 13),
    seed=st.integers(0, 99),
)
def test_any_size_is_right(n: int, in_channels: int, out_channels: int, height: int, width: int, seed: int) -> None:
    x, weight, bias = parts(n, in_channels, out_channels, height, width, seed)
    assert_close(derivatives(x, weight, bias), exact(x, weight, bias))


def test_it_is_about_as_exact_as_pytorchs_own_in_float32() -> None:
    # How exact PyTorch's own is depends on the CPU: with wider vectors it adds up fewer numbers in a row.
    tensors = parts(40, 64, 64, 14, 14)
    reference = exact(*tensors)
    for a, b, e in zip(derivatives(*tensors), derivatives(*tensors, plain=True), reference, strict=True):
        assert (a - e).norm() <= 3 * (b - e).norm() + 1e-7 * e.norm()


@pytest.mark.parametrize("wanted", ["x", "weight", "bias"])
def test_a_single_gradient_can_be_asked_for(wanted: str) -> None:
    tensors = dict(zip(("x", "weight", "bias"), parts(2, 16, 16, 6, 6), strict=True))
    only = {name: t.detach().requires_grad_(name == wanted) for name, t in tensors.items()}
    assert_close(derivatives(*only.values()), exact(*only.values()))


def test_the_gradient_of_the_input_alone_can_be_differentiated_in_the_weights() -> None:
    x, weight, bias = parts(2, 16, 16, 6, 6)

    def mixed(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        (g,) = torch.autograd.grad(kernels.convolution(x, weight, bias).square().sum(), x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), weight)[0]

    expected = mixed(*(t.detach().double().requires_grad_() for t in (x, weight, bias)))  # float64 is PyTorch's
    assert_close([mixed(x, weight, bias)], [expected])


def test_the_number_of_threads_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "LARGE", 0)
    monkeypatch.setattr("metadropout.ops.kernels.convolutions.TILES_PER_PART", 16)
    for channels in (1, 16):
        tensors = parts(7, channels, 16, 9, 8)
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(derivatives(*tensors))
        assert_close(results[0], exact(*tensors))
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("channels", [1, 16])
def test_what_is_not_finite_stays_visible(bad: float, channels: int) -> None:
    x, weight, bias = parts(2, channels, 16, 6, 6)
    x = x.detach()
    x[1, 0, 2, 3] = bad
    out = kernels.convolution(x, weight, bias)
    assert out[0].isfinite().all()
    assert not out[1].isfinite().all()
    assert not torch.autograd.grad(out.sum(), weight)[0].isfinite().all()


def test_layouts_of_weights_and_gradients_do_not_matter() -> None:
    x, weight, bias = parts(2, 16, 32, 6, 6)
    back = torch.randn(2, 32, 6, 6)
    actual = torch.autograd.grad(kernels.convolution(x, weight, bias), [x, weight], back)
    last = weight.detach().to(memory_format=torch.channels_last).requires_grad_()
    same = torch.autograd.grad(
        kernels.convolution(x, last, bias), [x, last], back.to(memory_format=torch.channels_last)
    )
    assert all(torch.equal(a, b) for a, b in zip(actual, same, strict=True))


def test_third_derivatives_are_refused() -> None:
    x, weight, bias = parts(1, 16, 16, 4, 4)
    (first,) = torch.autograd.grad(kernels.convolution(x, weight, bias).square().sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="not three times"):
        torch.autograd.grad(first.square().sum(), weight, create_graph=True)


def test_other_sizes_types_and_layouts_are_pytorchs() -> None:
    x, weight, bias = parts(2, 16, 16, 6, 6)
    assert is_fused(kernels.convolution(x, weight, bias))
    assert not is_fused(kernels.convolution(x.detach().contiguous(), weight, bias))
    assert not is_fused(kernels.convolution(x.double(), weight.double(), bias.double()))
    assert not is_fused(kernels.convolution(x[:, :, :2], weight, bias))
    assert not is_fused(kernels.convolution(*parts(2, 16, 24, 6, 6)))
    assert not is_fused(kernels.convolution(*parts(2, 8, 16, 6, 6)))
    with kernels.using({"16x16x6x6": "direct"}):
        assert not is_fused(kernels.convolution(x, weight, bias))
    with kernels.disabled():
        assert not is_fused(kernels.convolution(x, weight, bias))


@pytest.mark.parametrize("channels", [1, 3])
def test_images_of_few_channels_need_no_gradient(channels: int) -> None:
    x, weight, bias = parts(4, channels, 32, 9, 6)
    x.requires_grad_(False)
    assert is_fused(kernels.convolution(x, weight, bias))
    assert_close(derivatives(x, weight, bias), exact(x, weight, bias))


@pytest.mark.parametrize(
    ("options", "plain"),
    [
        ({"padding": 1}, True),
        ({"padding": "same"}, True),
        ({"padding": 0}, False),
        ({"padding": 1, "stride": 2}, False),
        ({"padding": 1, "dilation": 2}, False),
        ({"padding": 1, "groups": 2}, False),
        ({"padding": 1, "padding_mode": "reflect"}, False),
    ],
)
def test_only_plain_convolutions_take_this_way(options: dict[str, object], plain: bool) -> None:
    layer = nn.Conv2d(16, 16, 3, **options)  # type: ignore[arg-type]
    assert is_plain_3x3(layer) == plain
    x = torch.randn(2, 16, 8, 8).contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(apply_layer(layer, x, layer.weight, layer.bias), layer(x), rtol=1e-4, atol=1e-5)


def test_a_convolution_of_a_class_of_its_own_is_left_alone() -> None:
    class Scaled(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    assert not is_plain_3x3(Scaled(16, 16, 3, padding=1))
