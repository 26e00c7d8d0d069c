"""`python -m equipoise`: the command, also from a bare checkout."""

from equipoise.cli.main import main

if __name__ == "__main__":
    main()
