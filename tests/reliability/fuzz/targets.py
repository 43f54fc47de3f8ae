"""The readers: of a run's folder, of data sets, and of what the program keeps for itself."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import os
import pickle
import random
import shutil
import stat
import struct
import tarfile
import warnings
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import safetensors.torch
import torch
import yaml
from PIL import Image
from reliability.fuzz.mutations import NUMBERS, ODD, TEXTS, spoil_bytes, spoil_json, spoil_tree
from reliability.fuzz.trying import Target, fresh

import metadropout as md
from metadropout.analysis.figures.decoder import DecoderOptions, cached_decoder
from metadropout.analysis.figures.noise import noise_over_training
from metadropout.analysis.plots import plot_curves
from metadropout.analysis.report import Report, read_figures, read_runs, render
from metadropout.cli.overrides import split_overrides
from metadropout.config import TrainingOptions, build_learner, load_config, parse_config
from metadropout.data import Identity, cache, cifar, miniimagenet, saved_episodes
from metadropout.data.archives import open_tree, paths_in
from metadropout.data.decode import SUFFIXES, open_image, to_array
from metadropout.data.images import ImageShape
from metadropout.data.inspection import check, state_of
from metadropout.data.safe_pickle import load_pickle
from metadropout.data.sources import Source
from metadropout.data.trees import UnreadableError
from metadropout.errors import MetadropoutError
from metadropout.evaluation import evaluate
from metadropout.recipes import recipe, recipe_names
from metadropout.robustness.curves import open_attacks, read_attacks
from metadropout.runs.folder import add_start, open_run
from metadropout.runs.results import measured_before, read_result, write_result
from metadropout.training.checkpoints import Progress, load_checkpoint, save_checkpoint, tensors_digest
from metadropout.training.metrics import MetricsLog, load_metrics, newest_iteration
from metadropout.training.outer import OuterOptimizer
from metadropout.weights import load_weights, save_weights
from metadropout.weights.card import describe

SHAPE = ImageShape(3, 8, 8)


def as_bytes(text: str) -> bytes:
    """Encode a text that may have lone surrogates."""
    return text.encode(errors="surrogatepass")


def as_json(content: bytes) -> Any:
    """Read JSON, None where it is none."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


class RunFile(Target):
    """A file of a run's folder."""

    file: str

    def __init__(self, shared: Path, place: Path) -> None:
        super().__init__(shared, place)
        self.folder = place / "run"
        shutil.copytree(shared / "run", self.folder)
        self.path = self.folder / self.file
        self.seeds.append(self.path.read_bytes())
        if "figures" not in self.file:
            shutil.rmtree(self.folder / "figures")
        self.run = open_run(self.folder)
        self.accepted = 0

    def spoil(self, rng: random.Random, seed: bytes) -> bytes:
        tree = as_json(seed)
        if tree is None or rng.random() < 0.3:
            return spoil_bytes(rng, seed, self.seeds)
        return as_bytes(spoil_json(rng, tree))

    def read(self, content: bytes) -> bool:
        self.path.write_bytes(content)
        accepted = self.use()
        self.accepted += accepted
        if accepted and self.accepted % 5 == 0:
            self.report()
        return accepted

    def use(self) -> bool:
        """Read the file and work with what it holds; return whether it is whole."""
        raise NotImplementedError

    def report(self) -> None:
        """Put the run on a page."""
        render(Report(read_runs([self.folder]), [], "", datetime.now(UTC)))


class Configurations(RunFile):
    """Recipes and `config.yaml`."""

    file = "config.yaml"
    words = (
        *(  # noqa: SIM905 - sixty words read better in rows
            "&a *a !!python/object/apply:os.system !!timestamp !!binary ? : - { } [ ] , ' \" | > %YAML --- ... # <<: "
            "*a 2020-02-30 2020-01-01 .inf .nan 0x1f 0b1 0o7 1_0 12:30:45 ~ null yes \ufeff a: \\ud800 \\x00 name: "
            "learner: data: training: convolutions: parts: {name:"
        ).split(),
        "\t",
        "\n",
        "\r",
        "\u2028",
        "\x85",
        "\n- ",
        "\n  ",
    )

    def __init__(self, shared: Path, place: Path) -> None:
        super().__init__(shared, place)
        names = recipe_names()
        chosen = names[:: max(1, len(names) // 40)]
        self.seeds += [as_bytes(yaml.safe_dump(recipe(name), sort_keys=False)) for name in chosen]
        self.seeds += [
            b"a: &a [x, x, x]\nb: &b [*a, *a, *a]\nc: [*b, *b]\n",
            b"data: {name: folder, train_classes: [a, b], test_classes: [c]}\n",
            b"perturbation: {name: combined, parts: [{name: metadropout}, {name: mixup, gamma: 1.0}]}\n",
        ]

    def spoil(self, rng: random.Random, seed: bytes) -> bytes:
        if rng.random() < 0.5:
            return spoil_bytes(rng, seed, self.seeds, [as_bytes(word) for word in self.words])
        try:
            tree = yaml.load(seed, Loader=yaml.CSafeLoader if hasattr(yaml, "CSafeLoader") else yaml.SafeLoader)
            spoilt = spoil_tree(rng, tree)
            return as_bytes(yaml.safe_dump(spoilt, sort_keys=False, allow_unicode=rng.random() < 0.5))
        except (yaml.YAMLError, ValueError, TypeError, RecursionError, AttributeError, OverflowError):
            return spoil_bytes(rng, seed, self.seeds)

    def use(self) -> bool:
        text = self.path.read_bytes()[:2000].decode(errors="replace")
        if text[:1] in "[{":
            split_overrides(["--data.train_classes", text])
        config = load_config(self.path)
        again = parse_config(json.loads(json.dumps(config.to_dict())))
        assert again == config, "a configuration is another one when it is read again"
        yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True).encode()
        return True


class Checkpoints(Target):
    """Checkpoints: mostly with a correct checksum, and wrong contents."""

    run: ClassVar[dict[str, Any]] = {"seed": 0, "learner.name": "maml", "network.channels": 4}
    dtypes = (torch.int64, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.bool, torch.float8_e5m2)

    def __init__(self, shared: Path, place: Path) -> None:
        super().__init__(shared, place)
        torch.manual_seed(0)
        network = md.Conv4(way=3, in_channels=1, image_size=16, channels=4)
        self.learner = md.MetaSGD(network, md.MetaDropout(network))
        self.outer = OuterOptimizer(self.learner.named_parameters(), TrainingOptions(iterations=10))
        images = md.ArrayImages(np.random.default_rng(0).random((24, 1, 16, 16)), np.arange(24) % 6)
        self.sampler = md.EpisodeSampler(images, way=3, shot=1, query=1, seed=0)
        self.path = place / "iteration-00000001.safetensors"
        self.step()
        for optimizer in (self.outer.optimizer, None):
            save_checkpoint(self.path, self.learner, optimizer, Progress(1, 1.0, 0.5, 1), self.run)
            self.seeds.append(self.path.read_bytes())

    def step(self) -> None:
        self.outer.step([torch.full_like(p, 1e-3) for p in self.outer.parameters], 1)

    def spoil(self, rng: random.Random, seed: bytes) -> bytes:
        try:
            (length,) = struct.unpack("<Q", seed[:8])
            metadata = json.loads(seed[8 : 8 + length])["__metadata__"]
            tensors = safetensors.torch.load(seed)
        except Exception:
            return spoil_bytes(rng, seed, self.seeds)
        if rng.random() < 0.15:
            return spoil_bytes(rng, seed, self.seeds)
        for _ in range(rng.choice((1, 1, 2, 5))):
            self.spoil_part(rng, tensors, metadata)
        try:
            if rng.random() < 0.97:
                said = {key: value for key, value in metadata.items() if key != "sha256"}
                metadata["sha256"] = tensors_digest(tensors, said)
            return safetensors.torch.save(tensors, metadata)
        except Exception:  # what cannot be written as such a file
            return spoil_bytes(rng, seed, self.seeds)

    def spoil_part(self, rng: random.Random, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
        what = rng.randrange(8)
        name = rng.choice(sorted(tensors)) if tensors else ""
        if what == 0 or not name:
            key = rng.choice(sorted(metadata))
            tree = as_json(as_bytes(metadata[key]))
            metadata[key] = rng.choice(TEXTS) if tree is None else spoil_json(rng, tree)
            metadata[key] = metadata[key].encode(errors="replace").decode()
        elif what == 1:
            del tensors[name]
        elif what == 2:
            tensors[rng.choice((f"{name}x", name.replace("optimizer", "learner"), "optimizer.step", "\0"))] = tensors[
                name
            ]
        elif what == 3:
            tensors[name] = tensors[name].to(rng.choice(self.dtypes))
        elif what == 4:
            shape = rng.choice(([], [0], [1], [2, 3], [0, 2**40], [1] * 20))
            tensors[name] = torch.ones(shape, dtype=tensors[name].dtype)
        elif what == 5:
            value = rng.choice((float("nan"), float("inf"), 3e38, -3e38, 1e-45, -1.0, 0.0))
            if tensors[name].dtype.is_floating_point and tensors[name].numel():
                changed = tensors[name].clone()
                changed.view(-1)[rng.randrange(changed.numel())] = value
                tensors[name] = changed
        elif what == 6:
            tensors[name] = torch.full_like(tensors[name], rng.choice((0, 1, 3, 100)))
        else:
            other = rng.choice(sorted(tensors))
            tensors[name], tensors[other] = tensors[other], tensors[name]

    def read(self, content: bytes) -> bool:
        self.path.write_bytes(content)
        progress = load_checkpoint(self.path, self.learner, self.outer.optimizer, self.run)
        self.step()
        save_checkpoint(self.path, self.learner, self.outer.optimizer, progress, self.run)
        evaluate(self.learner, self.sampler, episodes=1, mc_samples=1, seed=0).checked()
        return True


class WeightSets(Checkpoints):
    """Sets of weights that `metadropout export` writes."""

    def __init__(self, shared: Path, place: Path) -> None:
        Target.__init__(self, shared, place)
        config = open_run(shared / "run").config
        learner, self.path = build_learner(config, ImageShape(1, 28, 28)), place / "set.safetensors"
        card = describe("set", config, iterations=3, parameters=1, version="0")
        save_weights(self.path, learner, config, ImageShape(1, 28, 28), card)
        self.seeds.append(self.path.read_bytes())

    def read(self, content: bytes) -> bool:
        self.path.write_bytes(content)
        weights = load_weights(self.path)
        assert weights.summary
        assert weights.card.to_markdown()
        assert all(value.isfinite().all() for value in weights.learner().state_dict().values())
        return True


class Manifests(Target):
    """Manifests of prepared data sets, mostly with a correct checksum."""

    def __init__(self, shared: Path, place: Path) -> None:
        super().__init__(shared, place)
        shutil.copytree(shared / "birds", place / "birds")
        self.open()
        (self.path,) = Path(os.environ["METADROPOUT_CACHE"]).glob("folder-birds*.json")
        self.seeds.append(self.path.read_bytes())

    def open(self) -> md.Splits:
        return md.open_dataset("folder", directory=str(self.place / "birds"), image_size=8)

    def spoil(self, rng: random.Random, seed: bytes) -> bytes:
        tree = as_json(seed)
        if not isinstance(tree, dict) or rng.random() < 0.15:
            return spoil_bytes(rng, seed, self.seeds)
        text = spoil_json(rng, tree)
        spoilt = as_json(as_bytes(text))
        if isinstance(spoilt, dict):
            spoilt.pop("sha256", None)
            text = json.dumps({**spoilt, "sha256": cache._checksum(spoilt)})
        return as_bytes(text)

    def read(self, content: bytes) -> bool:
        self.path.write_bytes(content)
        state_of("folder")
        splits = self.open()
        used = self.path.read_bytes() == content
        md.EpisodeSampler(splits.train, way=2, shot=1, query=1, seed=0)(0, 0)
        assert splits.identity
        check(splits)
        return used


class Metrics(RunFile):
    """`metrics.jsonl`."""

    file = "metrics.jsonl"
    uses = 0

    def spoil(self, rng: random.Random, seed: bytes) -> bytes:
        lines = seed.split(b"\n")
        at = rng.randrange(len(lines))
        tree = as_json(lines[at])
        if tree is None or rng.random() < 0.2:
            return spoil_bytes(rng, seed, self.seeds)
        lines[at] = as_bytes(spoil_json(rng, tree))
        if rng.random() < 0.1:
            lines *= 30
        return b"\n".join(lines)

    def use(self) -> bool:
        metrics = load_metrics(self.path)
        newest_iteration(self.path)
        assert metrics.training is not None
        assert metrics.validation is not None
        if any(line["kind"] == "noise" for line in metrics.lines):
            data = noise_over_training({"run": metrics.lines})
            assert data.caption
        self.uses += 1
        if self.uses % 100 == 1:  # slow
            with MetricsLog(self.folder, 10) as log:
                log.add_training(11, 1.0, 0.5, 2, 3.0)
                log.flush()
            shutil.rmtree(self.folder / "events", ignore_errors=True)
            plot_curves(self.run)
        for kept in self.folder.glob("metrics.jsonl.damaged*"):
            kept.unlink()
        return not metrics.damaged


class EpisodeLists(Target):
    """Lists of episodes, mostly with a correct checksum."""

    def __init__(self, shared: Path, place: Path) -> None:
        super().__init__(shared, place)
        self.images = md.ArrayImages(np.random.default_rng(0).random((24, 1, 4, 4)), np.arange(24) % 6)
        self.path = place / "list.json"
        sampler = md.EpisodeSampler(self.images, way=3, shot=1, query=2, seed=0)
        saved_episodes.save_episodes(self.path, sampler, 4)
        self.seeds.append(self.path.read_bytes())

    def spoil(self, rng: random.Random, seed: bytes) -> bytes:
        tree = as_json(seed)
        if not isinstance(tree, dict) or rng.random() < 0.15:
            return spoil_bytes(rng, seed, self.seeds)
        text = spoil_json(rng, tree)
        spoilt = as_json(as_bytes(text))
        if isinstance(spoilt, dict):
            spoilt.pop("checksum", None)
            if rng.random() < 0.9:
                spoilt["images"] = self.images.checksum()
            text = json.dumps({**spoilt, "checksum": saved_episodes._checksum(spoilt)})
        return as_bytes(text)

    def read(self, content: bytes) -> bool:
        self.path.write_bytes(content)
        listed = saved_episodes.load_episodes(self.path, self.images)
        for task in range(len(listed)):
            episode = listed(0, task)
            assert episode.support_x.shape[0] == listed.way * listed.shot
        return True


class Evaluations(RunFile):
    """`evaluation-*.json`."""

    file = "evaluation-test-2samples.json"

    def use(self) -> bool:
        result = read_result(self.path)
        assert str(result.result)
        usual = result.usual(self.run)
        assert result.file_name(usual)
        assert result.command_options(self.run)
        assert result.completed(self.run).tasks
        measured_before(self.path, result)
        other = dataclasses.replace(result, weights="another")
        for path in (self.path, self.path):
            write_result(path, other)
        for kept in self.folder.glob("evaluation-*-iteration-*"):
            kept.unlink()
        return True


class Attacks(RunFile):
    """`attack-*.json`."""

    file = "attack-run.json"

    def use(self) -> bool:
        attacks = read_attacks(self.path)
        attacks.unfinished()
        open_attacks(self.path, "run", attacks.measured).write(self.path)
        return True


class FigureIndexes(RunFile):
    """`figures/figures.json`."""

    file = "figures/figures.json"

    def use(self) -> bool:
        read_figures(self.path.parent, self.folder)
        return True


class Identities(RunFile):
    """`data.json`."""

    file = "data.json"
    now = Identity({"train": ["a", "b"], "validation": [], "test": ["c"]}, "0")

    def use(self) -> bool:
        identity = self.run.identity()
        assert identity is not None
        for judge in (self.run.check_data, lambda now: self.run.check_tested_data(self.run.config, now, "test")):
            with suppress(MetadropoutError):
                judge(self.now)
        return True


class Environments(RunFile):
    """`environment.json`."""

    file = "environment.json"

    def use(self) -> bool:
        read_runs([self.folder])
        add_start(self.folder, processes=1, threads=1)
        kept = list(self.folder.glob("environment.json.damaged*"))
        for path in kept:
            path.unlink()
        return not kept


class Archives(Target):
    """Zip and tar archives of images."""

    suffixes = (".zip", ".tar", ".tar.gz")

    def __init__(self, shared: Path, place: Path) -> None:
        super().__init__(shared, place)
        self.members = {
            str(path.relative_to(shared / "birds")): path.read_bytes() for path in (shared / "birds").rglob("*.png")
        }
        rng = random.Random(0)
        self.seeds = [self.pack(rng, suffix, self.members) for suffix in self.suffixes]
        self.tries = 0

    def pack(self, rng: random.Random, suffix: str, members: dict[str, bytes], odd: bool = False) -> bytes:
        content = io.BytesIO()
        if suffix == ".zip":
            with warnings.catch_warnings(), zipfile.ZipFile(content, "w") as archive:
                warnings.simplefilter("ignore")
                for name, data in members.items():
                    info = zipfile.ZipInfo(name, (1980 + rng.randrange(20), 1, 1, 0, 0, 0))
                    info.compress_type = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA))
                    if odd and rng.random() < 0.1:
                        info.external_attr = rng.choice((stat.S_IFLNK, stat.S_IFIFO, stat.S_IFDIR, 0xFFFF)) << 16
                    archive.writestr(info, data)
            return content.getvalue()
        with tarfile.open(
            fileobj=content, mode="w", format=rng.choice((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT))
        ) as tar:
            for name, data in members.items():
                member = tarfile.TarInfo(name)
                member.size = len(data)
                if odd and rng.random() < 0.1:
                    member.type = rng.choice(
                        (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, b"S")
                    )
                    member.linkname = rng.choice(("/etc/passwd", "../x", name))
                if odd and rng.random() < 0.1:
                    member.pax_headers = {"size": str(rng.choice(NUMBERS)), "path": rng.choice(("a/b.png", "../x"))}
                tar.addfile(member, io.BytesIO(data))
        return gzip.compress(content.getvalue(), 1) if suffix == ".tar.gz" else content.getvalue()

    def spoil(self, rng: random.Random, seed: bytes) -> bytes:
        what = rng.random()
        if what < 0.35:
            members = dict(rng.sample(sorted(self.members.items()), rng.randrange(1, len(self.members))))
            for name in rng.sample(sorted(members), min(2, len(members))):
                text = rng.choice(TEXTS).encode(errors="replace").decode()
                new = rng.choice(
                    (text, f"{text}/{name}", f"{name}/{text}", name.upper(), f"/{name}", f"a\\{name}", name * 40)
                )
                members[new[:4000] or "x"] = rng.choice((members.pop(name), b"", bytes(10**6), b"x" * 10))
            try:
                return self.pack(rng, rng.choice(self.suffixes), members, odd=True)
            except (ValueError, OSError, struct.error, UnicodeError):
                return spoil_bytes(rng, seed, self.seeds)
        if seed[:2] == b"\x1f\x8b" and what < 0.7:
            try:
                return gzip.compress(spoil_bytes(rng, gzip.decompress(seed), []), 1)
            except (OSError, EOFError, ValueError, zlib.error):
                pass
        return spoil_bytes(rng, seed, self.seeds)

    def read(self, content: bytes) -> bool:
        self.tries += 1
        suffix = ".zip" if b"PK" in content[:100] or b"PK\x05\x06" in content else ".tar.gz"
        path = fresh(self.place / "archive") / f"birds{suffix}"
        path.write_bytes(content)
        tree = open_tree(path)
        paths = paths_in(tree, SUFFIXES)
        whole = bool(paths)
        for name in paths:
            try:
                to_array(open_image(tree.read(name)), SHAPE)
            except UnreadableError:
                whole = False
        if self.tries % 5 == 0:
            splits = md.open_dataset("folder", directory=str(path), image_size=8, skip_unreadable=True)
            check(splits)
        return whole


class Pickles(Target):
    """Pickles, by themselves and as CIFAR-100's and miniImageNet's."""

    words = (
        *(getattr(pickle, n) for n in dir(pickle) if n.isupper() and isinstance(getattr(pickle, n), bytes)),
        *(b"cos\nsystem\n", b"cbuiltins\neval\n", b"cnumpy\ndtype\n", b"cnumpy.core.multiarray\n_reconstruct\n"),
    )

    def __init__(self, shared: Path, place: Path) -> None:
        super().__init__(shared, place)
        rng = np.random.default_rng(0)
        self.names = sorted(name for part in cifar.published("cifar_fs").values() for name in part)
        self.batch = {"data": rng.integers(0, 256, (100, 3072), dtype=np.uint8), "fine_labels": list(range(100))}
        self.mini = {
            "image_data": rng.integers(0, 256, (6, 10, 10, 3), dtype=np.uint8),
            "class_dict": {"n01": [0, 1, 2], "n02": [3, 4, 5]},
        }
        self.trees = [
            self.mini,
            {"fine_label_names": self.names},
            [1, 2.5, "a", b"b", None, True, (1, 2), {"a": np.ones(3)}],
        ]
        self.seeds = [pickle.dumps(tree, protocol) for tree in self.trees for protocol in range(6)]
        self.seeds += [pickle.dumps([np.int64(3), np.float32(0.5), np.arange(6.0).reshape(2, 3).T], 2)]
        self.path = place / "any.pkl"

    def spoil(self, rng: random.Random, seed: bytes) -> bytes:
        if rng.random() < 0.3:
            arrays = (np.zeros((6, 10, 10, 3)), np.zeros((6, 10, 10, 4), np.uint8), np.zeros(0, np.uint8), np.uint8(3))
            large = (np.zeros((6, 0, 10, 3), np.uint8), np.zeros((6, 1, 40000, 3), np.uint8), [0] * 1000)
            odd = (*ODD, *arrays, *large, np.ones((2, 2)), (1, 2))
            tree = spoil_tree(rng, rng.choice(self.trees), odd)
            try:
                return pickle.dumps(tree, rng.randrange(6))
            except (pickle.PicklingError, UnicodeError):
                return spoil_bytes(rng, seed, self.seeds)
        return spoil_bytes(rng, seed, self.seeds, self.words)

    def read(self, content: bytes) -> bool:
        self.path.write_bytes(content)
        value = load_pickle(self.path)
        for consumer in (self.as_miniimagenet, self.as_labels, self.as_batch):
            with suppress(MetadropoutError):
                consumer(value)
        return True

    def as_miniimagenet(self, value: Any) -> None:
        layout = miniimagenet._from_pickles(Source(self.place, (self.path,) * 3), SHAPE)
        for image in layout.images:
            assert image is not None
            assert image.shape == SHAPE

    def as_labels(self, value: Any) -> None:
        contents = cifar._from_batches({"meta": value, "train": self.batch, "test": self.batch}, self.path, SHAPE)
        assert sum(1 for _ in contents.images) == 200

    def as_batch(self, value: Any) -> None:
        meta = {"fine_label_names": self.names}
        contents = cifar._from_batches({"meta": meta, "train": value, "test": self.batch}, self.path, SHAPE)
        list(contents.images)


class Images(Target):
    """Image files."""

    def __init__(self, shared: Path, place: Path) -> None:
        super().__init__(shared, place)
        rng = np.random.default_rng(0)
        pixels = rng.integers(0, 256, (9, 12, 3), dtype=np.uint8)
        image = Image.fromarray(pixels)
        exif = Image.Exif()
        exif[0x0112] = 6
        for form in ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM"):
            for mode in ("RGB", "L", "P", "RGBA", "1", "I;16"):
                content = io.BytesIO()
                try:
                    made = (
                        Image.fromarray(pixels[..., 0].astype(np.uint16) * 200)
                        if mode == "I;16"
                        else image.convert(mode)
                    )
                    made.save(content, form, **({"exif": exif} if form in ("JPEG", "PNG", "WEBP", "TIFF") else {}))
                    self.seeds.append(content.getvalue())
                except (OSError, KeyError):
                    continue
        for compression in ("tiff_lzw", "tiff_adobe_deflate", "group4", "packbits", "jpeg"):
            content = io.BytesIO()
            image.convert("1" if compression == "group4" else "RGB").save(content, "TIFF", compression=compression)
            self.seeds.append(content.getvalue())

    def spoil(self, rng: random.Random, seed: bytes) -> bytes:
        return spoil_bytes(rng, seed, self.seeds)

    def read(self, content: bytes) -> bool:
        for channels, fit in ((1, "crop"), (3, "stretch")):
            array = to_array(open_image(content), ImageShape(channels, 8, 8), fit=fit)
            assert array.shape == (channels, 8, 8)
        return True


class Decoders(Target):
    """The decoders that `metadropout figures` keeps."""

    options = DecoderOptions(channels=2, iterations=1, batch=2)

    def __init__(self, shared: Path, place: Path) -> None:
        super().__init__(shared, place)
        self.path = place / "decoder.safetensors"
        self.steps = 0
        self.get()
        self.seeds.append(self.path.read_bytes())

    def batches(self, step: int) -> torch.Tensor:
        return torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(step))

    def get(self) -> None:
        def count() -> None:
            self.steps += 1

        decoder = cached_decoder(self.path, "state", self.batches, lambda x: x.flatten(1), self.options, count)
        assert decoder.images(self.batches(0).flatten(1)).shape == (2, 1, 8, 8)

    spoil_part = Checkpoints.spoil_part
    dtypes = Checkpoints.dtypes
    spoil = Checkpoints.spoil

    def read(self, content: bytes) -> bool:
        self.path.write_bytes(content)
        before = self.steps
        self.get()
        return self.steps == before


class Tables(Target):
    """miniImageNet's lists of files."""

    words = (
        b"filename",
        b"label",
        b"filename,label",
        b'"',
        b"'",
        b",",
        b"\n",
        b"\r",
        b"\0",
        b"../",
        b"/",
        b"\xef\xbb\xbf",
    )

    def __init__(self, shared: Path, place: Path) -> None:
        super().__init__(shared, place)
        images = place / "images"
        shutil.copytree(shared / "birds", images)
        self.tables = [place / f"{part}.csv" for part in miniimagenet.PARTS]
        names = sorted(str(path.relative_to(images)) for path in images.rglob("*.png"))
        for number, table in enumerate(self.tables):
            rows = [f"{name},{name.split('/')[0]}\n" for name in names if ord(name[0]) % 3 == number]
            table.write_text("filename,label\n" + "".join(rows))
        self.seeds.append(self.tables[0].read_bytes())
        self.source = Source(place, (*self.tables, images))

    def spoil(self, rng: random.Random, seed: bytes) -> bytes:
        return spoil_bytes(rng, seed, self.seeds, self.words)

    def read(self, content: bytes) -> bool:
        self.tables[0].write_bytes(content)
        list(miniimagenet._read(self.source, SHAPE).images)
        return True


TARGETS: dict[str, Callable[[Path, Path], Target]] = {
    "configurations": Configurations,
    "checkpoints": Checkpoints,
    "manifests": Manifests,
    "metrics": Metrics,
    "episode-lists": EpisodeLists,
    "evaluations": Evaluations,
    "archives": Archives,
    "pickles": Pickles,
    "attacks": Attacks,
    "figures": FigureIndexes,
    "identities": Identities,
    "environments": Environments,
    "images": Images,
    "weights": WeightSets,
    "decoders": Decoders,
    "tables": Tables,
}
"""All readers by name."""
