"""A run in object storage is read as one on disk is, against a server that speaks S3 on loopback."""

from __future__ import annotations

import builtins
import re
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from fp8debug import Run
from fp8debug.errors import RecordError, RunError, UsageError
from fp8debug.store import locations
from fp8debug.store.dump_files import dumps_at, dumps_of, file_name, rank_folder
from fp8debug.store.read.resumed import open_runs
from fp8debug.store.speed_file import write_speed
from fp8debug.store.write.writer import RunWriter
from fp8debug_cli.main import status
from tests.store.recording import record
from tests.store.test_dump_files import written
from tests.synthetic import Plan, write

pytest.importorskip("s3fs")
pytest.importorskip("moto")

COMMANDS = (
    ("show", "--format", "csv"),
    ("coverage",),
    ("triage", "--select", "F113", "--format", "html"),
    ("fallback", "--to", "json"),
    ("calibrate",),
    ("measure",),
)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Start the server, which takes a free port and says which, and end it."""
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        found = next((m[0] for line in server.stderr if (m := re.search(r"http://127\.0\.0\.1:\d+", line))), None)
        assert found is not None, "the server ended"
        reader = Thread(target=deque, args=(server.stderr, 0))  # it logs each request, and waits for ever once a pipe is full
        reader.start()
        yield found
        server.terminate()
        reader.join()


@pytest.fixture(autouse=True)
def environment(address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    import s3fs

    for name, value in {
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
    }.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    locations._LISTED.clear()
    yield
    s3fs.S3FileSystem.clear_instance_cache()


def upload(folder: Path, address: str) -> None:
    import s3fs

    store = s3fs.S3FileSystem()
    bucket = address.removeprefix("s3://").partition("/")[0]
    if not store.exists(bucket):
        store.mkdir(bucket)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            store.pipe(f"{address}/{path.relative_to(folder)}", path.read_bytes())
    store.invalidate_cache()


@pytest.fixture(scope="module")
def plan() -> Plan:
    return Plan(num_steps=4, every=2, modules=(("blocks.0.up", 128, 256),))


def test_a_run_in_a_bucket_equals_the_run_on_disk(tmp_path: Path, plan: Plan) -> None:
    local = tmp_path / "exp [1]*"
    write(local, plan)
    written(rank_folder(local, 7, 0) / file_name("m", "fprop", "input"))
    upload(local, "s3://bucket/runs/exp [1]*")
    run, here = Run("s3://bucket/runs/exp [1]*"), Run(local)
    assert (run.name, run.problems, run.ranks, run.manifest) == (here.name, [], [0], here.manifest)
    assert run.table().equals(here.table()) and run.modules == here.modules
    assert repr(run) == "Run('s3://bucket/runs/exp [1]*')"
    (dump,), (same,) = dumps_of(run, "m"), dumps_of(here, "m")
    assert (dump.values("reference") == same.values("reference")).all()
    assert [str(d.path) for d in dumps_at(str(run.path / "dumps"))] == [str(dump.path)]


def test_every_reading_command_prints_the_same(tmp_path: Path, plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "exp", plan)
    dump = rank_folder(tmp_path / "exp", 2, 0) / file_name("m", "fprop", "input")
    dump.parent.mkdir(parents=True)
    written(dump)
    upload(tmp_path / "exp", "s3://bucket/runs/commands/exp")
    for command, *options in COMMANDS:
        printed = []
        for path in (str(tmp_path / "exp"), "s3://bucket/runs/commands/exp"):
            place = f"{path}/dumps" if command == "measure" else path
            assert status([command, place, *options]) == 0, capsys.readouterr().err
            out, err = capsys.readouterr()
            printed.append((out.replace("s3://bucket/runs/commands", str(tmp_path)), err))
        assert printed[0] == printed[1], command
    assert status(["diff", "s3://bucket/runs/commands/exp", str(tmp_path / "exp")]) == 0


def test_files_that_a_user_names_are_read_there_too(tmp_path: Path, plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "up").mkdir()
    (tmp_path / "up/limits.toml").write_text("select = ['F113']\nmany = 1\n")
    (tmp_path / "up/shapes.json").write_text("[]")
    upload(tmp_path / "up", "s3://bucket/up")
    for words, wanted in (
        (["triage", "run", "--config", "s3://bucket/up/limits.toml"], "s3://bucket/up/limits.toml: unknown key 'many'"),
        (["triage", "run", "--config", "s3://bucket/none.toml"], "cannot read s3://bucket/none.toml: No such file or directory"),
        (["speed", "--shapes", "s3://bucket/up/shapes.json"], "s3://bucket/up/shapes.json holds no list of shapes"),
    ):
        assert status(words) == 2
        assert capsys.readouterr().err.startswith(f"error: {wanted}")


def test_streams_and_resumed_parts(tmp_path: Path) -> None:
    opened = record(tmp_path / "a", range(3))
    opened.flush()
    upload(tmp_path / "a", "s3://bucket/resumed/a")
    opened.close()
    record(tmp_path / "b", range(3, 5)).close()
    upload(tmp_path / "b", "s3://bucket/resumed/b")
    run = open_runs(["s3://bucket/resumed/b", "s3://bucket/resumed/a"])
    assert run.problems == [] and run.steps_range == (0, 4)


def test_damage_is_named(tmp_path: Path, plan: Plan) -> None:
    write(tmp_path / "run", plan)
    part = tmp_path / "run/rank=00000/stats/part-00000.parquet"
    (part.parent / "part-00001.parquet").write_bytes(part.read_bytes()[:-100])
    upload(tmp_path / "run", "s3://bucket/damaged")
    (problem,) = Run("s3://bucket/damaged").problems
    assert problem.startswith("s3://bucket/damaged/rank=00000/stats/part-00001.parquet cannot be read: ")


def test_a_run_that_grows_is_seen_by_refresh(tmp_path: Path, plan: Plan) -> None:
    write(tmp_path / "run", plan)
    upload(tmp_path / "run", "s3://bucket/grows")
    run = Run("s3://bucket/grows")
    other = Plan(num_steps=12, every=2, modules=plan.modules)
    write(tmp_path / "longer", other)
    upload(tmp_path / "longer", "s3://bucket/grows")
    run.refresh()
    assert run.steps_range == (0, 11)


def test_no_file_of_a_run_keeps_a_list_of_its_own(tmp_path: Path, plan: Plan) -> None:
    """A thread of the dashboard may be looking at one file of a run when another forgets the run's list."""
    write(tmp_path / "run", plan)
    upload(tmp_path / "run", "s3://bucket/watched")
    run = locations.place_of("s3://bucket/watched")
    (steps,) = run.glob("rank=*/steps/part-*")
    locations.forget(run)
    before = steps.stat().st_size
    write(tmp_path / "longer", Plan(num_steps=12, every=2, modules=plan.modules))
    upload(tmp_path / "longer", "s3://bucket/watched")
    locations.forget(run)
    assert Run("s3://bucket/watched").steps_range == (0, 11) and steps.stat().st_size != before


def test_the_dashboard_shows_runs_of_a_bucket_and_sees_them_grow(tmp_path: Path, plan: Plan) -> None:
    pytest.importorskip("dash")
    from fp8debug_dashboard.pages import runs
    from fp8debug_dashboard.web.screens import PAGES
    from fp8debug_dashboard.web.source import ServedFolder
    from fp8debug_dashboard.web.urls import View

    write(tmp_path / "exp", plan)
    upload(tmp_path / "exp", "s3://bucket/shown/exp")
    source = ServedFolder("s3://bucket/shown")
    (row,) = runs.parts(source, 60)
    assert (row["name"], row["last"], row["problems"]) == ("exp", 3, "\u2013") and row["written"].startswith("20")
    opened = source.open("exp")
    assert "No finding" in str(PAGES["overview"].layout(View("overview", "exp"), opened))
    before = source.stamp("exp")
    write(tmp_path / "longer", Plan(num_steps=12, every=2, modules=plan.modules))
    upload(tmp_path / "longer", "s3://bucket/shown/exp")
    assert source.stamp("exp") != before and source.open("exp").run.steps_range == (0, 11)


class TestMistakes:
    def line(self, *args: str, capsys: pytest.CaptureFixture[str], code: int = 3) -> str:
        assert status(list(args)) == code
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("error: ") and err.count("\n") == 1, err
        return err.removeprefix("error: ").strip()

    def test_no_such_bucket_or_folder(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        (tmp_path / "x").write_text("")
        upload(tmp_path, "s3://bucket/other")
        for path in ("s3://nowhere/run", "s3://bucket/nowhere"):
            wanted = f"{path} does not exist, neither bucket nor folder; check the address and the region"
            assert self.line("triage", path, capsys=capsys) == wanted
        said = self.line("triage", "s3://bucket/other", capsys=capsys)
        assert said == "s3://bucket/other is not a run: it has no manifest.json and no rank=... folder"

    def test_a_folder_of_runs(self, capsys: pytest.CaptureFixture[str], tmp_path: Path, plan: Plan) -> None:
        write(tmp_path / "exp", plan)
        upload(tmp_path / "exp", "s3://folder/runs/exp")
        said = self.line("show", "s3://folder/runs", capsys=capsys)
        assert said == "s3://folder/runs is a folder of runs, not a run; give one of them, e.g. s3://folder/runs/exp"

    def test_no_credentials(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        said = self.line("triage", "s3://bucket/run", capsys=capsys)
        assert said.startswith("s3://bucket/run cannot be listed: no credentials were found; set AWS_ACCESS_KEY_ID and")

    def test_no_server(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        import s3fs

        monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
        said = self.line("triage", "s3://bucket/run", capsys=capsys)
        assert said.startswith("s3://bucket/run cannot be listed: Could not connect to the endpoint URL")

    def test_s3fs_is_not_installed(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        import fsspec

        def missing(protocol: str) -> Any:
            raise ImportError("Install s3fs to access S3")

        monkeypatch.setattr(fsspec, "filesystem", missing)
        wanted = "s3://bucket/run: s3:// needs s3fs, which is not installed: pip install 'fp8debug[s3]'"
        assert self.line("triage", "s3://bucket/run", capsys=capsys, code=2) == wanted
        said = self.line("triage", "gs://bucket/run", capsys=capsys, code=2)
        assert said == "gs://bucket/run: gs:// needs gcsfs, which is not installed: pip install gcsfs"

    def test_fsspec_is_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = builtins.__import__

        def without(name: str, *args: Any, **kwargs: Any) -> Any:
            if name == "fsspec":
                raise ImportError(name)
            return real(name, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", without)
        with pytest.raises(UsageError, match=r"needs s3fs, which is not installed"):
            Run("s3://bucket/run")

    @pytest.mark.parametrize("path", ["https://host/run", "file:///etc", "memory://x/y"])
    def test_other_addresses_are_not_read(self, path: str) -> None:
        with pytest.raises(UsageError, match=r":// is not read; known are local folders and s3://"):
            Run(path)

    def test_a_store_that_fails_later_is_no_damage(self, tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
        import s3fs

        write(tmp_path / "run", plan)
        upload(tmp_path / "run", "s3://bucket/later")
        run = Run("s3://bucket/later")

        def refuse(*args: object, **kwargs: object) -> None:
            raise PermissionError("the token has expired")

        monkeypatch.setattr(s3fs.S3FileSystem, "_open", refuse)
        with pytest.raises(RunError, match=r"s3://bucket/later cannot be read: .*the token has expired"):
            run.table()
        assert run.problems == []

    def test_nothing_is_written_there(
        self, tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(RecordError, match=r"s3://bucket/new is in object storage.*record to a local folder, copy it there"):
            RunWriter("s3://bucket/new", manifest={})
        with pytest.raises(OSError, match="object storage is only read"):
            locations.place_of("s3://bucket/new").mkdir()
        write(tmp_path / "run", plan)
        upload(tmp_path / "run", "s3://bucket/verify")
        said = self.line("verify", "s3://bucket/verify", "--arms", "bf16", "--script", __file__, capsys=capsys, code=2)
        assert said == "object storage is only read; name a local place (--out, -o): s3://bucket/verify/verify"
        said = self.line("bisect", "s3://bucket/verify", "--yes", "--script", __file__, capsys=capsys, code=2)
        assert said == "object storage is only read; name a local place (--out, -o): s3://bucket/verify/bisect"
        said = self.line("compact", "s3://bucket/verify", capsys=capsys, code=2)
        only = "s3://bucket/verify is in object storage, which is only read"
        assert said == f"{only}; thin a local copy, and copy that there"
        said = self.line("fallback", "s3://bucket/verify", "--to", "json", "-o", "s3://bucket/x.json", capsys=capsys, code=2)
        assert said == "cannot write s3://bucket/x.json: object storage is only read; name a local place (--out, -o)"
        with pytest.raises(OSError, match="object storage is only read"):  # `speed` says that it was not saved
            write_speed(locations.place_of("s3://bucket/verify"), {})
        assert not list(tmp_path.glob("s3:*"))

    def test_nothing_is_recorded_there(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from fp8debug import startup
        from fp8debug.run import __main__ as run

        monkeypatch.chdir(tmp_path)
        assert run.main(["--out", "s3://bucket/new", __file__]) == 2  # before the script begins
        wanted = "s3://bucket/new is in object storage, where no step can be appended; record to a local folder, copy it there"
        assert capsys.readouterr().err == f"error: {wanted}\n"
        monkeypatch.setenv(startup.VARIABLE, "s3://bucket/new,every=3")
        startup.start()
        wanted = "object storage is only read; record to a local folder, copy it there"
        assert capsys.readouterr().err == f"fp8debug: not recorded: FP8DEBUG=s3://bucket/new,every=3: {wanted}\n"
        assert not list(tmp_path.iterdir())


def test_a_checkpoint_in_a_bucket_is_judged_as_on_disk(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    from fp8debug.checkpoints import check_checkpoint
    from tests.checkpoints import writers

    weights = writers.original()
    tensors = writers.LAYOUTS["deepseek"](weights)
    tensors[f"{writers.NAMES[1]}_scale_inv"] *= 2
    folder = writers.save_sharded(tensors, tmp_path / "model")
    (folder / "config.json").write_text('{"quantization_config": {"fmt": "e5m2"}}')
    writers.save(weights, tmp_path / "original.safetensors")
    upload(folder, "s3://checkpoints/model")
    upload(tmp_path, "s3://checkpoints/all")
    original = "s3://checkpoints/all/original.safetensors"
    here = check_checkpoint(folder, tmp_path / "original.safetensors").to_dict()
    assert {finding["code"] for finding in here["findings"]} == {"F206", "F231"}
    for path in ("s3://checkpoints/model", "s3://checkpoints/model/model.safetensors.index.json"):
        there = check_checkpoint(path, original).to_dict()
        assert (there["findings"], there["weights"]) == (here["findings"], here["weights"])
    assert check_checkpoint(original).verdict == "ok"
    with pytest.raises(RunError, match="does not exist"):
        check_checkpoint("s3://checkpoints/none")
