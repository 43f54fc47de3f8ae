from __future__ import annotations

import platform
import subprocess
import sys

import pytest

COUNT_FAULTS = """
import resource, sys, threading, torch
import metadropout.learners  # as a run does: what else is in memory decides which blocks can be reused
from metadropout.training.allocator import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def count():
    for _ in range(20):  # until there is a free block whose alignment fits
        torch.ones(16_000_000)
    before = faults()
    for _ in range(5):
        torch.ones(16_000_000)  # 64 MB, 16,000 pages
    print(faults() - before)
if sys.argv[2] == "main":
    count()
else:
    thread = threading.Thread(target=count)
    thread.start()
    thread.join()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc gives memory back that way")
@pytest.mark.parametrize("thread", ["main", "other"])
def test_freed_blocks_are_reused_without_page_faults(thread: str) -> None:
    def faults(mode: str) -> int:
        command = [sys.executable, "-c", COUNT_FAULTS, mode, thread]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert faults("keep") < 20_000  # at most one block more than the first
    assert faults("default") > 75_000  # all five, page by page
