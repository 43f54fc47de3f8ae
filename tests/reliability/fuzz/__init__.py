"""Fuzzing: readers of files from outside are given spoilt ones, and may only refuse them in the project's words.

    make fuzz                 # all readers, a minute each
    make fuzz SECONDS=300 READERS="checkpoints pickles"

A try fails on any exception but the project's own, after 5 seconds, with more than 1 GB of memory, and when the process
dies. The input is kept then, in the folder `fuzz-findings`, with the command that tries it again.
"""
