"""``python -m tracesim``: the same as the ``tracesim`` command."""

from .cli import main

if __name__ == "__main__":
    main()
