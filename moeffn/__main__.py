"""`python -m moeffn …` is the command `moeffn …`."""

from .cli import main

if __name__ == "__main__":
    main()
