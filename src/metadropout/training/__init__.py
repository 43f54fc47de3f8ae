"""Meta-training: the outer loop, what it saves, and who computes which task."""
