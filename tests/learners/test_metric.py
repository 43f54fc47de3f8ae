"""What metric-based learners share: protocols, running averages, noise, and a whole life on the command line."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from toys import UsersModel, assert_same_weights, finish, make_episode, randomise, start, wait_for, weights

import metadropout as md
from metadropout.cli import main
from metadropout.learners import LEARNERS
from metadropout.perturbations import PERTURBATIONS
from metadropout.training.checkpoints import iteration_of, latest_checkpoint

KINDS: dict[str, dict[str, Any]] = {
    "protonet": {},
    "matching": {"class_sum": "cosines"},
    "matching-fce": {"fce": True, "reads": 2},
}
NORMS = ["offset", "batch", "running"]


def make(kind: str, norm: str = "offset", perturbation: str = "none") -> md.MetricLearner:
    torch.manual_seed(0)
    network = md.Conv4(None, in_channels=1, image_size=16, channels=4, norm=norm)  # type: ignore[arg-type]
    parts = {"parts": [{"name": "metadropout"}, {"name": "weight-gaussian"}]} if perturbation == "combined" else {}
    built = PERTURBATIONS[perturbation](network, **parts)
    learner = LEARNERS[kind.partition("-")[0]](network, built, **KINDS[kind]).double()
    randomise(learner, scale=0.2)
    return learner  # type: ignore[no-any-return]


def noise(seed: int = 0) -> md.SeededNoise:
    return md.SeededNoise(seed)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("inductive", [False, True])
def test_the_meta_gradient_is_that_of_finite_differences(kind: str, norm: str, inductive: bool) -> None:
    check_gradients(make(kind, norm), make_episode(inductive=inductive))


def check_gradients(learner: md.MetricLearner, episode: md.Episode) -> None:
    """Hold the gradient of every parameter against the slope of the loss in a random direction."""
    gradients = learner.task_gradient(episode, generator=noise()).gradients
    g = torch.Generator().manual_seed(1)
    for name, parameter in learner.named_parameters():
        direction = torch.randn(parameter.shape, generator=g, dtype=torch.float64)
        values, original = [], parameter.detach().clone()
        for step in (1e-8, -1e-8):  # a longer one meets a ReLU or a maximum that flips
            with torch.no_grad():
                parameter.copy_(original + step * direction)
                values.append(learner.loss(episode, generator=noise()).item())
        with torch.no_grad():
            parameter.copy_(original)
        slope = (values[0] - values[1]) / 2e-8
        assert float((gradients[name] * direction).sum()) == pytest.approx(slope, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("norm", NORMS)
def test_training_and_testing_see_a_task_alike_where_nothing_is_averaged(kind: str, norm: str) -> None:
    learner = make(kind, norm)
    for inductive in (False, True):
        episode = make_episode(inductive=inductive)
        x, y, query_x, _ = episode.tensors()
        trained = learner(episode, generator=noise()).logits
        tested = learner.adapt(x, y, inductive=inductive, generator=noise())(query_x)
        assert torch.allclose(trained, tested, rtol=1e-10) == (not (inductive and norm == "running"))


def test_support_and_query_images_share_a_batch_in_the_transductive_protocol() -> None:
    """The statistics are those of PyTorch's own layers in training mode, on all images."""
    learner, episode = make("protonet", "batch"), make_episode()
    features = learner.network.train()(torch.cat([episode.support_x, episode.query_x]))
    support, query = features[:6], features[6:]
    centres = torch.stack([support[episode.support_y == k].mean(0) for k in range(3)])
    torch.testing.assert_close(learner(episode).logits, -torch.cdist(query, centres).square())


@pytest.mark.parametrize("norm", NORMS)
def test_in_the_inductive_protocol_an_answer_depends_on_no_other_query_image(kind: str, norm: str) -> None:
    learner, episode = make(kind, norm), make_episode()
    x, y, query_x, _ = episode.tensors()
    for inductive in (True, False):
        classify = learner.adapt(x, y, inductive=inductive, generator=noise())
        alone = torch.cat([classify(image[None]) for image in query_x])
        assert torch.allclose(classify(query_x), alone, rtol=1e-10) == inductive


def test_running_averages_are_what_the_inductive_protocol_tests_with(kind: str) -> None:
    learner, episode = make(kind, "running"), make_episode()
    x, y, query_x, _ = episode.tensors()

    def answers(inductive: bool) -> torch.Tensor:
        return learner.adapt(x, y, inductive=inductive, generator=noise())(query_x)

    before = answers(True), answers(False)
    outcome = learner(episode, generator=noise())
    assert list(outcome.buffers) == learner.changed_buffers()
    assert torch.equal(answers(True), before[0])  # a task leaves the learner as it is
    for name, value in outcome.buffers.items():
        learner.get_buffer(name).copy_(value)
    assert not torch.allclose(answers(True), before[0])
    assert torch.equal(answers(False), before[1])
    assert make(kind, "batch").changed_buffers() == []


def test_a_classifier_holds_no_graph_and_stays_what_it_is_when_training_goes_on(kind: str) -> None:
    learner, episode = make(kind, "running"), make_episode()
    x, y, query_x, _ = episode.tensors()
    for inductive in (False, True):
        with torch.inference_mode():
            classify = learner.adapt(x.clone(), y.clone(), inductive=inductive, generator=noise())
        before = classify(query_x)
        assert not before.requires_grad
        with torch.no_grad():
            for tensor in (*learner.parameters(), *learner.buffers()):
                tensor.add_(1)
        assert torch.equal(classify(query_x), before)
        images = query_x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(classify(images).logsumexp(1).sum(), images)  # as attacks need it
        assert gradient.isfinite().all()


def test_a_failure_says_what_is_not_finite(kind: str) -> None:
    learner, episode = make(kind), make_episode()
    assert "training.meta_lr" in learner.explain_failure(episode)
    blank = md.Episode(episode.support_x * float("nan"), *episode.tensors()[1:])
    assert learner.explain_failure(blank) == "an image has values that are not finite: check the data set"
    with torch.no_grad():
        learner.network.blocks[0].conv.weight[0] = float("inf")  # type: ignore[union-attr, index]
    assert learner.explain_failure(episode).startswith("'network.blocks.0.conv.weight' is not finite")


# Perturbations: support passes are perturbed, query images never.

MEANINGFUL = ["metadropout", "additive", "fixed-gaussian", "independent-gaussian", "deterministic", "learned-variance"]
MEANINGLESS = ["more-parameters", "mixup", "vib", "information-dropout", "adversarial"]


def test_every_perturbation_composes_or_is_refused_with_the_reason(kind: str) -> None:
    assert {*MEANINGFUL, *MEANINGLESS, "weight-gaussian", "combined", "none"} == PERTURBATIONS.keys()
    with pytest.raises(ValueError, match="in one batch, which has one set of weights"):
        make(kind, perturbation="weight-gaussian")
    for name in MEANINGLESS:
        with pytest.raises(ValueError, match=r"cannot be used with .*: it acts through the loss of inner steps"):
            make(kind, perturbation=name)
    network = md.Conv4(None, image_size=16, channels=4)
    both = PERTURBATIONS["combined"](network, parts=[{"name": "metadropout"}, {"name": "mixup"}])
    with pytest.raises(ValueError, match="Mixup cannot be used with ProtoNet"):
        md.ProtoNet(network, both)


@pytest.mark.parametrize("perturbation", MEANINGFUL)
@pytest.mark.parametrize("inductive", [False, True])
def test_the_meta_gradient_reaches_the_perturbation_by_the_query_loss(
    kind: str, perturbation: str, inductive: bool
) -> None:
    learner, episode = make(kind, perturbation=perturbation), make_episode(inductive=inductive)
    check_gradients(learner, episode)
    gradients = learner.task_gradient(episode, generator=noise()).gradients
    assert all(g.abs().max() > 0 for name, g in gradients.items() if name.startswith("perturbation."))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("inductive", [False, True])
def test_prototypes_and_query_features_are_means_over_noise_samples(norm: str, inductive: bool) -> None:
    learner, episode = make("protonet", norm, "metadropout"), make_episode()
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def spy(weights: object, support: torch.Tensor, members: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        seen.append((support, query))
        return md.ProtoNet.logits(learner, weights, support, members, query)  # type: ignore[arg-type]

    learner.logits = spy  # type: ignore[method-assign, assignment]
    *_, together = answers_by_sample(learner, episode, inductive)
    support, query = (torch.cat(parts) for parts in zip(*seen[:3], strict=True))
    centres = torch.stack([support[:, episode.support_y == k].mean(dim=(0, 1)) for k in range(3)])
    torch.testing.assert_close(together, -torch.cdist(query.mean(0), centres).square())
    torch.testing.assert_close(seen[3], (support, query))  # each sample is what it is alone


@pytest.mark.parametrize("inductive", [False, True])
def test_matching_averages_probabilities_over_noise_samples(inductive: bool) -> None:
    learner, episode = make("matching", perturbation="metadropout"), make_episode()
    logits = answers_by_sample(learner, episode, inductive)
    torch.testing.assert_close(logits[-1].exp(), torch.stack(logits[:-1]).exp().mean(0))


class OneSample:
    """One of the noise samples of a source, again and again."""

    def __init__(self, source: md.NoiseSource, sample: int) -> None:
        self.source, self.sample = source, sample

    def stream(self, step: int, sample: int) -> Any:
        return self.source.stream(step, self.sample)

    def fork(self) -> md.NoiseSource:
        return self.source.fork()


def answers_by_sample(learner: md.MetricLearner, episode: md.Episode, inductive: bool) -> list[torch.Tensor]:
    """Return the logits with each of three noise samples alone, and with all of them."""
    x, y, query_x, _ = episode.tensors()
    sources = [OneSample(noise(), sample) for sample in range(3)]
    alone = [learner.adapt(x, y, inductive=inductive, mc_samples=1, generator=s)(query_x) for s in sources]
    return [*alone, learner.adapt(x, y, inductive=inductive, mc_samples=3, generator=noise())(query_x)]


@pytest.mark.parametrize("norm", NORMS)
def test_noise_samples_give_the_same_in_one_pass_and_in_several(kind: str, norm: str) -> None:
    learner, episode = make(kind, norm, "metadropout"), make_episode()
    x, y, query_x, _ = episode.tensors()
    logits = []
    for images in (1, 256):
        learner.images_per_pass = images
        logits.append(learner.adapt(x, y, inductive=True, mc_samples=3, generator=noise())(query_x))
    torch.testing.assert_close(*logits)


class WithoutStatistics(torch.nn.Module):
    """Has no batch normalisation, so that only the perturbation can let an image's features depend on noise."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.GroupNorm(2, 4), torch.nn.ReLU())
        self.head = torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean(dim=(2, 3)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("inductive", [False, True])
def test_support_images_are_perturbed_and_query_images_are_not(inductive: bool) -> None:
    network = WithoutStatistics()
    learner, episode = md.ProtoNet(network, md.MetaDropout(network, head="head")).double(), make_episode()
    x, y, query_x, _ = episode.tensors()
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    learner.logits = lambda w, support, members, query: seen.append((support, query)) or query[0]  # type: ignore
    for samples in (1, 3):
        learner.adapt(x, y, inductive=inductive, mc_samples=samples, generator=noise())(query_x)
    learner(md.Episode(*episode.tensors(), inductive=inductive), generator=noise())
    (one, query), (three, queries), (training, _) = seen
    assert torch.allclose(queries, query.expand(3, *query.shape))
    torch.testing.assert_close(one[0], three[0])
    torch.testing.assert_close(one, training)
    assert not torch.allclose(three[0], three[1], rtol=1e-2)
    weights = dict(learner.named_parameters())
    clean = learner.perturbed.run(weights, query_x, learner.perturbed.query_pass(weights))
    torch.testing.assert_close(query[0], clean.detach())


def test_gradients_by_images_are_the_same_however_many_passes_are_taken_again(kind: str) -> None:
    """Attacks on a classifier with several noise samples: the graphs are not held, but computed again."""
    learner, episode = make(kind, perturbation="metadropout"), make_episode()
    x, y, query_x, _ = episode.tensors()
    classify = learner.adapt(x, y, mc_samples=2, generator=noise())
    images, direction = query_x.clone().requires_grad_(), torch.randn(query_x.shape, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(classify(images).square().sum(), images)
    step = 1e-8 * direction
    slope = (classify(query_x + step).square().sum() - classify(query_x - step).square().sum()) / 2e-8
    assert float((gradient * direction).sum()) == pytest.approx(float(slope), rel=1e-5)


def test_there_are_no_logits_to_perturb_in_a_network_without_a_head() -> None:
    network = md.Conv4(None, image_size=16, channels=4)
    for name in ("metadropout", "additive", "independent-gaussian", "fixed-gaussian", "learned-variance"):
        perturbation = PERTURBATIONS[name](network)
        assert perturbation.hidden_names == tuple(f"blocks.{i}.conv" for i in range(4))
        assert not perturbation.head_noise
        assert not [parameter for parameter, _ in perturbation.named_parameters() if "head" in parameter]


def test_a_users_network_names_the_identity_at_its_end() -> None:
    model = UsersModel()
    for head in (None, "fc"):
        with pytest.raises(
            ValueError, match=r"takes 'fc' for a head that gives logits: let UsersModel end in an nn.Id"
        ):
            md.ProtoNet(model, md.MetaDropout(model, head=head))
    model.fc = torch.nn.Identity()  # type: ignore[assignment]
    learner = md.ProtoNet(model, md.MetaDropout(model, head="fc")).double()
    assert learner.perturbation.hidden_names == ("stem", "body.0", "hidden")
    assert learner.changed_buffers() == ["network.bn.running_mean", "network.bn.running_var"]
    check_gradients(learner, make_episode())


# A whole life on the command line.


def write_recipe(recipe: Path, kind: str, perturbation: str = "none", **training: Any) -> None:
    config = yaml.safe_load(recipe.read_text())
    config |= {"learner": {"name": kind.partition("-")[0], **KINDS[kind]}, "perturbation": {"name": perturbation}}
    config["network"] |= {"norm": "running"}
    config["episode"] |= {"protocol": "inductive", "train_way": 5, "train_query": 3}
    config["training"] |= training
    recipe.write_text(yaml.safe_dump(config))


def test_a_run_is_the_same_killed_and_resumed_on_threads_and_on_processes(
    kind: str, recipe: Path, tmp_path: Path
) -> None:
    write_recipe(recipe, kind, iterations=8, checkpoint_every=1, meta_batch=3)
    whole, killed, processes = tmp_path / "whole", tmp_path / "killed", tmp_path / "processes"
    assert main(["train", str(recipe), "--out", str(whole)]) == 0
    averages = {name: value for name, value in weights(whole).items() if "running_" in name}
    assert len(averages) == 8
    for name, value in averages.items():
        assert not torch.equal(value, torch.full_like(value, float(name.endswith("var")))), name

    process = start("train", recipe, "--out", killed)
    wait_for(lambda: (path := latest_checkpoint(killed / "checkpoints")) and iteration_of(path) >= 2, process)
    process.send_signal(signal.SIGKILL)
    finish(process)
    assert main(["train", "--resume", str(killed), "--machine.threads", "2"]) == 0
    assert_same_weights(whole, killed)
    out, err = finish(start("train", recipe, "--out", processes, processes=2))
    assert "trained to iteration 8" in out, err
    assert_same_weights(whole, processes)


def test_a_run_is_evaluated_at_any_way_attacked_and_reported(
    kind: str, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_recipe(recipe, kind, iterations=2)
    run, page = tmp_path / "run", tmp_path / "report.html"
    assert main(["train", str(recipe), "--out", str(run)]) == 0
    assert main(["evaluate", str(run), "--episodes", "3"]) == 0
    assert main(["evaluate", str(run), "--episodes", "3", "--episode.way", "6", "--episode.shot", "2"]) == 0
    attack = ["attack", str(run), "--episodes", "1", "--steps", "2", "--norm", "linf", "--epsilon", "0.1"]
    assert main(attack) == 0
    assert main(["report", str(run), "--out", str(page)]) == 0
    assert {"protonet": "Prototypical Networks", "matching": "Matching Networks"}[kind.partition("-")[0]] in (
        page.read_text()
    )
    assert main(["figures", str(run)]) == 1
    assert "figures look into inner steps" in capsys.readouterr().err
