"""The real archives: what they hold, and what they become."""

import hashlib
import json
import time
from pathlib import Path

import numpy as np
import pytest

from metadropout.data import EpisodeSampler, Splits, load_episodes, open_dataset, save_episodes
from metadropout.data.inspection import check, prepared_of

pytestmark = pytest.mark.usefixtures("real_data")


def test_omniglot_has_1623_characters_in_4800_and_1692_classes() -> None:
    splits = open_dataset("omniglot")
    assert (len(splits.train), splits.validation, len(splits.test)) == (4800, None, 1692)
    prepared = prepared_of(splits.train)
    assert prepared is not None
    assert (len(prepared), set(prepared.class_sizes)) == (1623, {20})
    assert prepared.image_shape == (1, 28, 28)
    check(splits)


def test_the_omniglot_split_by_the_fixed_seed_never_changes() -> None:
    splits = open_dataset("omniglot")
    names = json.dumps([list(splits.train.class_names), list(splits.test.class_names)])
    assert hashlib.sha256(names.encode()).hexdigest()[:16] == "326cac8a7a1a6353"
    prepared = prepared_of(splits.train)
    assert prepared is not None
    recorded = prepared.manifest["splits"]["random, seed 0"]
    assert [f"{name}/rot000" for name in recorded["test"]] == list(splits.test.class_names)[::4]


def test_the_original_omniglot_split_is_964_and_659_characters() -> None:
    splits = open_dataset("omniglot", split="original", validation_characters=64)
    assert splits.validation is not None
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (3600, 256, 2636)


def test_omniglot_is_mostly_paper_with_ink_at_full_strength() -> None:
    train = open_dataset("omniglot").train
    rng = np.random.default_rng(0)
    pixels = train.gather(rng.integers(0, 4800, 500), rng.integers(0, 20, 500))
    assert 0.03 < (pixels > 127).mean() < 0.15
    assert (pixels.max(axis=(1, 2, 3)) == 255).mean() > 0.95  # the thinnest lines fade


@pytest.mark.parametrize(("name", "sizes"), [("cifar_fs", (64, 16, 20)), ("fc100", (60, 20, 20))])
def test_cifar_benchmarks_have_the_archives_300_images_of_each_class(name: str, sizes: tuple[int, ...]) -> None:
    splits = open_dataset(name)
    assert splits.validation is not None
    parts = (splits.train, splits.validation, splits.test)
    assert tuple(len(part) for part in parts) == sizes
    assert {int(size) for part in parts for size in part.class_sizes} == {300}
    assert splits.train.image_shape == (3, 32, 32)
    check(splits)


@pytest.mark.parametrize("name", ["omniglot", "cifar_fs"])
def test_a_prepared_set_is_identified_in_well_under_a_second(name: str) -> None:
    splits = open_dataset(name)
    start = time.perf_counter()
    identity = splits.identity
    assert time.perf_counter() - start < 0.5
    assert identity == open_dataset(name).identity


@pytest.mark.parametrize("name", ["omniglot", "cifar_fs"])
def test_a_prepared_set_opens_in_well_under_a_second(name: str) -> None:
    open_dataset(name)
    start = time.perf_counter()
    open_dataset(name)
    assert time.perf_counter() - start < 0.5


def test_a_list_of_one_benchmark_is_refused_by_another(tmp_path: Path) -> None:
    sampler = EpisodeSampler(open_dataset("cifar_fs").test, way=5, shot=1, query=15, seed=0)
    save_episodes(tmp_path / "list.json", sampler, 5)
    assert len(load_episodes(tmp_path / "list.json", open_dataset("cifar_fs").test)) == 5
    with pytest.raises(Exception, match="other images"):
        load_episodes(tmp_path / "list.json", open_dataset("fc100").test)


@pytest.fixture
def miniimagenet(real_data: Path) -> Splits:
    if not (real_data / "miniimagenet" / "train.tar.gz").exists():
        pytest.skip("METADROPOUT_DATA does not have miniimagenet/train.tar.gz")
    return open_dataset("miniimagenet")


def test_miniimagenet_has_600_images_of_each_of_64_16_and_20_classes(miniimagenet: Splits) -> None:
    assert miniimagenet.validation is not None
    parts = (miniimagenet.train, miniimagenet.validation, miniimagenet.test)
    assert [len(part) for part in parts] == [64, 16, 20]
    assert {int(size) for part in parts for size in part.class_sizes} == {600}
    assert miniimagenet.train.image_shape == (3, 84, 84)


def test_the_copy_of_miniimagenet_and_its_duplicates_are_recognised(miniimagenet: Splits) -> None:
    found = check(miniimagenet)
    assert any("those of their csv list" in finding.text for finding in found)
    assert any("the copy with which this project's results were measured" in finding.text for finding in found)
    (note,) = [finding.text for finding in found if not finding.in_order]
    assert note.startswith("7 images are in two splits")
    assert (note.count("= validation"), note.count("= test")) == (6, 1)
