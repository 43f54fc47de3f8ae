"""The web page: draw or drop a few examples of each class, and see what new ones are taken for.

The server keeps nothing of a visitor but a bounded cache. A request brings the examples, or the name of examples that
were brought before (`tasks.py`); one thread adapts and answers, for each visitor the newest request only (`worker.py`).
"""
