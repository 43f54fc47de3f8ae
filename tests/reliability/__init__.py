"""What shows that the promises of docs/reliability.md are kept: readers are fuzzed, processes killed."""
