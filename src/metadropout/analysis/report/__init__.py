"""Reports: what run folders hold, gathered as plain data, compared, and put on one page that needs nothing else."""

from metadropout.analysis.report.comparison import Setting, compare
from metadropout.analysis.report.folders import Gap, Picture, RunRecord, read_pictures, read_runs
from metadropout.analysis.report.page import Report, render

__all__ = ["Gap", "Picture", "Report", "RunRecord", "Setting", "compare", "read_pictures", "read_runs", "render"]
