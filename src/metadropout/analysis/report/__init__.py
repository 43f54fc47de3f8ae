"""Reports: what run folders hold, gathered as plain data, compared, and put on one page that needs nothing else."""

from metadropout.analysis.report.comparison import Setting, compare
from metadropout.analysis.report.folders import Figures, Gap, Picture, RunSummary, read_figures, read_runs
from metadropout.analysis.report.page import Report, render

__all__ = [
    "Figures",
    "Gap",
    "Picture",
    "Report",
    "RunSummary",
    "Setting",
    "compare",
    "read_figures",
    "read_runs",
    "render",
]
