"""Many runs by one command: what a job is, and where jobs run: in processes of this machine, or on a cluster."""

from metadropout.jobs.job import Job, check_folders
from metadropout.jobs.local import Local
from metadropout.jobs.places import Place, Watcher
from metadropout.jobs.slurm import Slurm, slurm_status

__all__ = ["Job", "Local", "Place", "Slurm", "Watcher", "check_folders", "slurm_status"]
