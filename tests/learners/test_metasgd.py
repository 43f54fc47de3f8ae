from __future__ import annotations

import torch
from toys import make_episode

import metadropout as md


def test_step_sizes_start_at_the_inner_rate_for_every_adapted_element(conv4: md.Conv4) -> None:
    learner = md.MetaSGD(conv4, inner_lr=0.3)
    assert {name.replace("/", ".") for name in learner.step_sizes} == set(learner.adapted_names)
    parameters = dict(learner.named_parameters())
    for name, step_size in learner.step_sizes.items():
        assert step_size.shape == parameters[name.replace("/", ".")].shape
        assert (step_size == 0.3).all()


def test_at_its_start_it_is_maml_and_with_other_step_sizes_it_is_not(conv4: md.Conv4) -> None:
    episode = make_episode()
    maml, metasgd = md.MAML(conv4, inner_lr=0.1), md.MetaSGD(conv4, inner_lr=0.1).double()
    torch.testing.assert_close(maml.loss(episode), metasgd.loss(episode))
    with torch.no_grad():
        metasgd.step_sizes["network/head/weight"].neg_()  # unconstrained: a step size may be negative
    assert not torch.allclose(maml.loss(episode), metasgd.loss(episode))
