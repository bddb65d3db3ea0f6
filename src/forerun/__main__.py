"""The console script, and `python -m forerun`."""

import sys


def main() -> None:
    """Run the command. Ctrl-C while its modules are still imported ends it as quietly as later."""
    try:
        from forerun.cli.main import main as command
    except KeyboardInterrupt:
        sys.exit(130)
    command()


if __name__ == "__main__":
    main()
