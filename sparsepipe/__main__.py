"""``python -m sparsepipe`` is the command ``sparsepipe``."""

from sparsepipe.cli import main

if __name__ == "__main__":
    main()
