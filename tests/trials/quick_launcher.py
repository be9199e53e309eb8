"""A launcher for tests of what happens between processes: it trains nothing, and writes the losses that a training would have.

    python quick_launcher.py -m fp8debug.run --out DIR --arm FILE ... train.py CULPRIT [SECONDS]

FP8 loses half a nat while ``CULPRIT`` (module.gemm) is in FP8.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from fp8debug.store.write.writer import RunWriter

MODULES = [f"layers.{i}" for i in range(4)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-m")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--arm", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed-offset", type=int)
    parser.add_argument("--child", action="store_true")
    parser.add_argument("script")
    parser.add_argument("culprit")
    parser.add_argument("seconds", type=float, nargs="?", default=0.0)
    options = parser.parse_args()
    arm = json.loads(options.arm.read_text())
    cured = {f"{entry['module']}.{gemm}" for entry in arm["fallbacks"] for gemm in entry["gemms"]}
    is_sick = arm["compute"] != "bf16" and options.culprit not in cured
    modules = [{"fqn": name, "fp8": True, "in_features": 64, "out_features": 64} for name in MODULES]
    writer = RunWriter(options.out, manifest={"modules": modules})
    for step in range(options.steps):
        writer.steps({"step": step, "sampled": False, "loss": 2.0 + 0.5 * is_sick + 1 / (1 + step)})
    writer.close()
    (options.out / "arm.json").write_text("{}")
    time.sleep(options.seconds)


if __name__ == "__main__":
    main()
