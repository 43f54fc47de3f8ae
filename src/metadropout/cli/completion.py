"""`metadropout completion`: lets the shell complete commands and options."""

from __future__ import annotations

import argparse

from metadropout.errors import ConfigError

EPILOG = """\
  metadropout completion bash > ~/.local/share/bash-completion/completions/metadropout
  metadropout completion zsh > ~/.zfunc/_metadropout      (a folder of fpath)
"""


def register(parser: argparse.ArgumentParser) -> None:
    """Give the command's parser its arguments."""
    parser.description = "Prints a script that lets a shell complete metadropout's commands and options."
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("shell", choices=["bash", "zsh", "tcsh"], help="which shell")
    parser.set_defaults(run=run_command)


def run_command(namespace: argparse.Namespace) -> int:
    """Print the script."""
    from metadropout.cli import build_parser  # noqa: PLC0415 (which imports this module)

    try:
        import shtab  # noqa: PLC0415 (optional)
    except ImportError:
        raise ConfigError("completions need shtab, which is not installed: pip install shtab") from None
    print(shtab.complete(build_parser(), shell=namespace.shell))
    return 0
