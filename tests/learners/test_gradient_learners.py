"""What all learners with inner steps share: batches of tasks, checkpointing, noise, and a life on the command line."""

from __future__ import annotations

import copy
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from toys import (
    assert_batched_equals_loop,
    assert_same_weights,
    finish,
    make_episode,
    make_perturbation,
    randomise,
    start,
    wait_for,
    weights,
)

import metadropout as md
from metadropout.cli import main
from metadropout.learners import LEARNERS
from metadropout.perturbations import PERTURBATIONS
from metadropout.training.checkpoints import iteration_of, latest_checkpoint

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "fomaml": ("none", {}),
    "reptile": ("none", {"batch": 4, "test_steps": 3}),
    "lstm": ("none", {"inner_lr": 0.05}),
    "lstm-metadropout": ("metadropout", {"inner_lr": 0.05, "first_order": False}),
    "abml": ("none", {"kl_weight": 1.0}),
    "abml-metadropout": ("metadropout", {"kl_weight": 1.0, "train_samples": 2}),
    "platipus": ("none", {"train_samples": 2}),
    "platipus-metadropout": ("metadropout", {}),
    "tnet": ("none", {}),
    "mtnet": ("none", {}),
    "mtnet-metadropout": ("metadropout", {}),
    "cavia-metadropout": ("metadropout", {"inner_lr": 1.0}),
    "anil": ("none", {}),
    "unicorn-metadropout": ("metadropout", {}),
    "unicorn-metasgd": ("none", {}),
    "mamlpp": ("none", {"multi_step_iterations": 5}),
}
"""Learners with a perturbation and options."""

NETWORK = {"cavia": {"context": 5, "norm": "batch"}}
"""What a learner's network is built with."""

TRAINING = {"reptile": {"optimizer": "sgd", "meta_lr": 1.0, "schedule": "linear", "clip_by": "none"}}
BATCHED = [kind for kind in KINDS if kind != "reptile"]  # its tasks depend on each other


def name_of(kind: str) -> str:
    return kind.removesuffix("-metadropout")


def make_network(name: str) -> md.Conv4:
    """Return a network as the learner of that name needs it."""
    torch.manual_seed(0)
    way = 1 if LEARNERS[name].network_gives == "a logit" else 3
    network = md.Conv4(way, in_channels=1, image_size=16, channels=4, **NETWORK.get(name, {})).double()
    randomise(network)
    return network


def make(kind: str, **options: Any) -> md.GradientLearner:
    perturbation, own = KINDS[kind]
    network = make_network(name_of(kind))
    noise = make_perturbation(perturbation, network)
    torch.manual_seed(2)
    learner: md.GradientLearner = LEARNERS[name_of(kind)](
        network, noise, **{"steps": 2, "inner_lr": 0.05, **own, **options}
    ).double()
    for name, parameter in learner.named_parameters():
        if not name.startswith(("network.", "perturbation.")):
            randomise(torch.nn.ParameterList([parameter]), scale=0.05, seed=len(name))
    return learner


@pytest.mark.parametrize("inductive", [False, True], ids=["transductive", "inductive"])
@pytest.mark.parametrize("kind", BATCHED)
def test_tasks_as_one_batch_give_what_each_gives_alone(kind: str, inductive: bool) -> None:
    episodes = [make_episode(seed=seed, inductive=inductive) for seed in range(2)]
    assert_batched_equals_loop(make(kind), episodes)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("fomaml", "reptile")])
def test_steps_that_are_taken_again_in_the_backward_pass_give_the_same_gradients(kind: str) -> None:
    plain, again = (
        make(kind, gradient_checkpointing=checkpointing).task_gradient(make_episode(), generator=md.SeededNoise(1))
        for checkpointing in (False, True)
    )
    assert torch.equal(plain.loss, again.loss)
    for name, gradient in plain.gradients.items():
        torch.testing.assert_close(again.gradients[name], gradient, rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_that_is_meta_learned_gets_a_gradient(kind: str) -> None:
    learner = make(kind)
    gradients = learner.task_gradient(make_episode(), generator=md.SeededNoise(0)).gradients
    assert gradients.keys() == dict(learner.named_parameters()).keys()
    # Biases before a normalisation and their step sizes have none, unless noise comes between.
    silent = {name for name, g in gradients.items() if not g.abs().max() > 1e-12}
    silent = {name for name in silent if not name.replace("/", ".").endswith("conv.bias")}
    # What all classes of UNICORN-MAML start from has no influence (test_unicorn.py).
    expected = {"network.head.weight", "network.head.bias"} if kind.startswith("unicorn") else set()
    assert silent == expected


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapted_model_holds_no_graph_stays_what_it_is_and_can_be_attacked(kind: str) -> None:
    learner, episode, source = make(kind), make_episode(), md.SeededNoise(0)
    x, y, query_x, _ = episode.tensors()
    for inductive in (False, True):
        with torch.inference_mode():
            classify = learner.adapt(x.clone(), y.clone(), inductive=inductive, mc_samples=2, generator=source)
        logits = classify(query_x)
        assert logits.shape == (6, 3)
        assert not logits.requires_grad
        alone = torch.cat([classify(image[None]) for image in query_x])
        assert torch.allclose(logits, alone) is inductive
        with torch.no_grad():
            for tensor in (*learner.parameters(), *learner.buffers()):
                tensor.add_(1)
        assert torch.equal(classify(query_x), logits)
        with torch.no_grad():
            for tensor in (*learner.parameters(), *learner.buffers()):
                tensor.sub_(1)
        images = query_x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(
            classify(images).logsumexp(dim=1).sum() + classify(images)[:, 0].sum(), images
        )
        assert gradient.abs().max() > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_does_the_same_and_tasks_of_another_way_are_done(kind: str) -> None:
    learner, source = make(kind), md.SeededNoise(0)
    results = [each.task_gradient(make_episode(), generator=source) for each in (learner, copy.deepcopy(learner))]
    assert torch.equal(results[0].loss, results[1].loss)
    episode = make_episode(way=4)
    if kind.startswith("cavia"):
        with pytest.raises(md.ConfigError, match="it does not adapt its head"):
            learner.for_way(4)
        return
    classify = learner.for_way(4).adapt(episode.support_x, episode.support_y, mc_samples=2, generator=source)
    assert classify(episode.query_x).shape == (8, 4)


REFUSED = {
    "fomaml": "first_order cannot be used with",
    "reptile": "Reptile cannot train",
    "lstm": "first_order cannot be used with",
}


@pytest.mark.parametrize("perturbation", PERTURBATIONS)
@pytest.mark.parametrize("kind", sorted({name_of(kind) for kind in KINDS}))
def test_perturbations_compose_or_are_refused_with_the_reason(kind: str, perturbation: str) -> None:
    network = make_network(kind)
    noise = make_perturbation(perturbation, network)
    trained, by_steps = any(p.requires_grad for p in noise.parameters()), bool(noise.traits.needs_second_order)
    if kind in REFUSED and (by_steps if kind != "reptile" else trained):
        with pytest.raises(ValueError, match=REFUSED[kind]):
            LEARNERS[kind](network, noise)
        return
    if (kind, perturbation) == ("cavia", "information-dropout"):  # its network pools before the ReLU
        with pytest.raises(ValueError, match="information dropout needs the ReLU before pooling"):
            LEARNERS[kind](network, noise).task_gradient(make_episode(), generator=md.SeededNoise(0))
        return
    learner = LEARNERS[kind](
        network, noise, steps=2, inner_lr=0.05, **({"batch": 6} if kind == "reptile" else {})
    ).double()
    result = learner.task_gradient(make_episode(), generator=md.SeededNoise(0))
    assert result.loss.isfinite()
    own = [g for name, g in result.gradients.items() if name.startswith("perturbation.") and name.endswith("weight")]
    assert all(gradient.abs().max() > 0 for gradient in own)


@pytest.mark.parametrize("kind", KINDS)
def test_a_diverging_task_is_explained(kind: str) -> None:
    learner = make(kind)
    with torch.no_grad():
        learner.get_parameter("network.head.bias")[0] = torch.nan
    assert "'network.head.bias' is not finite at the start" in learner.explain_failure(
        make_episode(), generator=md.SeededNoise(0)
    )


# A whole life on the command line.


def write_recipe(recipe: Path, kind: str, **training: Any) -> None:
    config = yaml.safe_load(recipe.read_text())
    perturbation, options = KINDS[kind]
    config["learner"] |= {"name": name_of(kind), **options}
    config["network"] |= NETWORK.get(name_of(kind), {})
    config["perturbation"] = {"name": perturbation}
    config["training"] |= TRAINING.get(kind, {}) | training
    recipe.write_text(yaml.safe_dump(config))


WHOLE = ["fomaml", "reptile", "lstm", "abml-metadropout", "platipus"]
WHOLE += ["tnet", "mtnet-metadropout", "cavia-metadropout", "anil", "unicorn-metadropout", "mamlpp"]


@pytest.mark.parametrize("kind", WHOLE)
def test_a_run_is_the_same_killed_and_resumed_on_threads_and_on_processes(
    kind: str, recipe: Path, tmp_path: Path
) -> None:
    write_recipe(recipe, kind, iterations=6, checkpoint_every=1, meta_batch=3)
    whole, killed, processes = tmp_path / "whole", tmp_path / "killed", tmp_path / "processes"
    assert main(["train", str(recipe), "--out", str(whole)]) == 0
    process = start("train", recipe, "--out", killed)
    wait_for(lambda: (path := latest_checkpoint(killed / "checkpoints")) and iteration_of(path) >= 2, process)
    process.send_signal(signal.SIGKILL)
    finish(process)
    assert main(["train", "--resume", str(killed), "--machine.threads", "2"]) == 0
    assert_same_weights(whole, killed)
    out, err = finish(start("train", recipe, "--out", processes, processes=2))
    assert "trained to iteration 6" in out, err
    assert_same_weights(whole, processes)
    if kind == "reptile":  # its Adam's state is a part of the run's
        state = weights(whole)
        assert state["buffer.decay"] == pytest.approx(0.999 ** (6 * 3 * 2), rel=1e-5)
        assert state["buffer.moments/network/head/weight"].abs().max() > 0
    if kind == "mamlpp":
        assert weights(whole)["buffer.outer_steps"] == 6


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_evaluated_at_any_way_attacked_drawn_and_reported(kind: str, recipe: Path, tmp_path: Path) -> None:
    write_recipe(recipe, kind, iterations=2)
    run, page = tmp_path / "run", tmp_path / "report.html"
    assert main(["train", str(recipe), "--out", str(run)]) == 0
    assert main(["evaluate", str(run), "--episodes", "3"]) == 0
    wider = ["evaluate", str(run), "--episodes", "2", "--mc-samples", "2", "--episode.way", "4"]
    assert main(wider) == (1 if kind.startswith("cavia") else 0)
    result = json.loads((run / "evaluation-test.json").read_text())
    most = 10 if kind.startswith(("abml", "platipus")) else 30
    random = kind.startswith(("abml", "platipus")) or kind.endswith("-metadropout")
    assert result["mc_samples"] == (most if random else 1)
    attack = ["attack", str(run), "--episodes", "1", "--steps", "2", "--mc-samples", "2"]
    assert main([*attack, "--norm", "linf", "--epsilon", "0.1"]) == 0
    assert main(["figures", str(run), "--only", "boundaries"]) == 0
    assert main(["report", str(run), "--out", str(page)]) == 0
    title = LEARNERS[name_of(kind)].title
    assert title + (" + Meta-dropout" if kind.endswith("metadropout") else "") in page.read_text()
