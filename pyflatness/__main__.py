"""Run the command line as ``python -m pyflatness``, without its script."""

from .cli import main

if __name__ == "__main__":
    main()
