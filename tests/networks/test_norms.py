"""The choice of normalisation, and running averages."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import nn
from toys import UsersModel

import metadropout as md
from metadropout.networks.functional import FunctionalNetwork, Normalisation
from metadropout.networks.norms import average_names, averages, averages_after

Norm = Literal["offset", "batch", "running"]


@pytest.mark.parametrize("network", [md.Conv4, md.ResNet12])
@pytest.mark.parametrize(
    ("norm", "eps", "own"),
    [
        ("offset", 1e-3, {"bias"}),
        ("batch", 1e-5, {"weight", "bias"}),
        ("running", 1e-5, {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}),
    ],
)
def test_a_network_has_the_normalisation_that_is_asked_for(
    network: type[nn.Module], norm: Norm, eps: float, own: set[str]
) -> None:
    for given, expected in ((None, eps), (0.5, 0.5)):
        model = network(3, in_channels=1, image_size=16, norm=norm, norm_eps=given)
        norms = {name: m for name, m in model.named_modules() if getattr(m, "eps", None) is not None}
        assert len(norms) == (4 if network is md.Conv4 else 16)
        for module in norms.values():
            assert module.eps == expected
            assert set(module.state_dict()) == own


def test_the_default_network_is_the_one_with_offsets() -> None:
    models = []
    for options in ({}, {"norm": "offset"}):
        torch.manual_seed(0)
        models.append(md.Conv4(3, **options).state_dict())
    assert models[0].keys() == models[1].keys()
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


def test_another_norm_is_refused() -> None:
    with pytest.raises(ValueError, match="only 'offset', 'batch' and 'running' are known"):
        md.Conv4(3, norm="layer")  # type: ignore[arg-type]


def test_running_averages_move_as_in_pytorch_without_touching_the_network() -> None:
    torch.manual_seed(0)
    model = md.Conv4(None, in_channels=1, image_size=16, channels=4, norm="running").double()
    function = FunctionalNetwork(model)
    weights = dict(model.named_parameters())
    for n in (3, 7):
        x = torch.rand(n, 1, 16, 16, dtype=torch.float64)
        collected = Normalisation(collected={})
        features = function(weights, x, normalisation=collected)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        after = averages_after(model, collected.collected or {})
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        assert list(after) == average_names(model)
        expected = model.train()(x)
        torch.testing.assert_close(features, expected, rtol=1e-10, atol=1e-10)
        for name, value in after.items():
            torch.testing.assert_close(value, model.get_buffer(name), rtol=1e-12, atol=1e-12)
            assert not value.requires_grad
        given = Normalisation(given=averages(model))
        torch.testing.assert_close(function(weights, x, normalisation=given), model.eval()(x), rtol=1e-10, atol=1e-10)


def test_averages_count_only_where_all_normalisations_have_them() -> None:
    assert average_names(md.Conv4(None)) == average_names(md.Conv4(None, norm="batch")) == []
    assert average_names(UsersModel()) == ["bn.running_mean", "bn.running_var"]
    mixed = nn.Sequential(nn.BatchNorm2d(1), md.Conv4(None))
    assert average_names(mixed) == []


def test_an_average_over_all_batches_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'0' has momentum None.*such as 0.1"):
        average_names(nn.Sequential(nn.BatchNorm2d(1, momentum=None)))
