"""The whole path in one go: a small GPT in blockwise FP8 falls sick, is triaged, and trains again with the fallback list.

    python examples/demo.py [--out runs/demo] [--steps 90]

Three trainings of ``train_gpt.py`` on the same data: BF16; FP8 where from some step on a padding token meets, in one down
projection, a quantizer without amax eps (0/0 in an all-zero tile, as in lmdeploy #3652); and the same again with what
``fp8debug fallback`` writes. It fails unless triage names the planted module and cause.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

FAULT, CODE, MODULE, STEP = "zero_tile", "F103", "blocks.2.mlp.down", 40
HERE = Path(__file__).parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for the runs; an earlier demo is replaced")
    parser.add_argument("--steps", type=int, default=90)
    options, passed_on = parser.parse_known_args()
    out: Path = options.out
    if out.exists():
        if not (out / "demo.json").exists():
            print(f"error: {out} exists and is no earlier demo; choose another --out", file=sys.stderr)
            return 2
        shutil.rmtree(out)
    out.mkdir(parents=True)
    (out / "demo.json").write_text(json.dumps({"fault": FAULT, "module": MODULE, "step": STEP}))
    console = Console()

    def train(name: str, *words: str) -> dict[str, object]:
        result = out / f"{name}.result.json"
        common = ["--steps", str(options.steps), "--every", "10", "--result", str(result), *passed_on]
        run([sys.executable, str(HERE / "train_gpt.py"), *common, *words])
        found: dict[str, object] = json.loads(result.read_text())
        return found

    planted = ["--fault", FAULT, "--fault-module", MODULE, "--fault-step", str(STEP)]
    console.rule("1. BF16, the yardstick")
    bf16 = train("bf16", "--recipe", "bf16")
    console.rule(f"2. Blockwise FP8, {FAULT} planted in {MODULE} at step {STEP}")
    sick = train("sick", "--out", str(out / "sick"), *planted)
    console.rule("3. fp8debug triage: which layer, and why")
    fp8debug("triage", str(out / "sick"), "--fail-on", "never")
    found = json.loads(fp8debug("triage", str(out / "sick"), "--format", "json", "--fail-on", "never", show=False))
    console.rule("4. fp8debug fallback: what to run in another cast")
    fallback = out / "fallback.json"
    fp8debug("fallback", str(out / "sick"))
    fp8debug("fallback", str(out / "sick"), "--to", "json", "-o", str(fallback))
    console.rule("5. The same training, the same fault, with the fallback list")
    cured = train("cured", "--out", str(out / "cured"), "--fallback", str(fallback), *planted)

    table = Table(title="nats per byte, the lower the better")
    for heading in ("training", "last 10 steps", "held-out text"):
        table.add_column(heading, justify="left" if heading == "training" else "right")
    for name, result in (("BF16", bf16), ("FP8, sick", sick), ("FP8 with the fallback list", cured)):
        losses = result["losses"]
        assert isinstance(losses, list)
        table.add_row(name, f"{sum(losses[-10:]) / len(losses[-10:]):.3f}", f"{result['held_out']:.3f}")
    console.print(table)
    tool = Path(sys.executable).parent / "fp8debug"
    again = " ".join([str(HERE / "train_gpt.py"), "--steps", str(options.steps), *planted, *passed_on])
    console.print(f"See it:  {tool} dashboard {out}", soft_wrap=True, highlight=False)
    console.print(f"Prove it: {tool} verify {out / 'sick'} --seed-arg --seed --script {again}", soft_wrap=True, highlight=False)

    culprit = found["findings"][0] if found["findings"] else {}
    if (culprit.get("module"), culprit.get("code")) != (MODULE, CODE):
        print(f"error: triage was to name {MODULE} with {CODE}, it named {culprit}", file=sys.stderr)
        return 1
    return 0


def fp8debug(*words: str, show: bool = True) -> str:
    """Run the command line, print it and what it prints, and return that."""
    if show:
        print(f"$ fp8debug {' '.join(words)}", flush=True)
    output = run([sys.executable, "-m", "fp8debug_cli.main", *words])
    if show:
        print(output, flush=True)
    return output


def run(command: list[str]) -> str:
    """Run a command; its progress goes to the terminal, its output is returned; a failure ends the demo."""
    environment = {**os.environ, "COLUMNS": os.environ.get("COLUMNS", "140")}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    if done.returncode:
        print(done.stdout, end="")
        sys.exit(done.returncode)
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
