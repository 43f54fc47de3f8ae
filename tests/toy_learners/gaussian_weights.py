"""Weights with a Gaussian distribution, adapted as such, and a KL term that holds them near the prior."""

import torch
from torch import nn

import metadropout as md


@md.register("learner", "toy-gaussian")
class GaussianWeights(md.MAML):
    """Adapts means and logarithms of standard deviations; every pass draws its weights from its own stream."""

    is_random = True
    samples_share_a_pass = False  # each sample has weights of its own

    def add_meta_parameters(self) -> None:
        names = [name for name in self.adapted_names if name.startswith("network.")]
        self.log_std = nn.ParameterDict(
            {n.replace(".", "/"): torch.full_like(self.get_parameter(n), -4) for n in names}
        )
        self.adapted_names += [f"log_std.{name.replace('.', '/')}" for name in names]

    def inner_init(self, weights, noise):
        return {f"prior.{name}": weights[name] for name in self.adapted_names}

    def support_loss(self, weights, x, y, *, noise, step, samples):
        stream = noise.fork().stream(step, samples[0])
        drawn, kl = dict(weights), 0.0
        for name in [n for n in self.adapted_names if n.startswith("network.")]:
            rho = f"log_std.{name.replace('.', '/')}"
            drawn[name] = weights[name] + weights[rho].exp() * stream.normal(weights[name].shape, weights[name])
            old = torch.distributions.Normal(weights[f"state.prior.{name}"], weights[f"state.prior.{rho}"].exp())
            new = torch.distributions.Normal(weights[name], weights[rho].exp())
            kl = kl + torch.distributions.kl_divergence(new, old).mean()
        return super().support_loss(drawn, x, y, noise=noise, step=step, samples=samples) + 0.1 * kl
