"""Several perturbations at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from metadropout.perturbations.base import Pass, Perturbation, Weights, merged


class Combined(Perturbation):
    """Applies several perturbations that act on different things, one after the other: Meta-dropout and mixup, say.

    Two that act on the same thing (both on features, say) are refused: neither paper says in which order they go.

    Args:
        network: any module.
        parts: perturbations to combine, or descriptions of them as in a recipe, where this is a list such as
            [{name: metadropout}, {name: mixup, gamma: 0.2}].
    """

    title = "several perturbations"

    def __init__(self, network: nn.Module, *, parts: Sequence[Any]) -> None:
        super().__init__(network)
        built = [part if isinstance(part, Perturbation) else _build(network, part) for part in parts]
        _refuse_conflicts(built)
        self.parts = nn.ModuleList(built)
        self.traits = merged([part.traits for part in built])

    def _each(self, context: Pass) -> list[tuple[Perturbation, Pass]]:
        """Pair each part with its own view of the pass: its weights, and notes of its own."""
        views = []
        for number, part in enumerate(self.parts):
            assert isinstance(part, Perturbation)
            prefix = f"parts.{number}."
            weights = {n.removeprefix(prefix): w for n, w in context.weights.items() if n.startswith(prefix)}
            # Parts that draw nothing themselves get no streams, as they would when used alone.
            streams = context.streams if part.traits.random else ()
            notes = context.notes.setdefault(prefix, {})
            views.append((part, replace(context, weights=weights, streams=streams, notes=notes)))
        return views

    @property
    def sites(self) -> Sequence[str]:
        return list(dict.fromkeys(name for part in self.parts for name in part.sites))  # type: ignore[union-attr]

    @property
    def input_sites(self) -> Sequence[str]:
        return list(dict.fromkeys(name for part in self.parts for name in part.input_sites))  # type: ignore[union-attr]

    @property
    def adapted_names(self) -> list[str]:
        return [f"parts.{i}.{name}" for i, part in enumerate(self.parts) for name in part.adapted_names]  # type: ignore[union-attr]

    def check_calls(self, outputs: Sequence[str], inputs: Sequence[str], as_wide: Collection[str]) -> None:
        for part in self.parts:
            assert isinstance(part, Perturbation)
            sites, input_sites = part.sites, part.input_sites
            part.check_calls([n for n in outputs if n in sites], [n for n in inputs if n in input_sites], as_wide)

    def change_images(self, x: Tensor, y: Tensor, classify: Callable[[Tensor], Tensor]) -> Tensor:
        for part in self.parts:
            x = part.change_images(x, y, classify)  # type: ignore[operator]
        return x

    def change_weights(self, theta: Weights, context: Pass) -> Weights:
        for part, view in self._each(context):
            theta = part.change_weights(theta, view)
        return theta

    def before(self, name: str, h: Tensor, context: Pass) -> Tensor:
        for part, view in self._each(context):
            if name in part.input_sites:
                h = part.before(name, h, view)
        return h

    def after(self, name: str, h: Tensor, f: Tensor, context: Pass) -> Tensor:
        for part, view in self._each(context):
            if name in part.sites:
                f = part.after(name, h, f, view)
        return f

    def label_loss(self, logits: Tensor, y: Tensor, context: Pass) -> Tensor:
        for part, view in self._each(context):
            if _has_label_loss(part):
                return part.label_loss(logits, y, view)
        return super().label_loss(logits, y, context)

    def penalty(self, context: Pass) -> Tensor | None:
        terms = [term for part, view in self._each(context) if (term := part.penalty(view)) is not None]
        return sum(terms[1:], terms[0]) if terms else None


def parts_of(perturbation: Perturbation) -> list[Perturbation]:
    """Return the perturbations that act by themselves: those that are combined, or the only one."""
    found = [part for part in perturbation.modules() if isinstance(part, Perturbation)]
    return [part for part in found if not isinstance(part, Combined)]


def _refuse_conflicts(parts: Sequence[Perturbation]) -> None:
    acted_on: dict[str, str] = {}
    for part in parts:
        name = type(part).__name__
        if isinstance(part, Combined):
            raise ValueError("a combination cannot be a part of another one; list all parts in one")
        if not part.traits.changes:
            raise ValueError(
                f"{name} says that it acts on nothing: leave it out, or name what it acts on, of features, "
                "weights, labels and images: traits = Traits(changes=(...))"
            )
        for target in dict.fromkeys((*part.traits.changes, *(["labels"] if _has_label_loss(part) else []))):
            if target in acted_on:
                raise ValueError(
                    f"{acted_on[target]} and {name} cannot be combined: both act on the {target}, "
                    "and which comes first would matter"
                )
            acted_on[target] = name


def _has_label_loss(part: Perturbation) -> bool:
    return type(part).label_loss is not Perturbation.label_loss


def _build(network: nn.Module, description: Any) -> Perturbation:
    from metadropout.options import check_options  # noqa: PLC0415
    from metadropout.perturbations import PERTURBATIONS  # noqa: PLC0415 (the registry lists this file, too)

    if not isinstance(description, Mapping):
        raise ValueError(f"{description!r} cannot be a part of a combination: write {{name: metadropout}}, say")
    options = dict(description)
    name = options.pop("name", None)
    if name not in PERTURBATIONS or name == "combined":
        raise ValueError(f"'{name}' cannot be a part of a combination; known are: {', '.join(PERTURBATIONS)}")
    part = PERTURBATIONS[name]
    built: Perturbation = part(network, **check_options(part, options, f"perturbation.parts.{name}"))
    return built
