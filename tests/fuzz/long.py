"""Fuzzes the readers for as long as asked, guided by coverage: ``python tests/fuzz/long.py --minutes 10 [--target stream]``.

Needs atheris 3.0.0, which is no part of the development set: ``pip install atheris==3.0.0``. An input that makes a reader raise
what it must not is written to a file beside the corpus, and the same command with ``--input FILE`` repeats it.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))


def reader_of(name: str, folder: Path) -> Callable[[bytes], object]:
    """Return what takes the fuzzer's bytes."""
    from tests.fuzz import targets

    if name == "run":
        template = targets.Template(folder)

        def damage(data: bytes) -> None:
            # One byte chooses the file, then each three a place and a value.
            changes = [(int.from_bytes(data[i : i + 2], "big"), data[i + 2]) for i in range(1, len(data) - 2, 3)]
            with template.damaged(data[0] if data else 0, lambda whole: targets.changed(whole, changes)):
                targets.read_run(template.path)

        return damage
    reader: Callable[[Path, bytes], object] = {
        "stream": targets.read_stream,
        "parquet": targets.read_parquet,
        "documents": targets.read_documents,
        "dump": targets.read_dump,
    }[name]
    return lambda data: reader(folder, data)


def seeds(name: str, folder: Path) -> list[bytes]:
    """Return healthy files to start from."""
    from tests.fuzz.targets import Template

    suffixes = {"stream": ".arrows", "parquet": ".parquet", "documents": ".json", "dump": ".safetensors"}
    files = Template(folder).files
    return [path.read_bytes() for path in files if path.suffix == suffixes.get(name)]


def main() -> int:
    """Fuzz, or repeat one input; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--target", choices=["run", "stream", "parquet", "documents", "dump"], default="run")
    parser.add_argument("--input", type=Path, help="repeat what this file does, without atheris")
    parser.add_argument("--corpus", type=Path, help="folder that keeps inputs from call to call")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="fp8debug-fuzz-"))
    (folder / "work").mkdir()
    if options.input is not None:
        reader_of(options.target, folder / "work")(options.input.read_bytes())
        return 0
    try:
        atheris = importlib.import_module("atheris")
    except ImportError:
        print("fuzzing for long needs atheris, for Python 3.11 or newer: pip install atheris==3.0.0", file=sys.stderr)
        return 2
    corpus = options.corpus or folder / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    (folder / "seeds").mkdir()
    with atheris.instrument_imports(include=["fp8debug"]):  # what is imported before this is not seen
        read = reader_of(options.target, folder / "work")
    for number, data in enumerate(seeds(options.target, folder / "seeds")):
        (corpus / f"healthy-{number}").write_bytes(data)
    seconds = max(1, round(options.minutes * 60))
    words = [f"-max_total_time={seconds}", "-max_len=65536", "-timeout=60", "-rss_limit_mb=4096", f"-artifact_prefix={folder}/"]
    atheris.Setup([sys.argv[0], *words, str(corpus)], lambda data: read(bytes(data)) and None)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
