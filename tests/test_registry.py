"""Parts by name: the library's and a user's own, with their titles; and the package as one looks at it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from torch import nn

import metadropout as md
from metadropout.config import AXES, method_name, parse_config
from metadropout.registry import REGISTRIES, title_of


def test_the_package_shows_every_part() -> None:
    for axis in (md.learners.LEARNERS, md.perturbations.PERTURBATIONS, md.networks.NETWORKS):
        assert all(getattr(md, part.__name__) is part for part in axis.values())
    assert set(md.data.DATASETS) == set(AXES["data"])
    for namespace in (md.learners, md.perturbations, md.networks, md.data):
        assert dir(namespace) == sorted(namespace.__all__)  # and no modules, which are in files of similar names
    assert dir(md) == sorted(md.__all__)
    assert all(hasattr(md, name) for name in md.__all__)
    with pytest.raises(AttributeError, match="module 'metadropout' has no attribute 'MAMLL'"):
        md.MAMLL  # noqa: B018


def test_importing_the_package_does_not_load_pytorch() -> None:
    code = "import sys, metadropout as md; md.register, md.load_recipe, dir(md); print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"


def test_a_part_is_called_by_its_own_title_or_its_name() -> None:
    @md.register("learner", "mine")
    class Mine(md.MAML):
        """MAML by another name."""

    @md.register("perturbation", "called")
    class Called(md.NoPerturbation):
        """Does nothing, and has a title."""

        title = "Nothing at all"

    assert title_of("learner", "maml") == "MAML"
    assert title_of("learner", "mine") == "mine"  # its base class's title would name another learner
    assert title_of("data", "omniglot") == "Omniglot"
    assert title_of("data", "of a version to come") == "of a version to come"
    for options, name in {
        ("metasgd", "none"): "Meta-SGD",
        ("maml", "metadropout"): "MAML + Meta-dropout",
        ("mine", "called"): "mine + Nothing at all",
    }.items():
        sections = {"learner": {"name": options[0]}, "perturbation": {"name": options[1]}}
        assert method_name(parse_config(sections)) == name


def test_a_name_is_given_once_and_in_plain_letters() -> None:
    with pytest.raises(ValueError, match=r"there is a network 'conv4' already: metadropout\.networks\.conv4\.Conv4"):
        md.register("network", "conv4")(nn.Linear)
    with pytest.raises(ValueError, match="'My Net' cannot be the name of a part: use lower-case letters"):
        md.register("network", "My Net")
    with pytest.raises(ValueError, match="'optimizer' is not an axis; use one of data, network, perturbation, learner"):
        md.register("optimizer", "mine")
    before = dict(REGISTRIES["network"])
    md.register("network", "conv4")(md.Conv4)  # a module that is imported twice registers its parts twice
    assert before == REGISTRIES["network"]
