"""``python -m sdp``: the command line. The processes that this package starts are started by it."""

from .tools.cli import entry

if __name__ == "__main__":
    entry()
