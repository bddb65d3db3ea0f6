"""The console script, and `python -m forerun`."""

import os
import sys


def open_closed_streams() -> None:
    """Open the standard streams that were closed, before another file becomes one of them: input is empty, writing to
    output is an error, and messages are dropped."""
    for name, flags in (("stdin", os.O_RDONLY), ("stdout", os.O_RDONLY), ("stderr", os.O_WRONLY)):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, flags)  # the lowest that is free
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w", closefd=False))


def main() -> None:
    """Run the command. Ctrl-C while its modules are still imported ends it as quietly as later."""
    open_closed_streams()
    try:
        from forerun.cli.main import main as command
    except KeyboardInterrupt:
        sys.exit(130)
    command()


if __name__ == "__main__":
    main()
