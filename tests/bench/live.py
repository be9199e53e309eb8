"""CPU and wall time of the judge beside a training: its start, and one judgement, by the number of modules.

python tests/bench/live.py --modules 6 60 560
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from fp8debug.trackers.judging import Judge
from tests.synthetic import build


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", type=int, nargs="+", default=[6, 60])
    options = parser.parse_args()
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import fp8debug.trackers.judging"], check=True)
    print(f"start of the process: {time.perf_counter() - begun:.2f} s")
    for count in options.modules:
        with tempfile.TemporaryDirectory() as folder:
            modules = [(f"blocks.{number}.mlp.up", 256, 256) for number in range(count)]
            build(Path(folder) / "run", num_steps=20, every=2, modules=modules)
            judge = Judge(str(Path(folder) / "run"))
            for name in ("first", "second"):
                begun, cpu = time.perf_counter(), time.process_time()
                judge.step()
                cpu, wall = time.process_time() - cpu, time.perf_counter() - begun
                print(f"{count} modules, {name} judgement: {cpu:.2f} s CPU, {wall:.2f} s")
                judge._last = -1


if __name__ == "__main__":
    main()
