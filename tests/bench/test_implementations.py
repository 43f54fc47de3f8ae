"""All implementations compute the same meta-gradient, and the convolutions in it are those that are counted."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from metadropout.bench import plain
from metadropout.bench.convolutions import OPERATIONS, Convolution, convolutions_of_task, flops_of_iteration, prepare
from metadropout.bench.implementations import IMPLEMENTATIONS, OURS, PLAIN
from metadropout.bench.problem import Method, Problem, Setting

TINY = Setting(way=3, shot=2, query=2, channels=4, steps=3, meta_batch=2)
COLOUR = Setting(way=2, query=3, channels=5, image_size=35, in_channels=3, steps=2, meta_batch=1)
OTHERS = [(method, i.name) for i in IMPLEMENTATIONS for method in i.methods if i is not PLAIN]


@pytest.mark.parametrize(("method", "name"), OTHERS)
@pytest.mark.parametrize("setting", [TINY, COLOUR], ids=["grey", "colour"])
def test_meta_gradients_agree_in_float64(setting: Setting, method: Method, name: str) -> None:
    (implementation,) = [i for i in IMPLEMENTATIONS if i.name == name]
    if not implementation.is_installed():
        pytest.skip(f"{name} is not installed: pip install 'metadropout[bench]'")
    problem = Problem(setting, method, torch.float64)
    expected = plain.prepare(problem)()
    module = importlib.import_module(f"metadropout.bench.{implementation.module}")
    work = module.prepare(problem)
    for _ in range(2):  # a second time gives the same again: nothing is left behind by the first
        gradients = work()
        assert gradients.keys() == expected.keys() == dict(problem.learner().named_parameters()).keys()
        for key, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[key], rtol=1e-9, atol=1e-11, msg=key)


def test_every_weight_matters_to_the_meta_gradient() -> None:
    """Otherwise agreement would say little."""
    gradients = plain.prepare(Problem(TINY, "metadropout", torch.float64))()
    assert all(gradient.norm() > 1e-6 for gradient in gradients.values())


def test_peers_are_held_against_both_methods_only_where_they_can() -> None:
    assert IMPLEMENTATIONS[:2] == (OURS, PLAIN)
    assert {i.name: i.methods for i in IMPLEMENTATIONS[2:]} == {"higher": ("maml",), "TorchOpt": ("maml",)}


@pytest.mark.parametrize("method", ["maml", "metadropout"])
@pytest.mark.parametrize("setting", [TINY, COLOUR], ids=["grey", "colour"])
def test_the_formula_counts_the_convolutions_of_the_plain_loops_graph(setting: Setting, method: Method) -> None:
    work = plain.prepare(Problem(setting, method))
    with FlopCounterMode(display=False) as counter:
        work()
    operations = counter.get_flop_counts()["Global"]
    counted = sum(flops for operation, flops in operations.items() if "convolution" in str(operation))
    # PyTorch's second derivative of a convolution computes one for the images' gradient, which nobody asks for.
    images = setting.way * setting.shot
    unused = Convolution("input gradient", images, setting.image_size, setting.in_channels, setting.channels)
    per_iteration = setting.meta_batch * setting.steps
    assert counted == flops_of_iteration(setting, method) + per_iteration * unused.flops


def test_the_limit_runs_each_convolution_as_often_as_it_is_counted() -> None:
    work = prepare(Problem(TINY, "metadropout"))
    with FlopCounterMode(display=False) as counter:
        work()
    assert counter.get_total_flops() == flops_of_iteration(TINY, "metadropout")
    assert {convolution.kind for convolution in convolutions_of_task(TINY, "maml")} == set(OPERATIONS)
