"""Speed beside peers: the same work, checked to be the same, each in a process of its own, by turns.

`comparison.py` is where to start reading. An implementation is a file with a function `prepare(problem)` that returns
one meta-iteration (`ours.py`, `plain.py`, `peer_*.py`), listed in `implementations.py`.

Programs that measure one thing each, and that the documentation names, are run by `python -m metadropout.bench.NAME`:
`episodes.py`, `memory.py`, `processes.py`, `versions.py`, `where_time_goes.py`.
"""
