"""A small decoder from features to images, for seeing at input level what noise does to features."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metadropout.files import check_regular, write_atomically
from metadropout.noise import mix_seed
from metadropout.training.checkpoints import MAX_BYTES, tensors_digest


@dataclass(frozen=True)
class DecoderOptions:
    """How a decoder is made and trained; kept with the figure's data.

    Args:
        layer: whose features it decodes, counted from 1.
        channels: its width.
        iterations: training steps.
        batch: images in a step, normalised together.
        lr: Adam's learning rate.
        seed: of its initial values and of the images it sees.
    """

    layer: int = 3
    channels: int = 32
    iterations: int = 1000
    batch: int = 64
    lr: float = 1e-3
    seed: int = 0


class Decoder(nn.Module):
    """One linear layer to a quarter of the image's size, then two transposed convolutions.

    Args:
        features: numbers per image.
        image_shape: channels, height and width of the images.
        channels: its width.
    """

    def __init__(self, features: int, image_shape: tuple[int, int, int], channels: int) -> None:
        super().__init__()
        colours, self.height, self.width = image_shape
        self.start = (channels, -(-self.height // 4), -(-self.width // 4))  # rounded up; the surplus is cut off
        self.spread = nn.Linear(features, self.start[0] * self.start[1] * self.start[2])
        self.first = nn.ConvTranspose2d(channels, channels, kernel_size=4, stride=2, padding=1)
        self.second = nn.ConvTranspose2d(channels, colours, kernel_size=4, stride=2, padding=1)

    def forward(self, features: Tensor) -> Tensor:
        """Turn features (n, ...) into the logits of pixels, shape (n, colours, height, width)."""
        x = F.relu(self.spread(features.flatten(1))).view(-1, *self.start)
        x = self.second(F.relu(self.first(x)))  # a little larger than the image where its size is not a multiple of 4
        return x[..., : self.height, : self.width]  # type: ignore[no-any-return]

    @torch.no_grad()
    def images(self, features: Tensor) -> Tensor:
        """Turn features into images in [0, 1]."""
        return torch.sigmoid(self(features))


def train_decoder(
    batches: Callable[[int], Tensor],
    features_of: Callable[[Tensor], Tensor],
    options: DecoderOptions,
    on_step: Callable[[], None] = lambda: None,
) -> Decoder:
    """Train a decoder to give images back from their features.

    Args:
        batches: the images of a step, by its number.
        features_of: clean features of a batch of images.
        options: how.
        on_step: called after each step, for showing progress.
    """
    example = batches(0)
    decoder = _build(features_of(example), example, options)
    optimizer = torch.optim.Adam(decoder.parameters(), lr=options.lr)
    for step in range(options.iterations):
        images = batches(step)
        loss = F.binary_cross_entropy_with_logits(decoder(features_of(images)), images)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        on_step()
    return decoder


def cached_decoder(
    path: Path,
    state: str,
    batches: Callable[[int], Tensor],
    features_of: Callable[[Tensor], Tensor],
    options: DecoderOptions,
    on_step: Callable[[], None] = lambda: None,
) -> Decoder:
    """Read a decoder of the same options and network state from a file, or train one and write it there.

    Args:
        path: the file.
        state: what tells the state of the network apart from others, such as its checkpoint's checksum.
        batches: as for `train_decoder`.
        features_of: likewise.
        options: likewise.
        on_step: likewise; not called if the decoder is read.
    """
    made_from = {"made_from": json.dumps({"state": state, **asdict(options)}, sort_keys=True)}
    stored = _read(path, made_from)
    if stored is not None:
        example = batches(0)
        decoder = _build(features_of(example), example, options)
        if _fits(stored, decoder.state_dict()):
            decoder.load_state_dict(stored)
            return decoder
    decoder = train_decoder(batches, features_of, options, on_step)
    tensors = {name: value.cpu().contiguous() for name, value in decoder.state_dict().items()}
    write_atomically(path, safetensors.torch.save(tensors, {**made_from, "sha256": tensors_digest(tensors, made_from)}))
    return decoder


def _build(features: Tensor, images: Tensor, options: DecoderOptions) -> Decoder:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(mix_seed(options.seed))
        _, colours, height, width = images.shape
        decoder = Decoder(features[0].numel(), (colours, height, width), options.channels)
    return decoder.to(features)


def _read(path: Path, made_from: dict[str, str]) -> dict[str, Tensor] | None:
    """Return the tensors of a decoder, None where there is none of that kind."""
    try:
        check_regular(path, MAX_BYTES)
        with safetensors.safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            whole = file.metadata() == {**made_from, "sha256": tensors_digest(tensors, made_from)}
            return tensors if whole else None
    except (OSError, safetensors.SafetensorError, ValueError):
        return None  # not there, or damaged: it is trained again


def _fits(stored: dict[str, Tensor], own: dict[str, Tensor]) -> bool:
    """Say whether tensors are those of a decoder: a file with a correct checksum can still hold something else."""
    return stored.keys() == own.keys() and all(
        value.shape == own[name].shape and value.dtype == own[name].dtype and bool(value.isfinite().all())
        for name, value in stored.items()
    )
