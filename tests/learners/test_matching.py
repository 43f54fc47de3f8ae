"""Matching Networks by what defines them: there is no authors' code to hold them against."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from toys import Given, given_task

import metadropout as md
from metadropout.learners.matching import FullContext
from metadropout.learners.protonet import squared_distances


def noise() -> md.SeededNoise:
    return md.SeededNoise(0)


def with_context(reads: int = 3) -> md.MatchingNet:
    torch.manual_seed(0)
    return md.MatchingNet(Given(5), fce=True, reads=reads).double()


def test_probabilities_are_the_attention_paid_to_the_images_of_a_class() -> None:
    episode = given_task(way=3, shot=2)
    probabilities = md.MatchingNet(Given())(episode).logits.exp()
    for j, f in enumerate(episode.query_x):
        cosines = [float(f @ g / (f.norm() * g.norm())) for g in episode.support_x]
        attention = [math.exp(c) / sum(map(math.exp, cosines)) for c in cosines]
        for k in range(3):
            expected = sum(a for a, y in zip(attention, episode.support_y, strict=True) if y == k)
            assert float(probabilities[j, k]) == pytest.approx(expected, rel=1e-10)
    torch.testing.assert_close(probabilities.sum(1), torch.ones(len(probabilities), dtype=torch.float64))


def test_the_other_sum_is_of_cosines_before_a_softmax_over_classes() -> None:
    episode = given_task(way=3, shot=2)
    log_probabilities = md.MatchingNet(Given(), class_sum="cosines")(episode).logits
    f, g = (x / x.norm(dim=1, keepdim=True) for x in (episode.query_x, episode.support_x))
    sums = torch.stack([(f @ g.T)[:, episode.support_y == k].sum(1) for k in range(3)], dim=1)
    torch.testing.assert_close(log_probabilities, sums.log_softmax(1))


def test_both_sums_are_the_same_at_one_shot_and_differ_at_five() -> None:
    for shot in (1, 5):
        episode = given_task(way=3, shot=shot)
        ours, codes = (md.MatchingNet(Given(), class_sum=kind)(episode).logits for kind in ("attention", "cosines"))  # type: ignore[arg-type]
        assert torch.allclose(ours, codes, rtol=1e-12, atol=1e-12) == (shot == 1)


@pytest.mark.parametrize(("way", "largest", "least_loss"), [(5, 0.405, 0.905), (20, 0.125, 2.078)])
def test_without_a_temperature_no_answer_can_be_sure(way: int, largest: float, least_loss: float) -> None:
    """Features that are not negative, at one shot: the best case is a cosine of 1 with one class and 0 with others."""
    learner, labels = md.MatchingNet(Given()), torch.arange(way)
    best = md.Episode(torch.eye(way), labels, 7 * torch.eye(way), labels)
    outcome = learner(best)
    bound = math.e / (math.e + way - 1)
    assert float(outcome.logits.exp().max()) == pytest.approx(bound) == pytest.approx(largest, abs=1e-3)
    assert float(outcome.loss) == pytest.approx(math.log(1 + (way - 1) / math.e)) == pytest.approx(least_loss, abs=1e-3)
    g = torch.Generator().manual_seed(0)
    some = md.Episode(torch.rand(way, 8, generator=g), labels, torch.rand(99, 8, generator=g), torch.arange(99) % way)
    assert float(learner(some).logits.exp().max()) < bound


def test_answers_do_not_depend_on_the_scale_of_features() -> None:
    episode = given_task()
    x, y, query_x, _ = episode.tensors()
    learner = md.MatchingNet(Given())
    torch.testing.assert_close(learner.adapt(10 * x, y)(query_x / 3), learner.adapt(x, y)(query_x))


def test_the_order_of_support_images_matters_with_full_context_only() -> None:
    episode = given_task()
    x, y, query_x, _ = episode.tensors()
    order = torch.tensor([5, 0, 3, 1, 4, 2])
    for learner in (md.MatchingNet(Given()), with_context()):
        logits = learner.adapt(x, y, generator=noise())(query_x)
        other = learner.adapt(x[order], y[order], generator=noise())(query_x)
        assert torch.allclose(logits, other, rtol=1e-12, atol=1e-12) == (learner.context is None)


def test_the_order_in_full_context_is_drawn_from_the_learners_own_noise() -> None:
    episode = given_task()
    x, y, query_x, _ = episode.tensors()
    learner = with_context()
    with pytest.raises(ValueError, match="MatchingNet draws noise: pass a generator"):
        learner.adapt(x, y)
    logits = [learner.adapt(x, y, generator=md.SeededNoise(seed))(query_x) for seed in (1, 1, 2)]
    assert torch.equal(logits[0], logits[1])
    assert not torch.allclose(logits[0], logits[2])
    own = md.RecordedNoise([], per_pass=0, own=md.SeededNoise(1).fork())
    assert torch.equal(learner.adapt(x, y, generator=own)(query_x), logits[0])


def test_full_context_with_zero_weights_is_the_plain_model() -> None:
    learner = with_context()
    assert learner.context is not None
    for parameter in learner.context.parameters():
        nn.init.zeros_(parameter)
    episode = given_task()
    torch.testing.assert_close(
        learner(episode, generator=noise()).logits, md.MatchingNet(Given())(episode).logits, rtol=1e-12, atol=1e-12
    )


def lstm(w: dict[str, Tensor], x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """An LSTM cell, written out; PyTorch's order of gates: input, forget, candidate, output."""
    gates = w["weight_ih"] @ x + w["bias_ih"] + w["weight_hh"] @ h + w["bias_hh"]
    i, f, g, o = gates.chunk(4)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def test_full_context_is_the_papers_recursion() -> None:
    """g_i = g'_i + →h_i + ←h_i; h_t = LSTM([f', r], h with the skip) + f', r by dot products, at first the mean."""
    torch.manual_seed(0)
    d, n, reads = 3, 4, 2
    context = FullContext(d, reads).double()
    support, query = torch.randn(1, n, d).double(), torch.randn(1, 2, d).double()
    cells = {name: dict(cell.named_parameters()) for name, cell in context.named_children()}
    g = support[0].clone()
    for cell, places in (("onward", range(n)), ("back", reversed(range(n)))):
        h = c = torch.zeros(d).double()
        for place in places:
            h, c = lstm(cells[cell], support[0, place], h, c)
            g[place] += h
    expected = []
    for f in query[0]:
        h = c = torch.zeros(d).double()
        for read in range(reads):
            r = (g @ h).softmax(0) @ g
            if read == 0:
                torch.testing.assert_close(r, g.mean(0))
            h, c = lstm(cells["reader"], torch.cat([f, r]), h, c)
            h = h + f
        expected.append(h)
    in_context = context(support, query)
    torch.testing.assert_close(in_context[0][0], g)
    torch.testing.assert_close(in_context[1][0], torch.stack(expected))


def test_at_one_shot_euclidean_attention_is_a_prototypical_network() -> None:
    class Euclidean(md.MatchingNet):
        def similarity(self, query: Tensor, support: Tensor) -> Tensor:
            return -squared_distances(query, support)

    for shot in (1, 2):
        episode = given_task(shot=shot)
        matching, prototypical = Euclidean(Given())(episode), md.ProtoNet(Given())(episode)
        same = torch.allclose(matching.logits.softmax(1), prototypical.logits.softmax(1), rtol=1e-10, atol=1e-12)
        assert same == (shot == 1)


def test_full_context_needs_to_know_how_many_features_there_are() -> None:
    with pytest.raises(ValueError, match="Given does not say how many: give it an attribute features"):
        md.MatchingNet(Given(), fce=True)


def test_another_sum_is_refused() -> None:
    with pytest.raises(ValueError, match="only 'attention' and 'cosines' are known"):
        md.MatchingNet(Given(), class_sum="votes")  # type: ignore[arg-type]
