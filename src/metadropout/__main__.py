"""`python -m metadropout` is the same as the command `metadropout`."""

import signal
import sys


def main() -> int:
    """Run the command line; Ctrl-C while its modules are being imported ends the process without a traceback."""
    pythons_own = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if pythons_own:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from metadropout.cli import main as run  # noqa: PLC0415 (after the signal is set)

    if pythons_own:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()


if __name__ == "__main__":
    sys.exit(main())
