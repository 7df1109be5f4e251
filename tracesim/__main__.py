"""``python -m tracesim`` and the ``tracesim`` command."""

import sys


def main() -> None:
    """Run the command line; it takes a moment to import, and Ctrl-C then ends in the same words as later."""
    try:
        from .cli import main as command
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; nothing was left half-written\n")
        sys.exit(130)
    command()


if __name__ == "__main__":
    main()
