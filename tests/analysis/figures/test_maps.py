"""Multipliers, activations and reconstructions show what they say, on grey and coloured images of any size."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from toys import randomise

import metadropout as md
from metadropout.analysis.figures import (
    DecoderOptions,
    FigureError,
    activation_samples,
    draw_activations,
    draw_frames,
    draw_multipliers,
    draw_reconstructions,
    multiplier_maps,
    reconstructions,
    save_gif,
    save_png,
)
from metadropout.analysis.figures.decoder import Decoder, train_decoder
from metadropout.data import open_dataset
from metadropout.perturbations import PERTURBATIONS
from metadropout.training.checkpoints import tensors_digest

SMALL = DecoderOptions(channels=4, iterations=3, batch=8)


def make_learner(perturbation: str = "metadropout", in_channels: int = 1, size: int = 28) -> md.MAML:
    torch.manual_seed(0)
    network = md.Conv4(way=3, in_channels=in_channels, image_size=size, channels=4)
    noise = PERTURBATIONS[perturbation](network)
    randomise(noise)
    return md.MAML(network, noise, steps=1)


@pytest.mark.parametrize(("in_channels", "size"), [(1, 28), (3, 32)])
def test_multipliers_are_what_the_twin_gives_for_the_channels_that_vary_most(in_channels: int, size: int) -> None:
    learner = make_learner(in_channels=in_channels, size=size)
    images = torch.rand(5, in_channels, size, size)
    data = multiplier_maps("it", learner, images, shown=2, channels=3)
    assert data.images.shape == ((2, size, size) if in_channels == 1 else (2, size, size, 3))
    first = data.layers[0]
    twin = learner.perturbation.generators["blocks/0/conv"]  # type: ignore[index]
    expected = torch.nn.functional.softplus(twin(images))[:2].detach()
    varies = expected.transpose(0, 1).flatten(1).std(dim=1)
    assert first.channels == tuple(varies.argsort(descending=True)[:3].tolist())
    np.testing.assert_allclose(first.maps, expected[:, list(first.channels)].transpose(0, 1).numpy(), rtol=1e-5)
    assert [maps.layer for maps in data.layers] == [1, 2, 3, 4]
    figure = draw_multipliers(data)
    assert f"layer 1 {first.low:.2f} to {first.high:.2f}" in data.caption
    assert len(figure.axes) == (1 + 12) * 2 + 4  # images and maps, and a scale for each layer


@pytest.mark.parametrize("perturbation", ["none", "additive", "weight-gaussian", "mixup"])
def test_multipliers_do_not_apply_where_nothing_is_multiplied(perturbation: str) -> None:
    with pytest.raises(FigureError, match="multiplies nothing on query images"):
        multiplier_maps("it", make_learner(perturbation), torch.rand(3, 1, 28, 28))


def test_activations_vary_with_the_noise_and_their_deterministic_part_does_not() -> None:
    learner, images = make_learner(), torch.rand(3, 1, 28, 28)
    data, other = (activation_samples("it", learner, images, samples=5, channels=2, seed=seed) for seed in (0, 1))
    for layer, of_other_seed, size in zip(data.layers, other.layers, (28, 14), strict=True):
        assert layer.deterministic.shape == (2, size, size)
        assert layer.sampled.shape == (5, 2, size, size)
        np.testing.assert_array_equal(layer.deterministic, of_other_seed.deterministic)
        assert not np.array_equal(layer.sampled, of_other_seed.sampled)
        np.testing.assert_allclose(layer.spread, layer.sampled.std(axis=0))
        assert layer.spread.max() > 0
    draw_activations(data, samples=2)
    assert "standard deviation over 5 samples" in data.caption


def test_the_animation_has_a_frame_per_sample_that_differs_from_the_one_before(tmp_path: Path) -> None:
    data = activation_samples("it", make_learner(), torch.rand(3, 1, 28, 28), samples=4, channels=2)
    save_gif(draw_frames(data, frames=3), tmp_path / "it.gif")
    with Image.open(tmp_path / "it.gif") as animation:
        frames = []
        for number in range(animation.n_frames):
            animation.seek(number)
            frames.append(np.asarray(animation.convert("RGB")))
    assert len(frames) == 3
    assert not np.array_equal(frames[0], frames[1])


@pytest.mark.parametrize("perturbation", ["none", "deterministic", "mixup"])
def test_activations_and_reconstructions_do_not_apply_without_noise_on_features(
    perturbation: str, tmp_path: Path
) -> None:
    learner = make_learner(perturbation)
    with pytest.raises(FigureError, match=f"{type(learner.perturbation).__name__} draws none"):
        activation_samples("it", learner, torch.rand(3, 1, 28, 28))
    glyphs = open_dataset("glyphs", train_classes=3, validation_classes=1, test_classes=3)
    with pytest.raises(FigureError, match="reconstructions show noise on features"):
        reconstructions("it", learner, glyphs.train, glyphs.test, cache=tmp_path / "d", state="")


def test_a_decoder_learns_to_give_images_back() -> None:
    images = torch.rand(16, 3, 6, 7).round()

    def error(iterations: int) -> float:
        options = DecoderOptions(channels=8, iterations=iterations, lr=1e-2)
        decoder = train_decoder(lambda _: images, lambda x: x, options)
        return float((decoder.images(images) - images).abs().mean())

    assert error(200) < 0.1 < error(1)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (3, 21, 17)])
def test_a_decoder_gives_images_of_any_size(shape: tuple[int, int, int]) -> None:
    assert Decoder(5, shape, 4).images(torch.rand(2, 5)).shape == (2, *shape)


def test_reconstructions_keep_their_decoder_for_the_same_state_and_options_only(tmp_path: Path) -> None:
    glyphs = open_dataset("glyphs", train_classes=6, validation_classes=1, test_classes=6)
    learner, steps = make_learner(), []

    def make(state: str = "a", iterations: int = 3) -> md.figures.ReconstructionData:
        options = DecoderOptions(channels=4, iterations=iterations, batch=8)
        steps.clear()
        return reconstructions(
            "it", learner, glyphs.train, glyphs.test, cache=tmp_path / "decoder.safetensors", state=state,
            options=options, shown=3, samples=2, on_step=lambda: steps.append(1),
        )  # fmt: skip

    data = make()
    assert len(steps) == 3
    assert data.images.shape == data.clean.shape == (3, 28, 28)
    assert data.perturbed.shape == (2, 3, 28, 28)
    assert not np.array_equal(data.perturbed[0], data.perturbed[1])
    assert "Root mean square error per pixel" in data.caption
    save_png(draw_reconstructions(data, samples=1), tmp_path / "it.png")
    again = make()
    assert not steps  # read, not trained
    np.testing.assert_array_equal(again.perturbed, data.perturbed)
    make(state="b")
    assert len(steps) == 3
    make(iterations=4, state="b")
    assert len(steps) == 4
    whole = (tmp_path / "decoder.safetensors").read_bytes()
    for damaged in (b"cut short", whole[:-1] + bytes([whole[-1] ^ 1])):
        (tmp_path / "decoder.safetensors").write_bytes(damaged)
        make(iterations=4, state="b")
        assert len(steps) == 4
    make(iterations=4, state="b")
    assert not steps
    tensors = {**safetensors.torch.load(whole), "first.bias": torch.zeros(3)}
    with safetensors.safe_open(tmp_path / "decoder.safetensors", framework="pt") as file:
        said = {name: text for name, text in file.metadata().items() if name != "sha256"}
    forged = safetensors.torch.save(tensors, {**said, "sha256": tensors_digest(tensors, said)})
    (tmp_path / "decoder.safetensors").write_bytes(forged)
    make(iterations=4, state="b")
    assert len(steps) == 4  # a correct checksum, but not this decoder's tensors


def test_reconstructions_of_a_layer_that_is_not_there_are_refused(tmp_path: Path) -> None:
    glyphs = open_dataset("glyphs", train_classes=3, validation_classes=1, test_classes=3)
    options = DecoderOptions(layer=5)
    with pytest.raises(FigureError, match="there is no layer 5: this network has 4 hidden ones"):
        reconstructions(
            "it", make_learner(), glyphs.train, glyphs.test, cache=tmp_path / "d", state="", options=options
        )


def test_a_png_is_a_picture(tmp_path: Path) -> None:
    data = multiplier_maps("it", make_learner(), torch.rand(3, 1, 28, 28), channels=1)
    save_png(draw_multipliers(data), tmp_path / "it.png")
    with Image.open(io.BytesIO((tmp_path / "it.png").read_bytes())) as picture:
        assert picture.format == "PNG"
        assert picture.width > 200
