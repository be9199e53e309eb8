"""Print the folder to put on ``PYTHONPATH``."""

from pathlib import Path

if __name__ == "__main__":
    print(Path(__file__).parent / "hook")
