"""Masks that are drawn once per task: which weights a task may change."""

import metadropout as md


@md.register("learner", "toy-masks")
class MaskedMAML(md.MAML):
    """MAML that changes half of the weights, drawn afresh for every task and kept through all its steps."""

    is_random = True

    def inner_init(self, weights, noise):
        stream = noise.fork().stream(0, 0)
        return {n: (stream.normal(weights[n].shape, weights[n]) > 0).to(weights[n]) for n in self.adapted_names}

    def inner_step(self, weights, gradients, *, loss, state, step):
        masked = {name: state[name] * gradient for name, gradient in gradients.items()}
        return super().inner_step(weights, masked, loss=loss, state=state, step=step)

    def samples_used(self, asked=None):
        return super().samples_used(asked) if self.perturbation.traits.random else 1
