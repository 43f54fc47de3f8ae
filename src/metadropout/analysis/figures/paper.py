"""Which of the paper's figures these are, and what runs they take."""

from __future__ import annotations

from dataclasses import dataclass

from metadropout.recipes import Table, tables

METHODS = ("maml", "metadropout")


@dataclass(frozen=True)
class PaperFigure:
    """A figure of the paper."""

    title: str
    figures: tuple[str, ...]
    """The figures of this project that show the same."""
    rows: tuple[str, ...]
    """The methods that it takes."""
    settings: tuple[str, ...]
    """Where the paper shows it."""


PAPER_FIGURES = {
    "figure4": PaperFigure(
        "decision boundaries (figure 4, and over steps and tasks)",
        ("boundaries", "boundary-steps", "boundary-tasks"),
        METHODS,
        ("miniimagenet-5way-1shot", "omniglot-20way-1shot"),
    ),
    "figure7": PaperFigure(
        "perturbed features as images (figure 7)", ("reconstructions",), METHODS[1:], ("omniglot-20way-1shot",)
    ),
    "figure8": PaperFigure(
        "deterministic and stochastic features (figure 8)",
        ("activations",),
        METHODS[1:],
        ("omniglot-20way-1shot", "miniimagenet-5way-1shot"),
    ),
}


def runs_table() -> Table:
    """Return the settings and methods whose runs figures can be drawn from: those of table 1 and the small ones."""
    table = tables()["table1"]
    return Table("figures", table.settings, {row: table.rows[row] for row in METHODS})
